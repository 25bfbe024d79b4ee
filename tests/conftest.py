"""Fixtures, and the environment the tests run in."""

import os


# Nothing in the tests may reach a model hub or a tracker. Set before transformers is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from trl_dro import DROConfig

from .tiny import FAST


@pytest.fixture
def make_config(tmp_path):
    """A DROConfig for a few fast steps on a CPU; keyword arguments override."""

    def make(**overrides) -> DROConfig:
        settings = {"output_dir": str(tmp_path / "run"), **FAST, "learning_rate": 1e-2, "dro_beta": 0.5}
        return DROConfig(**{**settings, **overrides})

    return make
