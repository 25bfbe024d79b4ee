"""Fixtures, and the environment the tests run in."""

import os


# Nothing in the tests may reach a model hub or a tracker. Set before transformers is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from trl import GRPOConfig

from trl_dro import DROConfig, DROTrainer

from .tiny import FAST, length_reward, prompts, tiny_model, tiny_tokenizer


@pytest.fixture
def make_config(tmp_path):
    """A DROConfig for a few fast steps on a CPU; keyword arguments override."""

    def make(**overrides) -> DROConfig:
        settings = {"output_dir": str(tmp_path / "run"), **FAST, "learning_rate": 1e-2, "dro_beta": 0.5}
        return DROConfig(**{**settings, **overrides})

    return make


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds either trainer on the same settings."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def make(
        trainer_class,
        *,
        model=None,
        reward_funcs=length_reward,
        train_dataset=None,
        settings=None,
        tokenizer=None,
        **kwargs,
    ):
        short = {"max_completion_length": 6, "max_steps": 2, "learning_rate": 1e-2}
        base = {"output_dir": str(tmp_path / "run"), **FAST, **short, **(settings or {})}
        args = DROConfig(dro_beta=0.5, **base) if trainer_class is DROTrainer else GRPOConfig(**base)
        return trainer_class(
            model=model if model is not None else tiny_model(),
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=prompts() if train_dataset is None else train_dataset,
            processing_class=tokenizer or tiny_tokenizer(),
            **kwargs,
        )

    return make
