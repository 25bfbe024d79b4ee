"""`accelerate_configs/`: found by name, read by accelerate, and each twin for the CPU true to its GPU file."""

import argparse
import os
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config import load_config_from_file
from accelerate.utils import DeepSpeedPlugin, DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env

from trl_dro import cli


ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "accelerate_configs"
MULTI_NODE = ["--main_process_ip", "10.0.0.1", "--main_process_port", "29500", "--machine_rank", "1"]
# What accelerate launches: its launcher, processes, machines, and some of its arguments.
LAUNCHED = {
    "single_gpu": ("simple", 1, 1, {}),
    "multi_gpu": ("multi_gpu", 8, 1, {"multi_gpu": True, "use_fsdp": False}),
    "fsdp2": ("multi_gpu", 8, 1, {"use_fsdp": True, "fsdp_version": 2}),
    "zero2": ("deepspeed", 8, 1, {"zero_stage": 2, "offload_optimizer_device": "none"}),
    "zero3": ("deepspeed", 8, 1, {"zero_stage": 3, "offload_param_device": "none"}),
    "zero3_offload": ("deepspeed", 8, 1, {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}),
    "multi_node_fsdp2": ("multi_gpu", 16, 2, {"use_fsdp": True, "fsdp_version": 2, "machine_rank": 1}),
    "multi_node_zero3": ("deepspeed", 16, 2, {"zero_stage": 3, "machine_rank": 1}),
    "cpu_ddp": ("multi_gpu", 2, 1, {"multi_gpu": True, "mixed_precision": "no"}),
    "cpu_fsdp2": ("multi_gpu", 2, 1, {"use_fsdp": True, "mixed_precision": "no"}),
    "cpu_zero2": ("deepspeed", 2, 1, {"zero_stage": 2, "mixed_precision": "no"}),
    "cpu_zero3": ("deepspeed", 2, 1, {"mixed_precision": "no"}),
}
# The GPU file of each twin, and the keys in which it may differ.
TWINS = {
    "cpu_ddp": ("multi_gpu", {"mixed_precision", "num_processes"}),
    "cpu_fsdp2": ("fsdp2", {"mixed_precision", "num_processes", "fsdp_config.fsdp_cpu_ram_efficient_loading"}),
    "cpu_zero2": ("zero2", {"mixed_precision", "num_processes"}),
    "cpu_zero3": (
        "zero3",
        {
            "mixed_precision",
            "num_processes",
            *(
                f"deepspeed_config.{name}"
                for name in (
                    "deepspeed_config_file",
                    "offload_optimizer_device",
                    "offload_param_device",
                    "zero3_save_16bit_model",
                    "zero_stage",
                )
            ),
        },
    ),
    # Several machines, from one.
    "multi_node_fsdp2": ("fsdp2", {"num_machines", "num_processes"}),
    "multi_node_zero3": ("zero3", {"num_machines", "num_processes"}),
    "zero3_offload": ("zero3", {"deepspeed_config.offload_optimizer_device", "deepspeed_config.offload_param_device"}),
}


def test_the_names_are_these():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == LAUNCHED.keys()


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """What `trl-dro train --accelerate_config NAME` has accelerate launch: its launcher, and that one's arguments."""
    config = tmp_path / "config.yaml"
    settings = {
        "model_name_or_path": "unused",
        "task": "spell_backward",
        "output_dir": str(tmp_path / "run"),
        "dro_beta": 0.5,
        "use_cpu": True,
        "bf16": False,
        "num_iterations": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
    }
    config.write_text(yaml.safe_dump(settings))
    seen: list[tuple[str, argparse.Namespace]] = []
    for kind in ("simple", "multi_gpu", "deepspeed"):
        monkeypatch.setattr(launch, f"{kind}_launcher", lambda args, kind=kind: seen.append((kind, args)))

    def run(name: str) -> tuple[str, argparse.Namespace]:
        more = MULTI_NODE if name.startswith("multi_node") else []
        assert cli.main(["train", "--config", str(config), "--accelerate_config", name, *more]) == 0
        return seen[-1]

    return run


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_file_is_launched_by_its_name(launched, name):
    launcher, processes, machines, expected = LAUNCHED[name]
    used, args = launched(name)
    assert Path(args.config_file) == FOLDER / f"{name}.yaml"
    assert used == launcher
    assert (args.num_processes, args.num_machines) == (processes, machines)
    assert {key: getattr(args, key) for key in expected} == expected
    assert args.training_script == "trl_dro.train"


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_file_is_read_by_accelerate_and_says_how_it_is_used(name):
    path = FOLDER / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.num_processes == LAUNCHED[name][1]
    assert isinstance(config.distributed_type, DistributedType)
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"{name}.yaml" in line or f"--accelerate_config {name}" in line for line in head)


def flat(values: dict, prefix: str = "") -> dict:
    found: dict = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_differs_only_in_what_it_must(name):
    model, allowed = TWINS[name]
    one, two = (flat(yaml.safe_load((FOLDER / f"{file}.yaml").read_text())) for file in (model, name))
    absent = object()
    differing = {key for key in one.keys() | two.keys() if one.get(key, absent) != two.get(key, absent)}
    assert differing == allowed


@pytest.mark.parametrize("stage", [2, 3])
def test_the_twins_give_deepspeed_the_options_of_the_gpu_files(launched, monkeypatch, stage):
    found = {}
    for name in (f"zero{stage}", f"cpu_zero{stage}"):
        _, args = launched(name)
        args.main_process_port = 0
        _, environment = prepare_deepspeed_cmd_env(args)
        with monkeypatch.context() as patched:
            for key, value in environment.items():
                if key not in os.environ:
                    patched.setenv(key, value)
            found[name] = flat(DeepSpeedPlugin().deepspeed_config)
    more = {"zero_optimization.stage3_param_persistence_threshold": 0} if stage == 3 else {}
    assert found[f"cpu_zero{stage}"] == {**found[f"zero{stage}"], **more}
    assert found[f"zero{stage}"]["zero_optimization.stage"] == stage


def test_an_installed_wheel_finds_every_file(tmp_path, monkeypatch):
    """As hatchling lays a wheel out: nothing beside the package, what pyproject.toml includes inside of it."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, target in wheel["force-include"].items():
        shutil.copytree(ROOT / source, tmp_path / target)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "trl_dro" / "cli.py"))
    for name in LAUNCHED:
        assert cli.accelerate_config_path(name).is_relative_to(tmp_path)
        assert cli.accelerate_config_path(name).read_text() == (FOLDER / f"{name}.yaml").read_text()
