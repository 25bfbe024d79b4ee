"""Evaluation measures rows, and leaves no trace in training. Each fault of TRL's is shown on its trainer first."""

import math
import random

import numpy
import pandas
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_dro import DROTrainer
from trl_dro.evaluation import Evaluation, reduce_batches, reduce_metrics, unlimited_copy

from .tiny import prompts


BOTH = pytest.mark.parametrize("trainer_class", [GRPOTrainer, DROTrainer])


def rows(*texts: str) -> Dataset:
    return Dataset.from_dict({"prompt": list(texts)})


def starts_with_a(prompts, **_) -> list[float]:
    return [float(prompt.startswith("a")) for prompt in prompts]


def only_of_b(prompts, **_) -> list[float | None]:
    return [1.0 if prompt.startswith("b") else None for prompt in prompts]


def scripted_lengths(prompts, trainer) -> dict:
    """Completions of 1 to 5 tokens, by the prompt's first letter."""
    ids = [[5] * ("abcde".index(prompt[0]) + 1) for prompt in prompts]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [[-1.0] * len(row) for row in ids],
    }


# Over rows, not batches


@pytest.mark.parametrize(("trainer_class", "expected"), [(GRPOTrainer, 1 / 4), (DROTrainer, 1 / 3)])
def test_the_reward_is_the_mean_over_rows(build, trainer_class, expected):
    trainer = build(trainer_class, reward_funcs=starts_with_a, eval_dataset=rows("ai=", "bi=", "ci="))
    assert trainer.evaluate()["eval_reward"] == pytest.approx(expected)


def test_rewards_that_apply_to_some_rows_are_means_over_those(build):
    held_out = rows("bi=", "bj=", "ai=", "aj=", "bk=")
    trainer = build(DROTrainer, reward_funcs=[starts_with_a, only_of_b], eval_dataset=held_out)
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/starts_with_a/mean"] == pytest.approx(2 / 5)
    assert metrics["eval_rewards/only_of_b/mean"] == pytest.approx(1)
    assert metrics["eval_reward"] == pytest.approx(1)
    assert metrics["eval_reward_std"] == pytest.approx(0, abs=1e-6)
    assert metrics["eval_rewards/starts_with_a/std"] == pytest.approx(torch.tensor([0.0, 0, 1, 1, 0] * 4).std().item())


def test_a_reward_that_applies_to_no_row_is_none(build):
    trainer = build(DROTrainer, reward_funcs=only_of_b, eval_dataset=rows("ai="))
    assert trainer.evaluate()["eval_reward"] is None


@pytest.mark.parametrize(("trainer_class", "shortest", "longest"), [(GRPOTrainer, 2, 4), (DROTrainer, 1, 5)])
def test_shortest_and_longest_are_of_all_rows(build, trainer_class, shortest, longest):
    held_out = rows("a=", "b=", "c=", "d=", "e=")
    settings = {"per_device_eval_batch_size": 1, "num_generations_eval": 1}
    trainer = build(trainer_class, rollout_func=scripted_lengths, eval_dataset=held_out, settings=settings)
    metrics = trainer.evaluate()
    if trainer_class is DROTrainer:
        assert metrics["eval_completions/min_length"] == shortest
        assert metrics["eval_completions/max_length"] == longest
    else:  # means of the batches' extremes
        assert metrics["eval_completions/min_length"] == metrics["eval_completions/max_length"] == 3
    assert metrics["eval_completions/mean_length"] == 3


def ended_by_a(prompts, trainer) -> dict:
    """Completions of 2 to 6 tokens; those of prompts that begin with an a end by themselves."""
    rollout = scripted_lengths(prompts, trainer)
    for prompt, ids in zip(prompts, rollout["completion_ids"], strict=True):
        if prompt[0] == "a":
            ids.append(2)
    rollout["logprobs"] = [[-1.0] * len(row) for row in rollout["completion_ids"]]
    return rollout


@pytest.mark.parametrize(("trainer_class", "length"), [(GRPOTrainer, 1.0), (DROTrainer, 2.0)])
def test_batches_without_a_terminated_completion_do_not_count_in_terminated_lengths(build, trainer_class, length):
    settings = {"per_device_eval_batch_size": 1, "num_generations_eval": 1}
    trainer = build(trainer_class, rollout_func=ended_by_a, eval_dataset=rows("a=", "c="), settings=settings)
    metrics = trainer.evaluate()
    for name in ("mean", "min", "max"):
        assert metrics[f"eval_completions/{name}_terminated_length"] == length


