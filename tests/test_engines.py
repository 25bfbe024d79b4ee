"""DDP, FSDP2, ZeRO-2 and ZeRO-3 on two gloo processes train, save and resume as one process does.

The file is its own child script, `python -m tests.test_engines ENGINE DIRECTORY CASES`: start-up costs more than
training, so one launch of each engine trains all its cases in one process group.
"""

import os
import re
import sys
import warnings
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import trl.trainer.grpo_trainer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_dro import DROConfig, DROTrainer, checkpoints
from trl_dro.aggregation import LOSS_AGG_MODES

from .cpu_engines import ONE, TYPES, keep_fsdp_on_cpu, launched_once, share_held, whole
from .test_trainer import record_inputs, scripted_rollout
from .tiny import FAST, falling_reward, length_reward, prompts, tiny_model, tiny_tokenizer


STEPS = 5
# Sums over tokens or sequences have larger gradients than means.
RATES = {"token-sum": 0.005, "seq-mean-token-sum": 0.1}


def some_rows_masked(prompts: list[str], trainer: GRPOTrainer) -> dict:
    """As scripted, of ragged lengths, with nothing to train on in some rows."""
    rollout = scripted_rollout(prompts, trainer)
    return {**rollout, "env_mask": [[int(sum(ids) % 3 > 0)] * len(ids) for ids in rollout["completion_ids"]]}


def one_rank_masked(prompts: list[str], trainer: GRPOTrainer) -> dict:
    """As scripted, with nothing to train on for the prompts that the second of two processes gets."""
    rollout = scripted_rollout(prompts, trainer)
    rows = zip(prompts, rollout["completion_ids"], strict=True)
    return {**rollout, "env_mask": [[int(prompt[0] in "abef")] * len(ids) for prompt, ids in rows]}


# How a window of 16 rows is cut. `rows` of a micro-batch (0: one on each process); `pieces`: as many generated batches
# make a window.
WHOLE = "one micro-batch"
CUTS = {
    WHOLE: {"rows": 0},
    "micro-batches of 4": {"rows": 4},
    "micro-batches of 2": {"rows": 2},
    "two generated batches": {"rows": 2, "pieces": 2},
    "four generated batches": {"rows": 1, "pieces": 4},
}
CUTS |= {f"{name}, checkpointing": {**how, "activation_checkpointing": True} for name, how in CUTS.items()}

# By name: settings, and the cuts that must come to the weights of one process that takes its windows whole.
GROUPS: dict[str, tuple[dict, list[str]]] = {
    "every cut": ({}, [*list(CUTS)[:5], "micro-batches of 4, checkpointing"]),
    "two passes": ({"num_iterations": 2}, ["micro-batches of 2, checkpointing"]),
    "two windows of each generated batch": ({"windows": 2}, ["micro-batches of 4"]),
    "clipped gradients": ({"max_grad_norm": 0.1}, ["micro-batches of 4"]),
    "anchored to a reference": (
        {"num_iterations": 2, "beta": 0.1, "anchor_policy": "reference", "from_disk": True},
        ["micro-batches of 4"],
    ),
}
FULL: dict[str, tuple[dict, list[str]]] = {}
for _mode in LOSS_AGG_MODES:
    for _rollout in (some_rows_masked, one_rank_masked):
        _name, _settings = f"{_mode}, {_rollout.__name__}", {"loss_agg_mode": _mode, "rollout": _rollout}
        GROUPS[_name] = _settings, ["micro-batches of 2"]
        _few = [name for name in CUTS if "generated" not in name]
        FULL[_name] = _settings, list(CUTS) if _rollout is some_rows_masked else _few
        FULL[f"{_name}, two passes"] = {**_settings, "num_iterations": 2}, _few
        if _rollout is some_rows_masked:
            FULL[f"{_name}, two windows"] = {**_settings, "windows": 2}, _few

