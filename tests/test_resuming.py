"""Checkpoints that are refused, resumed with a warning, or resumed exactly. The kills are in `test_killed`."""

import json
import os
import re
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_dro import DROTrainer, checkpoints
from trl_dro.policy_loss import PolicyLossOutput
from trl_dro.resuming import SIGTERM_EXIT_CODE

from .test_off_policy import engine
from .test_trainer import largest_difference, make_trainer, quiet_rollouts, weights  # noqa: F401  # fixture
from .tiny import length_reward, prompts, tiny_model, tiny_tokenizer


SAVED = {
    "save_strategy": "steps",
    "save_steps": 3,
    "max_steps": 6,
    "num_iterations": 4,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
}


@pytest.fixture
def saved(make_config, tmp_path):
    """A run with the checkpoints 3 and 6, the first in the middle of a generated batch."""
    trainer = make_trainer(make_config(**SAVED))
    trainer.train()
    return trainer, tmp_path / "run"


class Scaled:
    """An objective that is not a dataclass."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, inputs):
        return PolicyLossOutput(-self.scale * inputs.advantages * inputs.per_token_logps, {})


def resumed(make_config, checkpoint, **settings):
    trainer = make_trainer(make_config(**{**SAVED, **settings}))
    trainer.train(resume_from_checkpoint=str(checkpoint) if isinstance(checkpoint, Path) else checkpoint)
    return trainer


def test_trl_drifts_when_it_resumes_within_a_generated_batch(build):
    whole = build(GRPOTrainer, settings=SAVED)
    whole.train()
    again = build(GRPOTrainer, settings=SAVED)
    again.train(resume_from_checkpoint=str(Path(whole.args.output_dir, "checkpoint-3")))
    assert largest_difference(weights(whole), weights(again)) > 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rollout_is": "token", "rollout_rs": ["token_k2"], "rollout_rs_threshold": [0.01]},
        {"anchor_policy": "sampling"},
        {"log_completions": True},
        {"dataloader_num_workers": 1},
        {"gradient_accumulation_steps": 2},
        {"advantage_baseline": "soft", "dro_level": "sequence"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("quiet_rollouts")
def test_a_run_goes_on_exactly_from_within_a_generated_batch(make_config, tmp_path, settings):
    def trained(**kwargs):
        rollout = engine() if {"rollout_is", "anchor_policy"} & settings.keys() else None
        trainer = make_trainer(make_config(**{**SAVED, **settings}), rollout_func=rollout)
        trainer.train(**kwargs)
        return trainer

    whole = trained()
    again = trained(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert largest_difference(weights(whole), weights(again)) == 0.0


def test_a_reference_that_follows_the_policy_is_saved_with_it(make_config, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    settings = {**SAVED, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}

    def trained(**kwargs):
        model = Qwen3ForCausalLM.from_pretrained(tmp_path / "model")
        trainer = make_trainer(make_config(**settings), model=model)
        trainer.train(**kwargs)
        return trainer

    whole = trained()
    again = trained(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert largest_difference(weights(whole), weights(again)) == 0.0
    references = [dict(trainer.ref_model.named_parameters()) for trainer in (whole, again)]
    assert largest_difference(*references) == 0.0
    assert largest_difference(references[0], dict(tiny_model().named_parameters())) > 1e-4


def test_what_this_package_writes_is_not_pickled(saved):
    _, run = saved
    added = {path.name for path in (run / "checkpoint-3").iterdir() if path.name.startswith("trl_dro")}
    assert added == {"trl_dro_complete.json", "trl_dro_state_0.json", "trl_dro_state_0.safetensors"}


CHANGES = [
    ({"per_device_train_batch_size": 8}, "per_device_train_batch_size was 4 and is 8"),
    ({"steps_per_generation": 4}, "steps_per_generation was 2 and is 4"),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1 and is 2"),
    ({"num_generations": 2}, "num_generations was 4 and is 2"),
    ({"num_iterations": 2}, "num_iterations was 4 and is 2"),
    ({"dro_beta": 0.25}, "policy_loss.beta was 0.5 and is 0.25"),
    ({"policy_loss": "reinforce", "dro_beta": None}, "policy_loss was 'dro' and is 'reinforce'"),
    ({"loss_agg_mode": "token-sum"}, "loss_agg_mode was 'token-mean' and is 'token-sum'"),
    ({"temperature": 0.5}, "temperature was 1.0 and is 0.5"),
    ({"seed": 7}, "seed was 42 and is 7"),
    ({"scale_rewards": "group"}, "scale_rewards was 'none' and is 'group'"),
    ({"advantage_baseline": "leave-one-out"}, "advantage_baseline was 'mean' and is 'leave-one-out'"),
    ({"learning_rate": 1e-3}, "learning_rate was 0.01 and is 0.001"),
    ({"weight_decay": 0.1}, "weight_decay was 0.0 and is 0.1"),
    ({"optim": "sgd"}, "optim was .* and is 'sgd'"),
    ({"adam_beta2": 0.9}, "adam_beta2 was 0.999 and is 0.9"),
    ({"reward_weights": [2.0]}, r"reward_weights was None and is \[2.0\]"),
    ({"mask_truncated_completions": True}, "mask_truncated_completions was False and is True"),
    ({"entropy_coef": 0.01}, "entropy_coef was 0.0 and is 0.01"),
]


@pytest.mark.parametrize(("changes", "said"), CHANGES, ids=[said for _, said in CHANGES])
@pytest.mark.filterwarnings("ignore:loss_agg_mode='token-sum'", "ignore:.*scale_rewards")
def test_another_setup_is_refused_with_what_it_was(make_config, saved, changes, said):
    with pytest.raises(ValueError, match=rf"^resume_from_checkpoint=.*checkpoint-3' is refused: .*{said}.*Write"):
        resumed(make_config, saved[1] / "checkpoint-3", **changes)


def test_another_number_of_rows_or_processes_is_refused(make_config, saved):
    other = make_trainer(make_config(**SAVED), train_dataset=prompts().map(lambda row: {"prompt": row["prompt"][1:]}))
    with pytest.raises(ValueError, match=r"train_dataset_prompts was '.*' and is '.*'"):
        other.train(resume_from_checkpoint=str(saved[1] / "checkpoint-3"))
    other = make_trainer(make_config(**SAVED), reward_funcs=lambda completions, **_: [0.0] * len(completions))
    with pytest.raises(ValueError, match=r"rewards was \['length_reward'\] and is \['<lambda>'\]"):
        other.train(resume_from_checkpoint=str(saved[1] / "checkpoint-3"))
    trainer = make_trainer(make_config(**SAVED), train_dataset=prompts(31))
    with pytest.raises(ValueError, match="train_dataset_rows was 32 and is 31"):
        trainer.train(resume_from_checkpoint=str(saved[1] / "checkpoint-3"))
    marker = saved[1] / "checkpoint-3" / checkpoints.MARKER
    content = json.loads(marker.read_text())
    content["setup"]["processes"] = 2
    marker.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="processes was 2 and is 1"):
        resumed(make_config, saved[1] / "checkpoint-3")


def test_parameters_of_a_loss_of_ones_own_are_compared(make_config, tmp_path):
    loss = {"policy_loss": "tests.test_resuming.Scaled", "dro_beta": None}
    make_trainer(make_config(**SAVED, **loss, policy_loss_kwargs={"scale": 2.0})).train()
    with pytest.raises(ValueError, match=r"policy_loss\.scale was 2\.0 and is 3\.0"):
        resumed(make_config, tmp_path / "run" / "checkpoint-3", **loss, policy_loss_kwargs={"scale": 3.0})


@pytest.mark.parametrize("engine", ["FSDP2", "ZeRO-3"])
def test_another_engine_is_refused(make_config, saved, engine):
    marker = saved[1] / "checkpoint-3" / checkpoints.MARKER
    content = json.loads(marker.read_text())
    assert content["setup"]["engine"] == "replicated"
    content["setup"]["engine"] = engine
    marker.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"engine was '{engine}' and is 'replicated'"):
        resumed(make_config, saved[1] / "checkpoint-3")


def test_what_does_not_touch_the_order_of_things_may_change(make_config, saved):
    trainer = resumed(make_config, saved[1] / "checkpoint-3", max_grad_norm=0.5, max_steps=8, logging_steps=4)
    assert trainer.state.global_step == 8


def test_the_same_written_otherwise_is_the_same(make_config, saved):
    for settings in (
        {"dro_beta": None, "policy_loss_kwargs": {"beta": 0.5}},
        {"policy_loss_kwargs": {}},
        {"policy_loss_kwargs": {"huber_delta": None}},
        {"rollout_correction_preset": "disabled"},
        {"max_completion_length": 6},
    ):
        assert resumed(make_config, saved[1] / "checkpoint-3", **settings).state.global_step == 6


def test_what_a_run_does_not_go_on_from_may_be_edited(make_config, saved):
    checkpoint = saved[1] / "checkpoint-6"
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text() + "\n")
    (checkpoint / "tokenizer_config.json").unlink()
    (checkpoint / "notes.txt").write_text("mine")
    assert checkpoints.newest_complete(saved[1]) == (str(checkpoint), {})


def test_a_stream_that_was_read_to_its_end_is_not_resumed_exactly(make_config, tmp_path):
    def trained(**kwargs):
        settings = {**SAVED, "num_iterations": 1, "max_steps": 12, "save_steps": 10}
        trainer = make_trainer(make_config(**settings), train_dataset=prompts(8).to_iterable_dataset())
        trainer.train(**kwargs)
        return trainer

    trained()
    with pytest.warns(UserWarning, match="is not exact: train_dataset is a stream that had been read to its end"):
        assert trained(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-10")).state.global_step == 12


def test_an_evaluation_at_the_start_is_not_repeated(make_config, tmp_path):
    settings = {**SAVED, "eval_on_start": True, "per_device_eval_batch_size": 4}

    def evaluations(**kwargs):
        trainer = make_trainer(make_config(**settings), eval_dataset=prompts(2))
        trainer.train(**kwargs)
        return [log["step"] for log in trainer.state.log_history if "eval_reward" in log]

    assert evaluations() == evaluations(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3")) == [0]


def test_a_checkpoint_that_is_not_whole_is_left_out(make_config, saved):
    _, run = saved
    (run / "checkpoint-6" / "model.safetensors").unlink()
    with pytest.warns(
        UserWarning, match=r"Resuming from .*-3\. .*checkpoint-6 is left out: model.safetensors is miss"
    ):
        trainer = resumed(make_config, True)
    assert largest_difference(weights(trainer), weights(saved[0])) == 0.0
    os.truncate(run / "checkpoint-3" / "optimizer.pt", 10)
    with pytest.raises(ValueError, match=r"checkpoint-3' is refused: .* optimizer\.pt has 10 of \d+ bytes\. Write"):
        resumed(make_config, run / "checkpoint-3")
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / checkpoints.MARKER).unlink()
    with pytest.raises(ValueError, match=r"no whole checkpoint in .*-6 is left out.*-3 is left out"):
        resumed(make_config, True)


def test_the_newest_checkpoint_is_the_one_written_last(make_config, saved):
    _, run = saved
    resumed(make_config, run / "checkpoint-3", max_steps=5, save_steps=5)
    assert checkpoints.newest_complete(run) == (str(run / "checkpoint-5"), {})  # not the 6 that was left over
    (run / "checkpoint-5" / checkpoints.MARKER).unlink()
    newest, torn = checkpoints.newest_complete(run)
    assert (newest, list(torn)) == (str(run / "checkpoint-6"), [str(run / "checkpoint-5")])


@pytest.mark.parametrize(
    "name", ["entropy_ctrl_state.json", "model.safetensors.index.json", "latest", "shards/.metadata"]
)
def test_small_files_that_a_run_goes_on_from_are_listed(tmp_path, name):
    file = tmp_path / "checkpoint-1" / name
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    checkpoints.mark_complete(tmp_path / "checkpoint-1", exact=True, setup={})
    assert checkpoints.what_is_missing(tmp_path / "checkpoint-1") is None
    file.write_text("{")
    assert checkpoints.what_is_missing(tmp_path / "checkpoint-1") == f"{name} has 1 of 2 bytes"
    file.unlink()
    assert checkpoints.what_is_missing(tmp_path / "checkpoint-1") == f"{name} is missing"


def test_a_checkpoint_of_trl_is_no_begin_to_go_on_from(make_config, tmp_path):
    config = GRPOConfig(
        output_dir=str(tmp_path / "grpo"),
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        save_steps=1,
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
    )
    GRPOTrainer(
        model=tiny_model(),
        reward_funcs=length_reward,
        args=config,
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    ).train()
    with pytest.raises(ValueError, match=r"this checkpoint is not whole, trl_dro_complete.json is missing"):
        resumed(make_config, tmp_path / "grpo" / "checkpoint-1")


@pytest.mark.parametrize(("trainer_class", "steps"), [(GRPOTrainer, 7), (DROTrainer, 6)])
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_finished_run_takes_no_further_step(build, tmp_path, trainer_class, steps, strategy):
    settings = {**SAVED, "save_strategy": "steps", "eval_strategy": strategy, "per_device_eval_batch_size": 4}
    build(trainer_class, settings=settings, eval_dataset=prompts(2)).train()
    again = build(trainer_class, settings=settings, eval_dataset=prompts(2))
    checkpoint = str(tmp_path / "run" / "checkpoint-6")
    if trainer_class is DROTrainer:
        before = sorted(path.name for path in (tmp_path / "run").iterdir())
        with pytest.warns(UserWarning, match=r"is the end of its run \(optimizer step 6 of 6\): nothing is trained"):
            again.train(resume_from_checkpoint=checkpoint)
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
        saved = Qwen3ForCausalLM.from_pretrained(checkpoint)
        assert largest_difference(weights(again), dict(saved.named_parameters())) == 0.0
    else:
        again.train(resume_from_checkpoint=checkpoint)
    assert again.state.global_step == steps


def test_there_must_be_something_to_resume_from(make_config, tmp_path):
    with pytest.raises(ValueError, match="there is no whole checkpoint in output_dir"):
        resumed(make_config, True)
    with pytest.raises(ValueError, match=r"there is no such directory.*Write `resume_from_checkpoint='true'`"):
        resumed(make_config, tmp_path / "nowhere")
    assert resumed(make_config, False).state.global_step == 6


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({"save_only_model": True}, {"save_only_model": True}, "save_only_model"),
        ({}, {"ignore_data_skip": True}, "ignore_d"),
    ],
    ids=str,
)
def test_resuming_that_is_not_exact_says_so(make_config, tmp_path, first, second, why):
    make_trainer(make_config(**SAVED, **first)).train()
    with pytest.warns(UserWarning, match=f"is not exact: .*{why}"):
        trainer = resumed(make_config, tmp_path / "run" / "checkpoint-3", **second)
    assert trainer.state.global_step == 6


def test_old_checkpoints_go_only_once_the_new_one_is_whole(make_config, tmp_path, monkeypatch):
    deleted = []
    remove = shutil.rmtree

    def watching(path, *args, **kwargs):
        deleted.append((Path(path).name, checkpoints.newest_complete(tmp_path / "run")))
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", watching)
    make_trainer(make_config(**SAVED, save_total_limit=1)).train()
    assert [(name, newest[-12:], torn) for name, (newest, torn) in deleted] == [("checkpoint-3", "checkpoint-6", {})]


def test_a_full_disk_leaves_the_last_checkpoint(make_config, tmp_path):
    """Files may not grow beyond 20 kB from step 4 on: the model fits, the optimizer's state does not."""
    from transformers import TrainerCallback

    class Fill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = make_trainer(make_config(**SAVED, save_total_limit=1), callbacks=[Fill()])
    try:
        with pytest.raises((OSError, RuntimeError)) as raised:
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    note = raised.value.__notes__[0]
    assert re.search(
        r"checkpoint-6 could not be written \([\d.e+]+ GB are free there\)\. The newest whole checkpoint is", note
    )
    assert note.endswith("checkpoint-3.")
    with pytest.warns(UserWarning, match="checkpoint-6 is left out"):
        assert resumed(make_config, True).state.global_step == 6