def test_terminated_lengths_are_weighted_by_the_terminated_completions():
    per_batch = {
        "completions/clipped_ratio": [0.75, 0.0, 1.0],
        "completions/mean_terminated_length": [8.0, 2.0, 0.0],
        "completions/min_terminated_length": [8.0, 2.0, 0.0],
        "completions/mean_length": [4.0, 2.0, 6.0],
    }
    assert reduce_metrics(per_batch)["completions/mean_terminated_length"] == (8 * 0.25 + 2) / 1.25
    reduced = reduce_metrics(per_batch, rows=[4, 2, 4])
    assert reduced["completions/mean_terminated_length"] == (8 * 1 + 2 * 2) / 3
    assert reduced["completions/min_terminated_length"] == 2
    assert reduced["completions/mean_length"] == (16 + 4 + 24) / 10
    nothing_ended = {name: [values[2]] for name, values in per_batch.items()}
    assert reduce_metrics(nothing_ended)["completions/mean_terminated_length"] == 0


def test_batches_are_reduced_by_what_a_name_says():
    assert reduce_batches("completions/min_length", [3.0, 1.0]) == 1
    assert reduce_batches("sampling/ratio/max", [3.0, math.nan, 5.0]) == 5
    assert reduce_batches("clip_ratio/low_min", [3.0, 2.0]) == 2
    assert reduce_batches("minutes", [3.0, 1.0]) == 2
    assert reduce_batches("reward", [1.0, 0.0], rows=[3, 1]) == 0.75
    assert reduce_batches("reward", [1.0, math.nan], rows=[1, 3]) == 1
    assert reduce_batches("reward", [1.0], rows=[3, 1]) == 1
    assert reduce_batches("reward", [math.nan]) is None
    assert reduce_batches("reward", []) is None


def test_rows_that_only_fill_the_last_batch_do_not_count():
    logs = unlimited_copy({"prompt": [], "rewards": {}, "advantages": []})
    evaluation = Evaluation("eval", logs, wanted=3, rows=[2, 2])
    for batch in ([1.0, 0.0], [0.0, 1.0]):
        logs["prompt"].extend("ab")
        logs["rewards"]["f"].extend(batch)
    metrics = evaluation.metrics({"length": [3.0, 6.0]}, ["f"], torch.tensor([2.0]))
    assert metrics["reward"] == pytest.approx(2 / 3)
    assert metrics["rewards/f/mean"] == pytest.approx(1 / 3)
    assert metrics["length"] == 4
    assert list(logs["prompt"]) == ["a", "b", "a"]


# Names


@pytest.mark.parametrize(("trainer_class", "known"), [(GRPOTrainer, False), (DROTrainer, True)])
def test_each_of_several_held_out_datasets_has_its_own_metrics(build, trainer_class, known):
    held_out = {"good": rows("ai=", "aj="), "bad": rows("bi=", "bj=")}
    trainer = build(trainer_class, reward_funcs=starts_with_a, eval_dataset=held_out)
    metrics = trainer.evaluate()
    assert ("eval_good_reward" in metrics) == known
    if known:
        assert (metrics["eval_good_reward"], metrics["eval_bad_reward"]) == (1, 0)
        assert "eval_reward" not in metrics
        assert [log.get("eval_good_reward") for log in trainer.state.log_history] == [1, None]
        assert trainer.evaluate(rows("ai="), metric_key_prefix="test")["test_reward"] == 1


def test_the_best_model_can_be_that_of_one_held_out_dataset(build):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_good_reward"}
    held_out = {"good": rows("ai=", "aj="), "bad": rows("bi=", "bj=")}
    trainer = build(DROTrainer, reward_funcs=starts_with_a, eval_dataset=held_out, settings=settings)
    trainer.train()
    assert trainer.state.best_metric == 1


@pytest.mark.parametrize(("trainer_class", "metric"), [(GRPOTrainer, "loss"), (DROTrainer, "reward")])
def test_the_best_model_is_that_with_the_best_reward(build, trainer_class, metric):
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings = {**every, "load_best_model_at_end": True, "max_steps": 3}
    trainer = build(trainer_class, eval_dataset=prompts(2), settings=settings)
    trainer.train()
    values = [log[f"eval_{metric}"] for log in trainer.state.log_history if f"eval_{metric}" in log]
    assert trainer.state.best_metric == (min if metric == "loss" else max)(values)