# The same rollouts trained by TRL.
TRL_GROUPS: dict[str, tuple[dict, list[str]]] = {
    "bnpo": ({"loss_type": "bnpo"}, [WHOLE, "micro-batches of 2"]),
    "bnpo, one_rank_masked": ({"loss_type": "bnpo", "rollout": one_rank_masked}, [WHOLE]),
    "dapo": ({"loss_type": "dapo"}, ["micro-batches of 2", "two generated batches"]),
}


# In the child processes


def dealt(windows: int, rows: dict) -> dict:
    """In place of TRL's random order, which differs between ranks: the windows take rows in turn."""

    def deal(values):
        if values is None or getattr(values, "ndim", 1) == 0:
            return values
        order = [index for first in range(windows) for index in range(first, len(values), windows)]
        return values[order] if isinstance(values, torch.Tensor) else [values[index] for index in order]

    return {name: deal(values) for name, values in rows.items()}


def make_trainer(
    directory: Path,
    *,
    loss_type: str | None = None,
    from_disk: bool = False,
    rollout=None,
    reward=length_reward,
    **settings,
) -> GRPOTrainer:
    # Every trainer has an engine of its own, as in a process of its own.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    settings = {**FAST, "output_dir": str(directory), "ddp_timeout": 60, "shuffle_dataset": False, **settings}
    if loss_type is None:
        trainer_class, args = DROTrainer, DROConfig(dro_beta=0.5, **settings)
    else:
        trainer_class, args = GRPOTrainer, GRPOConfig(loss_type=loss_type, **settings)
    return trainer_class(
        model=str(directory.parent / "base") if from_disk else tiny_model(num_hidden_layers=2),
        reward_funcs=reward,
        args=args,
        train_dataset=prompts(),
        eval_dataset=prompts(2),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout,
    )