# SIGTERM


def stopping(make_config, eval_dataset=None, **settings):
    """A trainer that gets SIGTERM in its fourth call for a loss."""
    trainer = make_trainer(make_config(**{**SAVED, **settings}), eval_dataset=eval_dataset)
    compute_loss, calls = trainer.compute_loss, []

    def deadly(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = deadly
    return trainer


@pytest.mark.parametrize("settings", [{}, {"enable_jit_checkpoint": True}], ids=str)
def test_sigterm_saves_and_exits(make_config, tmp_path, capfd, settings):
    before = signal.getsignal(signal.SIGTERM)
    trainer = stopping(make_config, **settings)
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == SIGTERM_EXIT_CODE == 143
    assert signal.getsignal(signal.SIGTERM) is before
    newest, torn = checkpoints.newest_complete(tmp_path / "run")
    assert (newest, torn) == (str(tmp_path / "run" / "checkpoint-4"), {})
    said = capfd.readouterr().err
    assert "SIGTERM: a checkpoint follows once all processes have done this optimizer step." in said
    assert f"Stopped by SIGTERM after 4 optimizer steps, all saved in {newest}." in said


def test_a_process_that_its_launcher_left_behind_saves_and_exits(make_config, tmp_path, monkeypatch, capfd):
    """Torch's launcher takes no process with it when it is killed."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    trainer = make_trainer(make_config(**SAVED))
    compute_loss, calls = trainer.compute_loss, []

    def left_behind(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            monkeypatch.setattr(os, "getppid", lambda: 1)
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = left_behind
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == SIGTERM_EXIT_CODE
    newest, _ = checkpoints.newest_complete(tmp_path / "run")
    assert newest == str(tmp_path / "run" / "checkpoint-4")
    said = capfd.readouterr().err
    assert said.count("The launcher has ended: a checkpoint follows") == 1
    assert f"Stopped by the end of its launcher after 4 optimizer steps, all saved in {newest}." in said


def test_a_process_without_a_launcher_may_outlive_its_shell(make_config, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    trainer = make_trainer(make_config(**SAVED))
    monkeypatch.setattr(os, "getppid", lambda: 1)  # as after `nohup python train.py &`
    trainer.train()
    assert trainer.state.global_step == 6


def test_a_stopped_run_keeps_its_last_checkpoint_beside_the_best(make_config, tmp_path):
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
        "save_total_limit": 1,
    }
    trainer = stopping(make_config, eval_dataset=prompts(2), **settings)
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-3")
    assert checkpoints.newest_complete(tmp_path / "run") == (str(tmp_path / "run" / "checkpoint-4"), {})
    saved = Qwen3ForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    assert largest_difference(weights(trainer), dict(saved.named_parameters())) == 0.0


def test_a_run_that_ended_by_epochs_says_what_to_write(make_config, tmp_path):
    settings = {**SAVED, "max_steps": -1, "num_train_epochs": 1, "save_strategy": "epoch"}
    make_trainer(make_config(**settings), train_dataset=prompts(4)).train()
    again = make_trainer(make_config(**settings), train_dataset=prompts(4))
    with pytest.warns(UserWarning, match="nothing is trained. Write a larger num_train_epochs."):
        again.train(resume_from_checkpoint=True)


def test_one_request_may_come_twice(make_config, tmp_path):
    settings = {"save_strategy": "epoch", "eval_strategy": "epoch", "per_device_eval_batch_size": 4}
    trainer = stopping(make_config, eval_dataset=prompts(2), **settings)
    compute_loss, saved = trainer.compute_loss, []

    def again(*args, **kwargs):
        loss = compute_loss(*args, **kwargs)
        if trainer._sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    write = trainer._write_checkpoint
    trainer.compute_loss = again
    trainer._write_checkpoint = lambda *args: saved.append(trainer.state.global_step) or write(*args)
    with pytest.raises(SystemExit):
        trainer.train()
    assert saved == [4]  # and not once more at the end of the epoch, nor evaluated
    assert not any("eval_reward" in log for log in trainer.state.log_history)


def test_a_later_sigterm_ends_the_run_as_ever(make_config, monkeypatch):
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    monkeypatch.setattr("trl_dro.resuming._SECONDS_OF_ONE_REQUEST", -1.0)
    try:
        trainer = stopping(make_config)
        compute_loss = trainer.compute_loss

        def again(*args, **kwargs):
            loss = compute_loss(*args, **kwargs)
            if trainer._sigterm and not received:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss

        trainer.compute_loss = again
        with pytest.raises(SystemExit):
            trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [1]


def test_a_run_that_saves_nothing_leaves_sigterm_alone(make_config, monkeypatch):
    received = []
    handlers = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        stopping(make_config, save_strategy="no").train()
    finally:
        signal.signal(signal.SIGTERM, handlers)
    assert received == [1]


def test_training_in_a_thread_works(make_config):
    trainer = make_trainer(make_config(**SAVED))
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join(timeout=60)
    assert trainer.state.global_step == 6


def test_an_error_gives_sigterm_back(make_config):
    def failing(completions, **_):
        raise RuntimeError("no")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError):
        make_trainer(make_config(**SAVED), reward_funcs=failing).train()
    assert signal.getsignal(signal.SIGTERM) is before


# State


def test_a_state_comes_back_as_it_was(tmp_path):
    batch = torch.arange(12.0).reshape(6, 2)
    state = {
        "views": [{"x": batch[:3], "none": None}, {"x": batch[3:]}],
        "tuple": (torch.zeros(2, 0), torch.tensor(3), torch.tensor([True, False])),
        "half": torch.ones(2, 3, dtype=torch.bfloat16).T,
        "numbers": [1, 2.5, float("nan"), True, "text", None],
        7: {},
    }
    checkpoints.save_state(tmp_path, 0, state)
    loaded = checkpoints.load_state(tmp_path, 0)
    assert loaded.keys() == state.keys()
    assert torch.equal(loaded["views"][1]["x"], batch[3:])
    assert loaded["views"][0]["none"] is None
    assert isinstance(loaded["tuple"], tuple)
    assert [tensor.dtype for tensor in loaded["tuple"]] == [torch.float32, torch.int64, torch.bool]
    assert loaded["tuple"][0].shape == (2, 0)
    assert loaded["half"].dtype == torch.bfloat16
    assert str(loaded["numbers"]) == str(state["numbers"])
    with pytest.raises(TypeError, match="set in the state of a checkpoint"):
        checkpoints.save_state(tmp_path, 0, {"x": {1}})