@pytest.mark.parametrize(("trainer_class", "after"), [(GRPOTrainer, 0.5), (DROTrainer, 0)])
def test_predict_gives_its_metrics_and_leaves_nothing_to_the_next_evaluation(build, trainer_class, after):
    trainer = build(trainer_class, reward_funcs=starts_with_a, eval_dataset=rows("bi=", "bj="))
    metrics = trainer.predict(rows("ai=", "aj=")).metrics
    assert ("test_reward" in metrics) == (trainer_class is DROTrainer)
    if trainer_class is DROTrainer:
        assert metrics["test_reward"] == 1
        assert math.isfinite(metrics["test_loss"])
    assert trainer.evaluate()["eval_reward"] == after


def test_predict_refuses_what_evaluate_refuses(build):
    trainer = build(DROTrainer, settings={"per_device_eval_batch_size": 6})
    with pytest.raises(ValueError, match="per_device_eval_batch_size=6 is refused"):
        trainer.predict(rows("ai=", "aj="))
    with pytest.raises(ValueError, match="test_dataset has no column 'prompt'"):
        build(DROTrainer).predict(Dataset.from_dict({"question": ["a"]}))


# Without a trace in training


def trained_weights(build, trainer_class, settings, before=False) -> torch.Tensor:
    trainer = build(trainer_class, eval_dataset=prompts(2), settings=settings)
    if before:
        trainer.evaluate()
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@BOTH
@pytest.mark.parametrize("when", ["at every step", "before"])
def test_evaluation_does_not_change_what_is_learned(build, trainer_class, when):
    every = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    without = trained_weights(build, trainer_class, {"max_steps": 4})
    settings = every if when == "at every step" else {"max_steps": 4}
    evaluated = trained_weights(build, trainer_class, settings, before=when == "before")
    assert torch.equal(without, evaluated) == (trainer_class is DROTrainer)


class Sampler(TrainerCallback):
    """A callback that switches the model to evaluation mode to try it out."""

    def on_step_end(self, args, state, control, model, **kwargs):
        model.eval()


@BOTH
def test_a_callback_that_samples_does_not_lose_the_metrics_of_training(build, trainer_class):
    trainer = build(trainer_class, callbacks=[Sampler()])
    trainer.train()
    logged = ["policy_loss" in log for log in trainer.state.log_history if "loss" in log]
    assert logged == [trainer_class is DROTrainer] * 2


@BOTH
def test_an_evaluation_at_the_last_step_does_not_lose_the_metrics_of_training(build, trainer_class):
    settings = {"logging_steps": 10, "eval_strategy": "steps", "eval_steps": 2}
    trainer = build(trainer_class, eval_dataset=prompts(2), settings=settings)
    trainer.train()
    assert ("reward" in trainer.state.log_history[-1]) == (trainer_class is DROTrainer)


def test_the_mode_of_the_model_is_as_before(build):
    trainer = build(DROTrainer, eval_dataset=prompts(2))
    for training in (True, False):
        trainer.model.train(training)
        trainer.evaluate()
        assert trainer.model.training == training


@pytest.mark.parametrize(("trainer_class", "expected"), [(GRPOTrainer, 1 / 3), (DROTrainer, 0)])
def test_metrics_that_were_not_logged_do_not_reach_the_next_run(build, trainer_class, expected):
    broken = [True]

    def reward(prompts, trainer_state, **_):
        if broken[0] and trainer_state.global_step == 2:
            raise RuntimeError("down")
        return [float(broken[0])] * len(prompts)

    trainer = build(trainer_class, reward_funcs=reward, settings={"logging_steps": 10, "max_steps": 4})
    with pytest.raises(Exception, match="down"):
        trainer.train()
    broken[0] = False
    trainer.train()
    assert trainer.state.log_history[-1]["reward"] == pytest.approx(expected)


def test_metrics_of_a_failed_reward_do_not_reach_the_next_run(build):
    broken = [True]

    def reward(prompts, log_metric, **_):
        log_metric("mine", 100.0 if broken[0] else 0.0)
        if broken[0]:
            raise RuntimeError("down")
        return [0.0] * len(prompts)

    trainer = build(DROTrainer, reward_funcs=reward, settings={"max_steps": 1})
    with pytest.raises(Exception, match="down"):
        trainer.train()
    broken[0] = False
    trainer.train()
    assert [log["mine"] for log in trainer.state.log_history if "mine" in log] == [0]


# Completions


