"""Two gloo processes train as one does. The file is its own child script: `python -m tests.test_distributed`."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset

from trl_dro import DROConfig, DROTrainer
from trl_dro.aggregation import LOSS_AGG_MODES

from .test_trainer import largest_difference, make_trainer, record_inputs, scripted_rollout, weights
from .tiny import tiny_model


ROOT = Path(__file__).parent.parent
# Sixteen rows make an optimizer step: one process takes them whole, two processes in two micro-batches each.
GEOMETRIES = {
    1: {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
    2: {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}
# Sums over tokens or sequences have larger gradients than means.
RATES = {"token-sum": 0.005, "seq-mean-token-sum": 0.1}
LOGGED = ("policy_loss", "entropy", "dro/kl_k2", "dro/log_ratio_p50")
STEPS = 4


def half_masked_rollout(prompts: list[str], trainer: DROTrainer) -> dict:
    """As scripted, with nothing to train on for the prompts that the second of two processes gets."""
    rollout = scripted_rollout(prompts, trainer)
    rows = zip(prompts, rollout["completion_ids"], strict=True)
    return {**rollout, "env_mask": [[int(prompt[0] in "abef")] * len(ids) for prompt, ids in rows]}


ROLLOUTS = {"every row trained": scripted_rollout, "one rank masked": half_masked_rollout}

# What is measured or adapted over all rows. A group of 16 completions spans the two processes.
ADAPTED = {
    "adaptive beta": {"dro_target_kl": 1e-4},
    "adaptive beta of sequences": {"dro_target_kl": 1e-3, "dro_level": "sequence"},
    "normalised weights": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "normalised weights of sequences": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "rejection": {"rollout_rs": ["token_k3"], "rollout_rs_threshold": [0.1]},
    "leave-one-out": {"advantage_baseline": "leave-one-out", "num_generations": 16},
    "soft": {"advantage_baseline": "soft", "num_generations": 16},
}
LOGGED_TOO = {
    "adaptive": ("dro/beta",),
    "normalised": ("rollout_corr/rollout_is_batch_norm_factor", "rollout_corr/rollout_is_seq_std"),
    "rejection": ("rollout_corr/rollout_rs_masked_fraction", "rollout_corr/kl"),
}


def patchy_reward(completions: list[str], **_: object) -> list[float | None]:
    """A reward that does not apply to every completion."""
    return [None if len(completion) == 3 else len(set(completion)) / 8 for completion in completions]


def trained(world_size: int, mode: str, rollout: str, output_dir: str, settings: dict | None = None) -> DROTrainer:
    config = DROConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        ddp_timeout=60,
        max_completion_length=8,
        shuffle_dataset=False,
        optim="sgd",
        learning_rate=RATES.get(mode, 0.5),
        max_grad_norm=1e6,
        max_steps=STEPS,
        num_iterations=2,
        dro_beta=0.5,
        loss_agg_mode=mode,
        **{**GEOMETRIES[world_size], "num_generations": 4, **(settings or {})},
    )
    model = tiny_model().double()
    trainer = make_trainer(config, model=model, reward_funcs=patchy_reward, rollout_func=ROLLOUTS[rollout])
    assert trainer.accelerator.num_processes == world_size
    if world_size > 1:
        assert torch.distributed.get_world_size() == world_size
        assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
    seen = record_inputs(trainer)
    trainer.train()
    tokens = sum(int((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum()) for inputs in seen)
    is_masked = rollout == "one rank masked" and trainer.accelerator.process_index == 1
    assert len(seen) == STEPS * config.gradient_accumulation_steps
    assert (tokens == 0) == is_masked
    return trainer


def evaluated(trainer: DROTrainer) -> float:
    """The held-out reward of five rows, which no two processes can share evenly."""
    trainer.reward_funcs = [lambda prompts, **_: [float(prompt.startswith("a")) for prompt in prompts]]
    trainer.args.per_device_eval_batch_size = 4
    return trainer.evaluate(Dataset.from_dict({"prompt": ["ai=", "bi=", "ci=", "di=", "ei="]}))["eval_reward"]


def main(world_size: int, path: str) -> None:
    results: dict = {}
    for mode in LOSS_AGG_MODES:
        for rollout in ROLLOUTS:
            with tempfile.TemporaryDirectory() as output_dir:
                trainer = trained(world_size, mode, rollout, output_dir)
            if trainer.accelerator.is_main_process:
                logs = [{name: log[name] for name in LOGGED} for log in trainer.state.log_history[:STEPS]]
                results[mode, rollout] = {"weights": weights(trainer), "logs": logs}
    results["eval_reward"] = evaluated(trainer)
    for name, settings in ADAPTED.items():
        with tempfile.TemporaryDirectory() as output_dir:
            trainer = trained(world_size, "token-mean", "every row trained", output_dir, settings)
        names = {*LOGGED, *LOGGED_TOO.get(name.split()[0], ())}
        history = trainer.state.log_history[:STEPS]
        logs = [{name: log[name] for name in names if name in log} for log in history]
        results[name] = {"weights": weights(trainer), "logs": logs}
        results[name]["betas"] = gather_object([trainer.policy_loss.beta])
    if trainer.accelerator.is_main_process:
        torch.save(results, path)
    if world_size > 1:
        torch.distributed.destroy_process_group()


def launch(world_size: int, path: Path) -> dict:
    command = [sys.executable]
    if world_size > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command += ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_ddp.yaml"]
        command += ["--main_process_port", str(port)]
    done = subprocess.run(
        [*command, "-m", "tests.test_distributed", str(world_size), str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return torch.load(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, dict]:
    directory = tmp_path_factory.mktemp("distributed")
    return {world_size: launch(world_size, directory / f"{world_size}.pt") for world_size in GEOMETRIES}


def same(one: dict, two: dict) -> None:
    # Qwen3's norms and rotary angles are float32 even in a float64 model, hence not 1e-10.
    assert largest_difference(one["weights"], two["weights"]) < 1e-7
    for expected, logged in zip(one["logs"], two["logs"], strict=True):
        assert logged == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("rollout", ROLLOUTS)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_two_processes_give_the_weights_and_logs_of_one(runs, mode, rollout):
    one, two = runs[1][mode, rollout], runs[2][mode, rollout]
    untrained = dict(tiny_model().double().named_parameters())
    assert largest_difference(one["weights"], untrained) > 1e-3
    same(one, two)
    # The second pass over a batch is away from its anchor, so that its distance is more than rounding.
    assert one["logs"][1]["dro/kl_k2"] > 1e-6


@pytest.mark.parametrize("name", ADAPTED)
def test_what_is_measured_over_all_rows_is_the_same_on_two_processes(runs, name):
    one, two = runs[1][name], runs[2][name]
    same(one, two)
    plain = runs[1]["token-mean", "every row trained"]
    assert largest_difference(one["weights"], plain["weights"]) > 1e-5
    for key in LOGGED_TOO.get(name.split()[0], ()):
        assert key in one["logs"][0]
    if name.startswith("adaptive"):
        assert two["betas"][0] == two["betas"][1] == pytest.approx(one["betas"][0], rel=1e-4)
        assert one["betas"][0] != 0.5


@pytest.mark.parametrize("world_size", GEOMETRIES)
def test_rows_that_are_evaluated_twice_to_fill_a_batch_count_once(runs, world_size):
    assert runs[world_size]["eval_reward"] == pytest.approx(1 / 5)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