def gathered(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    names, parameters = zip(*trainer.model.named_parameters(), strict=True)
    return dict(zip(names, whole(list(parameters)), strict=True))


def check_engine(trainer: GRPOTrainer, engine: str) -> None:
    """That this is what it is said to be: what accelerate and DeepSpeed fall back to, they fall back to in silence."""
    state = trainer.accelerator.state
    parameters = list(trainer.model.parameters())
    if engine == ONE:
        assert state.num_processes == 1
        return
    assert state.num_processes == torch.distributed.get_world_size() == 2
    assert state.distributed_type == TYPES[engine]
    assert trainer.accelerator.device.type == "cpu"
    if engine == "cpu_fsdp2":
        assert state.fsdp_plugin.fsdp_version == 2
        assert all(isinstance(parameter, DTensor) for parameter in parameters)
        assert share_held(parameters) == pytest.approx(0.5, abs=0.01)
    elif "zero" in engine:
        assert state.deepspeed_plugin.zero_stage == int(engine[-1])
        assert trainer.deepspeed.zero_optimization_partition_weights() == (engine == "cpu_zero3")
        assert share_held(parameters) == (0.0 if engine == "cpu_zero3" else 1.0)


def trained(
    engine: str, directory: Path, how: dict, *, windows: int = 1, rollout=some_rows_masked, **settings
) -> dict:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    how = dict(how)
    rows = how.pop("rows") or 16 // world_size
    micro_batches = 16 // rows // world_size
    settings = {
        "num_iterations": 1,
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": RATES.get(settings.get("loss_agg_mode"), 0.5),
        "max_grad_norm": 1e6,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_generation": micro_batches * windows // how.pop("pieces", 1),
        "rollout": rollout,
        **how,
        **settings,
    }
    trainer = make_trainer(directory, **settings)
    seen = record_inputs(trainer)
    shuffled = trl.trainer.grpo_trainer.shuffle_sequence_dict
    with mock.patch.object(
        trl.trainer.grpo_trainer,
        "shuffle_sequence_dict",
        shuffled if windows == 1 else lambda rows: dealt(windows, rows),
    ):
        trainer.train()
    check_engine(trainer, engine)
    if isinstance(trainer, DROTrainer):
        assert trainer.model.is_gradient_checkpointing == settings.get("activation_checkpointing", False)
    assert len(seen) == STEPS * micro_batches
    tokens = sum(int((inputs["completion_mask"] * inputs["tool_mask"]).sum()) for inputs in seen)
    assert (tokens == 0) == (rollout is one_rank_masked and trainer.accelerator.process_index == 1)
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    return {"weights": gathered(trainer), "norms": norms}


LOGGED = (
    "reward",
    "policy_loss",
    "grad_norm",
    "dro/kl_k2",
    "kl",
    "dro/beta",
    "entropy_coef",
    "eval_reward",
    "eval_kl",
)


class Gathering(TrainerCallback):
    """Keeps the whole weights of every checkpoint."""

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self.weights: dict[int, dict] = {}
        trainer.add_callback(self)

    def on_save(self, args, state, control, **kwargs):
        self.weights[state.global_step] = gathered(self.trainer)


def saved_and_resumed(engine: str, directory: Path) -> dict:
    """Two runs of the same steps: one whole, and one that goes on from a checkpoint inside a generation block."""
    settings = {
        "from_disk": True,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "beta": 0.05,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "dro_target_kl": 1e-4,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.01,
        "entropy_target": 10.0,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 4,
    }
    runs = {}
    for name, checkpoint in (("whole", None), ("resumed", str(directory / "whole" / "checkpoint-2"))):
        trainer = make_trainer(directory / name, seed=42, **settings)
        torch.manual_seed(len(name))  # what is drawn next is the checkpoint's to say
        gathering = Gathering(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        check_engine(trainer, engine)
        trainer.save_model(str(directory / name / "final"))
        logs = [{key: log[key] for key in LOGGED if key in log} for log in trainer.state.log_history]
        runs[name] = {"weights": gathered(trainer), "checkpoints": gathering.weights, "logs": logs}
    return runs


def best(directory: Path) -> dict:
    """A run whose first checkpoint is the best one, which is loaded at its end."""
    trainer = make_trainer(
        directory,
        reward=falling_reward,
        max_steps=2,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        load_best_model_at_end=True,
    )
    gathering = Gathering(trainer)
    trainer.train()
    return {"loaded": gathered(trainer), "checkpoints": gathering.weights}


def evaluated_first(engine: str, directory: Path) -> dict:
    """Runs of the same steps with and without an evaluation before them; for FSDP2 also what is said of one."""
    results = {}
    for name in ("not", "on start", "by hand"):
        settings = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 2, "per_device_eval_batch_size": 4}
        trainer = make_trainer(directory, eval_on_start=name == "on start", **settings)
        if name == "by hand":
            try:
                evaluations = [trainer.evaluate()["eval_reward"], trainer.predict(prompts(2)).metrics["test_reward"]]
            except ValueError as error:
                results["said"] = str(error)
                continue
        trainer.train()
        check_engine(trainer, engine)
        trainer.evaluate()  # leaves the trainer as it is
        trainer.save_model(str(directory / name))
        if name == "on start":
            evaluations = [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log]
        weights = gathered(trainer)
        total = sum(weight.double().abs().sum().item() for weight in weights.values())
        results[name] = {
            "weights": weights,
            "ranks": gather_object([total]),
            "rewards": evaluations if name != "not" else [],
        }
    return results


def refused(directory: Path) -> str | None:
    """What is said of a run that saves an optimizer without a state."""
    try:
        make_trainer(directory, optim="sgd", save_strategy="steps")
    except ValueError as error:
        return str(error)
    return None


def main(engine: str, directory: Path, which: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    groups = GROUPS if which == "few" else FULL
    if which == "few" and engine in (ONE, "cpu_ddp"):
        groups = {**groups, **TRL_GROUPS}
    results: dict = {}
    for name, (settings, cuts) in groups.items():
        for cut in dict.fromkeys([WHOLE, *cuts]) if engine == ONE else cuts:
            results[name, cut] = trained(engine, directory / "run", CUTS[cut], **settings)
    if which == "few":
        results["resumed"] = saved_and_resumed(engine, directory)
        results["best"] = best(directory / "best")
        results["evaluated first"] = evaluated_first(engine, directory / "evaluated")
        results["refused"] = refused(directory / "refused")
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(results, directory / "results.pt")
    if engine != ONE:
        torch.distributed.destroy_process_group()


# In the tests


def prepare(directory: Path) -> None:
    tiny_model(num_hidden_layers=2).save_pretrained(directory / "base")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What an engine's launch came to; each is launched once."""
    return launched_once(tmp_path_factory, "tests.test_engines", prepare, "few")


@pytest.fixture(scope="module")
def full_results(tmp_path_factory):
    return launched_once(tmp_path_factory, "tests.test_engines", prepare, "full", timeout=3000)


def difference(one: dict, two: dict) -> float:
    """The largest one, relative to the largest weight of the same tensor."""
    assert one.keys() == two.keys()
    return max(((one[name] - two[name]).abs().max() / two[name].abs().max()).item() for name in two)


def untrained() -> dict:
    return dict(tiny_model(num_hidden_layers=2).named_parameters())


def same(run: dict, yardstick: dict) -> None:
    assert difference(run["weights"], yardstick["weights"]) < 1e-5
    assert run["norms"] == pytest.approx(yardstick["norms"], rel=1e-5)
    assert len(run["norms"]) == STEPS


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("engine", [ONE, *TYPES])
def test_any_engine_and_any_cut_come_to_the_weights_of_one_process_and_whole_windows(results, engine, group):
    yardstick = results(ONE)[group, WHOLE]
    assert difference(yardstick["weights"], untrained()) > 1e-2
    for cut in GROUPS[group][1]:
        same(results(engine)[group, cut], yardstick)


def test_the_groups_differ_from_each_other(results):
    """Else one that leaves its setting out would pass as well."""
    runs = {group: results(ONE)[group, WHOLE]["weights"] for group in GROUPS}
    alike = {
        frozenset((one, two))
        for one, two in product(runs, runs)
        if one != two and difference(runs[one], runs[two]) < 1e-3
    }
    # The first one spells the second one's settings out in its defaults.
    assert alike == {frozenset(("every cut", "token-mean, some_rows_masked"))}


@pytest.mark.slow
@pytest.mark.parametrize("engine", [ONE, *TYPES])
def test_the_whole_matrix(full_results, engine):
    yardsticks, runs = full_results(ONE), full_results(engine)
    for group, (_, cuts) in FULL.items():
        for cut in cuts:
            same(runs[group, cut], yardsticks[group, WHOLE])


# TRL's own trainer, on the same rollouts


@pytest.mark.parametrize("engine", [ONE, "cpu_ddp"])
def test_trl_s_bnpo_depends_on_the_cut_into_micro_batches(results, engine):
    runs = results(engine)
    one_cut, another = (runs["bnpo", cut]["weights"] for cut in (WHOLE, "micro-batches of 2"))
    assert difference(one_cut, another) > 0.1


def test_trl_s_bnpo_depends_on_the_number_of_processes(results):
    for group in ("bnpo", "bnpo, one_rank_masked"):
        one, two = (results(engine)[group, WHOLE]["weights"] for engine in (ONE, "cpu_ddp"))
        assert difference(one, two) > 0.1


@pytest.mark.parametrize("engine", [ONE, "cpu_ddp"])
def test_trl_s_dapo_depends_on_the_steps_per_generation(results, engine):
    runs = results(engine)
    assert difference(runs["dapo", "micro-batches of 2"]["weights"], results(ONE)["dapo", WHOLE]["weights"]) < 1e-5
    one_batch, two_batches = (runs["dapo", cut]["weights"] for cut in ("micro-batches of 2", "two generated batches"))
    assert difference(one_batch, two_batches) > 0.1


# Saving and resuming


@pytest.mark.parametrize("engine", [ONE, *TYPES])
def test_what_is_saved_holds_the_whole_weights(results, engine):
    runs, directory = results(engine)["resumed"], results(engine)["directory"]
    saved = {f"checkpoint-{step}": weights for step, weights in runs["whole"]["checkpoints"].items()}
    assert list(saved) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    saved["final"] = runs["whole"]["weights"]
    for name, weights in saved.items():
        if name != "final":
            assert checkpoints.what_is_missing(directory / "whole" / name) is None
        model = AutoModelForCausalLM.from_pretrained(directory / "whole" / name)
        assert difference(dict(model.named_parameters()), weights) == 0.0
    assert difference(saved["checkpoint-2"], saved["final"]) > 1e-3


@pytest.mark.parametrize("engine", [ONE, *TYPES])
def test_a_run_resumed_inside_a_generation_block_ends_with_the_same_weights(results, engine):
    whole_run, resumed = results(engine)["resumed"]["whole"], results(engine)["resumed"]["resumed"]
    assert list(resumed["checkpoints"]) == [4, 6]  # begun at step 2
    assert difference(resumed["weights"], whole_run["weights"]) < 1e-6
    assert resumed["logs"] == whole_run["logs"]


@pytest.mark.parametrize("engine", [ONE, *TYPES])
def test_the_best_weights_are_loaded_at_the_end(results, engine):
    run = results(engine)["best"]
    assert difference(run["loaded"], run["checkpoints"][1]) == 0.0
    assert difference(run["loaded"], run["checkpoints"][2]) > 1e-3


@pytest.mark.parametrize("engine", [ONE, *TYPES])
def test_an_evaluation_before_training_changes_nothing_in_it(results, engine):
    runs = results(engine)["evaluated first"]
    assert difference(runs["not"]["weights"], untrained()) > 1e-3
    for name in ("on start", *(["by hand"] if engine != "cpu_fsdp2" else [])):
        assert difference(runs[name]["weights"], runs["not"]["weights"]) == 0.0
        assert len(set(runs[name]["ranks"])) == 1  # no rank has weights of its own
        saved = AutoModelForCausalLM.from_pretrained(results(engine)["directory"] / "evaluated" / name)
        assert difference(dict(saved.named_parameters()), runs["not"]["weights"]) == 0.0
        assert runs[name]["rewards"][0] == pytest.approx(runs["on start"]["rewards"][0])
    if engine == "cpu_fsdp2":
        assert re.match(r"evaluate\(\) .* refused before train\(\) .* Write `eval_on_start=True`", runs["said"])


@pytest.mark.parametrize("engine", [ONE, *TYPES])
def test_a_run_that_could_not_be_resumed_is_refused(results, engine):
    said = results(engine)["refused"]
    assert (said is not None) == (engine == "cpu_fsdp2")
    assert said is None or re.match(r"optim='sgd' is refused: under FSDP2 .* Write `optim_args='momentum=0.9'`", said)


def test_state_loads_onto_a_numbered_cpu(tmp_path):
    """Which is how DeepSpeed names it, and safetensors refuses."""
    checkpoints.save_state(tmp_path, 0, {"block": torch.arange(3)})
    state = checkpoints.load_state(tmp_path, 0, torch.device("cpu:0"))
    assert torch.equal(state["block"], torch.arange(3))


@pytest.mark.parametrize("engine", [name for name in TYPES if name != "cpu_ddp"])
def test_sharded_models_generate_evaluate_and_follow_as_under_ddp(results, engine):
    """The same seeds sample the same completions, from weights that are whole only while they are used."""
    logs, of_ddp = (results(name)["resumed"]["whole"]["logs"] for name in (engine, "cpu_ddp"))
    evaluated = [log for log in logs if "eval_reward" in log]
    assert len(evaluated) == 2
    for log, expected in zip(logs, of_ddp, strict=True):
        assert log == pytest.approx(expected, rel=1e-3, abs=1e-6)


if __name__ == "__main__":
    if sys.argv[1] == "cpu_fsdp2":
        keep_fsdp_on_cpu()
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