@BOTH
def test_training_and_evaluation_keep_their_tables_of_completions(build, trainer_class, tmp_path, capsys):
    settings = {"log_completions": True, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    trainer = build(trainer_class, eval_dataset=prompts(6), settings=settings)
    trainer.train()
    tables = {path.name: len(pandas.read_parquet(path)) for path in (tmp_path / "run" / "completions").iterdir()}
    if trainer_class is DROTrainer:
        assert tables == {"completions_00001.parquet": 8, "eval_00001.parquet": 24}
    else:
        assert tables == {"completions_00001.parquet": 8}
    assert len(trainer._logs["prompt"]) == 8


def test_the_latest_completions_are_all_of_an_evaluation_or_the_last_batch_of_training(build):
    trainer = build(DROTrainer, eval_dataset=prompts(6))
    trainer.evaluate()
    assert len(trainer.last_completions()) == 24
    assert {prompt for prompt, _ in trainer.last_completions()} == set(prompts(6)["prompt"])
    trainer.train()
    assert len(trainer.last_completions()) == 8


@pytest.mark.parametrize(("trainer_class", "second"), [(GRPOTrainer, 1), (DROTrainer, 0)])
def test_persistent_workers_read_the_dataset_that_is_given(build, trainer_class, second):
    settings = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = build(trainer_class, reward_funcs=starts_with_a, settings=settings)
    assert trainer.evaluate(rows("ai=", "aj="))["eval_reward"] == 1
    assert trainer.evaluate(rows("bi=", "bj="))["eval_reward"] == second


def test_a_dataset_of_one_call_is_not_that_of_the_next(build):
    settings = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = build(DROTrainer, reward_funcs=starts_with_a, settings=settings, eval_dataset=rows("ai=", "aj="))
    assert trainer.evaluate(rows("bi=", "bj="))["eval_reward"] == 0
    assert trainer.evaluate()["eval_reward"] == 1
    assert trainer.predict(rows("bi=", "bj=")).metrics["test_reward"] == 0
    assert trainer.evaluate()["eval_reward"] == 1


@pytest.mark.parametrize("first", [None, "stream"])
def test_a_stream_is_predicted_in_groups(build, first):
    seen: list[list[str]] = []

    def reward(prompts, **_):
        seen.append(list(prompts))
        return [float(index) for index in range(len(prompts))]

    def stream():
        return IterableDataset.from_generator(lambda: ({"prompt": text} for text in ("ai=", "bi=")))

    trainer = build(DROTrainer, reward_funcs=reward, eval_dataset=stream() if first else None)
    trainer.predict(stream())
    (batch,) = seen
    assert sorted((batch[:4], batch[4:])) == [["ai="] * 4, ["bi="] * 4]


def test_names_of_evaluations_may_hold_a_slash(build, tmp_path, capsys):
    settings = {"log_completions": True, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    trainer = build(DROTrainer, eval_dataset={"openai/gsm8k": prompts(2)}, settings=settings)
    trainer.train()
    names = {path.name for path in (tmp_path / "run" / "completions").iterdir()}
    assert names == {"completions_00001.parquet", "eval_openai%2Fgsm8k_00001.parquet"}


@pytest.mark.parametrize("source", [random.random, numpy.random.rand], ids=["random", "numpy"])
def test_an_evaluation_leaves_the_random_numbers_of_rewards_alone(build, source):
    trainer = build(DROTrainer, eval_dataset=prompts(2), reward_funcs=lambda prompts, **_: [source() for _ in prompts])
    random.seed(0)
    numpy.random.seed(0)
    expected = [source() for _ in range(3)]
    random.seed(0)
    numpy.random.seed(0)
    got = [source()]
    trainer.evaluate()
    got.append(source())
    trainer.predict(prompts(2))
    assert [*got, source()] == expected


@BOTH
def test_an_evaluation_at_the_end_of_a_step_leaves_the_log_of_the_step(build, trainer_class):
    class Evaluating(TrainerCallback):
        trainer = None

        def on_step_end(self, args, state, control, **kwargs):
            self.trainer.evaluate()

    callback = Evaluating()
    callback.trainer = build(trainer_class, eval_dataset=prompts(2), callbacks=[callback])
    callback.trainer.train()
    losses = [log for log in callback.trainer.state.log_history if "loss" in log]
    assert len(losses) == (2 if trainer_class is DROTrainer else 0)


def test_what_is_no_dataset_is_refused(build):
    trainer = build(DROTrainer, eval_dataset={"a": prompts(2)})
    with pytest.raises(ValueError, match="eval_dataset='b' is refused: the trainer's eval_dataset has 'a'"):
        trainer.evaluate("b")
    with pytest.raises(ValueError, match="test_dataset is a dict, it must be a Dataset"):
        trainer.predict({"a": prompts(2)})
    with pytest.raises(ValueError, match="eval_dataset='a' is refused: the trainer's eval_dataset has no names"):
        build(DROTrainer, eval_dataset=prompts(2)).evaluate("a")
