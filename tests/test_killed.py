"""A run that is killed and resumed ends with the weights of one that was not, bit by bit.

The file is its own child script, `python -m tests.test_killed DIRECTORY`: it imports everything once and forks a
process for each run, which dies of a signal that nothing can catch.
"""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from transformers import TrainerCallback

from trl_dro import DROConfig, DROTrainer, checkpoints, resuming

from .forks import forked, run_module
from .test_trainer import make_trainer
from .tiny import FAST, prompts, tiny_model


# Two generated batches for each epoch, four optimizer steps on each of them, two micro-batches in a step. Dropout, so
# that every pass uses random numbers; two controllers that remember.
SETTINGS = {
    **FAST,
    "dro_beta": 0.5,
    "dro_target_kl": 1e-4,
    "use_adaptive_entropy": True,
    "entropy_coef": 0.01,
    "entropy_target": 10.0,
    "disable_dropout": False,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_generations": 4,
    "num_iterations": 2,
    "max_steps": 15,
    "logging_steps": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 2,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "per_device_eval_batch_size": 4,
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(owner: object, name: str, count: int, *, before: bool = True, act: Callable[[], None] = die) -> None:
    """Kill this process before or after the call number `count` of a function."""
    function, calls = getattr(owner, name), []

    def deadly(*args, **kwargs):
        calls.append(1)
        if before and len(calls) == count:
            act()
        result = function(*args, **kwargs)
        if not before and len(calls) == count:
            act()
        return result

    setattr(owner, name, deadly)


class Deadly(TrainerCallback):
    def __init__(self, event: str, step: int, act: Callable[[], None] = die):
        setattr(self, event, lambda args, state, control, **kwargs: act() if state.global_step == step else None)


def half_a_file(tensors: dict, path: Path) -> None:
    save_file(tensors, path)
    if "checkpoint-9" in str(path):
        os.truncate(path, path.stat().st_size // 2)
        die()


def half_rotated(directory: str, **_: object) -> None:
    os.remove(Path(directory, "optimizer.pt"))
    die()


# Where the process dies, and the step of the newest whole checkpoint by then.
KILLS: dict[str, tuple[Callable[[DROTrainer], None], int]] = {
    "generating, first batch of epoch 2": (lambda t: on_call(t, "_generate_single_turn", 5), 6),
    "generated, not yet scored": (lambda t: on_call(t, "_calculate_rewards", 5), 6),
    "scored, not yet trained on": (lambda t: on_call(t, "_generate_and_score_completions", 5, before=False), 6),
    "in the middle of a window": (lambda t: on_call(t, "compute_loss", 10, before=False), 3),
    "before an optimizer step": (lambda t: t.add_callback(Deadly("on_pre_optimizer_step", 5)), 3),
    "in the middle of a generated batch": (lambda t: t.add_callback(Deadly("on_optimizer_step", 9)), 9),
    "at its end": (lambda t: t.add_callback(Deadly("on_step_end", 8)), 6),
    "in the middle of a batch of epoch 2": (lambda t: t.add_callback(Deadly("on_step_end", 14)), 12),
    "while evaluating": (lambda t: on_call(t, "prediction_step", 3, before=False), 9),
    "saving, before anything": (lambda t: on_call(t, "_save_checkpoint", 3), 6),
    "saving, model written": (lambda t: on_call(t, "save_model", 3, before=False), 6),
    "saving, optimizer written": (lambda t: on_call(t, "_save_optimizer_and_scheduler", 3, before=False), 6),
    "saving, random numbers written": (lambda t: on_call(t, "_save_rng_state", 3, before=False), 6),
    "saving, before the state": (lambda t: on_call(resuming, "save_state", 3), 6),
    "saving, half of the state": (lambda t: setattr(checkpoints, "save_file", half_a_file), 6),
    "saving, before the marker": (lambda t: on_call(resuming, "mark_complete", 3), 6),
    "saving, marker not in its place": (lambda t: on_call(Path, "replace", 3), 6),
    "saved, before the oldest is deleted": (lambda t: on_call(resuming, "rotate_checkpoints", 3), 9),
    "in the middle of deleting": (lambda t: setattr(shutil, "rmtree", half_rotated), 9),
}


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def on_rank(rank: int, kill: Callable[[DROTrainer], None]) -> Callable[[DROTrainer], None]:
    return lambda trainer: kill(trainer) if trainer.accelerator.process_index == rank else None


# SIGTERM instead, and the step after which it ends the run.
STOPS: dict[str, tuple[Callable[[DROTrainer], None], int]] = {
    "asked to stop while generating": (lambda t: on_call(t, "_generate_single_turn", 5, act=terminate), 9),
    "asked to stop in a window": (lambda t: on_call(t, "compute_loss", 3, act=terminate), 2),
    "asked to stop while saving": (lambda t: on_call(resuming, "save_state", 1, act=terminate), 4),
    "asked to stop between steps": (lambda t: t.add_callback(Deadly("on_step_end", 6, terminate)), 7),
}

# Of two processes, one is hit.
OF_TWO: dict[str, tuple[Callable[[DROTrainer], None], int]] = {
    "the first while generating": (on_rank(0, KILLS["generating, first batch of epoch 2"][0]), 6),
    "the second in a window": (on_rank(1, KILLS["in the middle of a window"][0]), 3),
    "the first in a generated batch": (on_rank(0, KILLS["in the middle of a generated batch"][0]), 9),
    "the second before its state": (on_rank(1, KILLS["saving, before the state"][0]), 6),
    "the first before the marker": (on_rank(0, KILLS["saving, before the marker"][0]), 6),
    "the second asked to stop": (on_rank(1, STOPS["asked to stop in a window"][0]), 2),
}


def train(directory: Path, *, kill: Callable[[DROTrainer], None] | None = None, resume: bool = False) -> None:
    torch.set_num_threads(1)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rows = 4 // processes
    settings = {**SETTINGS, "per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    config = DROConfig(output_dir=str(directory / "run"), **settings)
    trainer = make_trainer(
        config,
        model=tiny_model(attention_dropout=0.1),
        train_dataset=prompts(8),
        eval_dataset=prompts(2),
    )
    assert trainer.accelerator.num_processes == processes
    if processes > 1:
        assert torch.distributed.get_world_size() == processes
        assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
    if kill is not None:
        kill(trainer)
    trainer.train(resume_from_checkpoint=resume)
    rank = trainer.accelerator.process_index
    save_file(dict(trainer.model.state_dict()), directory / f"weights_{rank}.safetensors")
    (directory / f"logs_{rank}.json").write_text(json.dumps(trainer.state.log_history))


def main(directory: Path) -> None:
    results = {}
    for processes, kills in ((1, KILLS | STOPS), (2, OF_TWO)):
        whole = directory / f"whole_{processes}"
        whole.mkdir()
        assert forked(partial(train, whole), processes) == [0] * processes
        for name, (kill, _) in kills.items():
            run = directory / name.replace(" ", "_")
            run.mkdir()
            killed = forked(partial(train, run, kill=kill), processes)
            newest, torn = checkpoints.newest_complete(run / "run")
            resumed = forked(partial(train, run, resume=True), processes)
            results[name] = {"killed": killed, "newest": newest, "torn": torn, "resumed": resumed, "run": str(run)}
    (directory / "results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("killed")
    run_module("tests.test_killed", directory)
    return {"directory": directory, **json.loads((directory / "results.json").read_text())}


def logged(directory: Path, rank: int = 0) -> list[dict]:
    """What a run logged. Not the clock's numbers, nor the loss, which transformers averages from the resumption on."""
    left_out = re.compile(r".*(step_time|runtime|per_second|total_flos)|loss|train_loss")
    logs = json.loads((directory / f"logs_{rank}.json").read_text())
    return [{name: value for name, value in log.items() if not left_out.fullmatch(name)} for log in logs]


def ended_as_if_whole(results: dict, name: str, step: int, processes: int) -> list[int]:
    """Check that the resumed run equals one that was not stopped; how the stopped one ended."""
    result = results[name]
    assert result["newest"].endswith(f"checkpoint-{step}")
    assert result["resumed"] == [0] * processes
    whole, run = results["directory"] / f"whole_{processes}", Path(result["run"])
    for rank in range(processes):
        weights = f"weights_{rank}.safetensors"
        assert (run / weights).read_bytes() == (whole / weights).read_bytes()
        assert logged(run, rank) == logged(whole, rank)
    return result["killed"]


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(results, name):
    assert ended_as_if_whole(results, name, KILLS[name][1], 1) == [-signal.SIGKILL]


@pytest.mark.parametrize("name", STOPS)
def test_a_run_that_is_asked_to_stop_saves_and_can_go_on(results, name):
    assert ended_as_if_whole(results, name, STOPS[name][1], 1) == [resuming.SIGTERM_EXIT_CODE]


@pytest.mark.parametrize("name", OF_TWO)
def test_two_processes_go_on_from_where_one_of_them_was_hit(results, name):
    codes = ended_as_if_whole(results, name, OF_TWO[name][1], 2)
    if name.endswith("asked to stop"):
        assert codes == [resuming.SIGTERM_EXIT_CODE] * 2
    else:
        assert codes[int(name.startswith("the second"))] == -signal.SIGKILL


def test_kills_while_saving_leave_a_torn_checkpoint(results):
    torn = {name: list(results[name]["torn"].values()) for name in KILLS}
    for name, reasons in torn.items():
        begun = name.startswith("saving, ") and name != "saving, before anything"
        assert (len(reasons) == 1) == begun, (name, reasons)
        assert all("was not written to the end" in reason for reason in reasons)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
