"""Data, rewards and rollouts that cannot be right are refused by name, with the row they are in."""

import numpy
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset

from trl_dro import DROConfig, DROTrainer, reward_checks
from trl_dro.reward_checks import checked_reward, distinct_names

from .test_inherited_data_faults import chat_tokenizer, conversation
from .test_inherited_faults import gpt2, scripted
from .tiny import FAST, length_reward, prompts, tiny_tokenizer


# What is given to the trainer, refused before anything is loaded


def refused(match: str, tmp_path, settings=None, **kwargs) -> None:
    """The trainer is never built: a model of this name would not be found."""
    given = {
        "model": "no/such-model",
        "reward_funcs": length_reward,
        "train_dataset": prompts(),
        "processing_class": tiny_tokenizer(),
        **kwargs,
    }
    args = DROConfig(dro_beta=0.5, output_dir=str(tmp_path / "run"), **{**FAST, **(settings or {})})
    with pytest.raises(ValueError, match=match):
        DROTrainer(args=args, **given)


TYPES = [
    (None, "train_dataset is missing, it must be a Dataset"),
    ("name", "train_dataset is a str, it must be a Dataset"),
    ([{"prompt": "a="}] * 8, r"train_dataset is a list, .*Dataset.from_list"),
    (
        DatasetDict({"train": prompts(), "test": prompts(2)}),
        r"DatasetDict of the splits 'train', 'test', .*train_dataset=dataset\['train'\]",
    ),
    ({"first": prompts()}, r"dict of the splits 'first', .*train_dataset=dataset\['first'\]"),
]


@pytest.mark.parametrize(("dataset", "message"), TYPES, ids=["None", "text", "list", "DatasetDict", "dict"])
def test_what_is_no_dataset_is_refused_with_what_to_pass(tmp_path, dataset, message):
    refused(message, tmp_path, train_dataset=dataset)


EMPTY = Dataset.from_dict({"prompt": []})
EVALUATION = [
    ({}, None, "eval_strategy='steps' is refused: there is no eval_dataset"),
    ({}, EMPTY, "eval_dataset has 0 rows"),
    ({}, {"easy": prompts(2), "hard": EMPTY}, r"eval_dataset\['hard'\] has 0 rows"),
    ({}, {}, "eval_dataset={} is refused"),
    ({"eval_strategy": "no"}, "name", "eval_dataset='name' is refused"),
    ({"eval_strategy": "no"}, [prompts(2)], "(?s)^eval_dataset=.* is refused"),
    ({"eval_strategy": "no"}, {"a": prompts(2), "b": [1, 2]}, r"eval_dataset\['b'\]=\[1, 2\] is refused"),
    ({"eval_strategy": "no", "eval_on_start": True}, None, "eval_on_start=True is refused: there is no eval_dataset"),
    (
        {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True},
        {"a": prompts(2), "b": prompts(2)},
        "metric_for_best_model='reward' is refused: .*Write `metric_for_best_model='eval_a_reward'`",
    ),
    (
        {"save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "reward"},
        {"a": prompts(2)},
        "metric_for_best_model='reward' is refused",
    ),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {"a": prompts(2)}, "metric_for_best_model='loss' is refused"),
]


@pytest.mark.parametrize(("settings", "dataset", "message"), EVALUATION)
def test_an_evaluation_without_rows_is_refused(tmp_path, settings, dataset, message):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, **settings}
    refused(message, tmp_path, settings, eval_dataset=dataset)


def test_a_stream_without_a_number_of_steps_is_refused(tmp_path):
    stream = IterableDataset.from_generator(lambda: ({"prompt": "a="} for _ in range(8)))
    refused(
        r"max_steps=-1 is refused: .* a stream.*Write `max_steps=1000`",
        tmp_path,
        {"max_steps": -1},
        train_dataset=stream,
    )


def test_evaluating_on_an_empty_dataset_is_refused(build):
    with pytest.raises(ValueError, match="eval_dataset has 0 rows"):
        build(DROTrainer).evaluate(EMPTY)


REWARDS = [
    (None, {}, "reward_funcs=None is refused: there must be a reward"),
    ([], {}, r"reward_funcs=\[\] is refused: there must be a reward"),
    ({"a": length_reward}, {}, "reward_funcs={'a'"),
    ([length_reward, 5], {}, r"reward_funcs\[1\]=5 is refused"),
    (length_reward, {"reward_weights": [1.0, 2.0]}, r"there are 1 reward functions.*reward_weights=\[1.0\]"),
]


@pytest.mark.parametrize(("reward_funcs", "settings", "message"), REWARDS)
def test_rewards_that_are_none_or_do_not_match_their_weights_are_refused(tmp_path, reward_funcs, settings, message):
    refused(message, tmp_path, settings, reward_funcs=reward_funcs)


def test_reward_processing_classes_must_be_one_for_each(tmp_path):
    message = r"3 reward_processing_classes for 1 reward functions.*=\[None\]"
    refused(message, tmp_path, reward_processing_classes=[None] * 3)


def test_a_missing_model_is_refused(tmp_path):
    refused("model=None is refused", tmp_path, model=None)


def test_a_tuple_of_rewards_is_a_list_of_them(build):
    trainer = build(DROTrainer, reward_funcs=(length_reward, length_reward), settings={"reward_weights": [1.0, 0.5]})
    assert trainer.reward_func_names == ["length_reward", "length_reward_2"]


def test_a_list_of_rewards_is_left_as_it_was(build):
    rewards = [length_reward]
    build(DROTrainer, reward_funcs=rewards)
    assert rewards == [length_reward]


@pytest.mark.parametrize("missing", [{"eos_token": None}, {"eos_token": None, "pad_token": None}], ids=str)
def test_a_tokenizer_without_an_end_token_is_refused(tmp_path, missing):
    tokenizer = tiny_tokenizer()
    for name, value in missing.items():
        setattr(tokenizer, name, value)
    refused("processing_class.eos_token=None is refused", tmp_path, processing_class=tokenizer)


# Prompts and columns


PROMPTS = [None, 1, [], {"a": 1}]


@pytest.mark.parametrize("prompt", PROMPTS, ids=repr)
def test_what_is_no_prompt_is_refused_with_its_row(tmp_path, prompt):
    good = {int: 2, list: conversation(("user", "a")), dict: {"a": 2}}.get(type(prompt), "a=")
    row = 0 if isinstance(prompt, (int, dict)) else 5
    rows = Dataset.from_dict({"prompt": [*[good] * 5, prompt, good, good]})
    refused(f"train_dataset row {row} has the prompt .*text or a list of messages", tmp_path, train_dataset=rows)
    held_out = {"mine": rows}
    refused(rf"eval_dataset\['mine'\] row {row} has the prompt", tmp_path, eval_dataset=held_out)


STREAMS = [
    ({"question": "a="}, r"has no column 'prompt' \(it has: question\)"),
    ({"prompt": "a=", "completions": "x"}, "has a column 'completions', a name under which"),
    ({"prompt": None}, "has the prompt None"),
    ({"prompt": conversation(("user", "a"), ("assistant", "b"))}, "has a prompt that ends in an assistant message"),
    ({"prompt": "a=", "image": "docker:1"}, r"has image='docker:1'.*rename_column\('image', 'my_image'\)"),
    ({"prompt": "a=", "images": ["a.png"]}, r"has images=\['a.png'\]"),
]


@pytest.mark.parametrize(("row", "message"), STREAMS)
def test_rows_of_a_stream_are_checked_as_they_come(build, row, message):
    stream = IterableDataset.from_generator(lambda: (row for _ in range(64)))
    with pytest.raises(ValueError, match=f"a row of the dataset {message}"):
        build(DROTrainer, train_dataset=stream, tokenizer=chat_tokenizer()).train()


def test_rows_of_a_stream_that_lack_a_key_have_none_as_in_a_dataset(build):
    rows = build(DROTrainer).data_collator([{"prompt": "a=", "answer": "x"}, {"prompt": "b=", "level": 2}])
    assert rows == [{"prompt": "a=", "answer": "x", "level": None}, {"prompt": "b=", "answer": None, "level": 2}]


def test_prompts_that_a_transform_makes_are_checked_as_they_come(build):
    rows = Dataset.from_dict({"prompt": [None] * 8})
    made = rows.with_transform(lambda batch: {"prompt": ["a="] * len(batch["prompt"])})
    build(DROTrainer, train_dataset=made).train()
    broken = prompts(8).with_transform(lambda batch: {"prompt": [None] * len(batch["prompt"])})
    with pytest.raises(ValueError, match="has the prompt None"):
        build(DROTrainer, train_dataset=broken).train()


def test_a_rollout_function_gets_any_conversation(build):
    rows = Dataset.from_dict({"prompt": [conversation(("user", "a"), ("assistant", "b"))] * 8})

    def rollout(prompts, trainer):
        return scripted([prompt[-1]["content"] for prompt in prompts], trainer)

    def reward(completions, **_):
        return length_reward([completion[0]["content"] for completion in completions])

    settings = {"chat_template_kwargs": {"add_generation_prompt": False}}
    trainer = build(DROTrainer, train_dataset=rows, reward_funcs=reward, rollout_func=rollout, settings=settings)
    trainer.train()


# Rewards


def raising_for_a_row(completions, answer=None, **_) -> list[float]:
    return [1.0 / (0 if value == "bad" else 1) for value in answer]


async def raising_for_a_row_async(completions, answer=None, **_) -> list[float]:
    return raising_for_a_row(completions, answer)


def raising_as_it_is_read(completions, answer=None, **_):
    return (1.0 / (0 if value == "bad" else 1) for value in answer)


@pytest.mark.parametrize("reward", [raising_for_a_row, raising_for_a_row_async, raising_as_it_is_read])
def test_a_reward_that_raises_names_the_first_row_that_raises_alone(build, reward):
    rows = prompts(2).add_column("answer", ["good", "bad"])
    trainer = build(DROTrainer, reward_funcs=reward, train_dataset=rows, settings={"shuffle_dataset": False})
    with pytest.raises(ZeroDivisionError) as raised:
        trainer.train()
    first, second = raised.value.__notes__
    assert first == f"Raised by reward function {reward.__name__!r} at step 0."
    assert "it raises ZeroDivisionError('float division by zero') for row 4. Prompt: 'bi='" in second


def test_a_reward_that_raises_for_no_row_alone_says_so(build):
    def greedy(completions, **_):
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [1.0]

    with pytest.raises(RuntimeError, match="too many") as raised:
        build(DROTrainer, reward_funcs=greedy).train()
    assert raised.value.__notes__[1].endswith("it raises for none of the first 8 rows.")


def test_the_search_for_a_row_logs_nothing_and_ends_in_time(monkeypatch):
    logged, calls = [], []

    def reward(completions, log_metric, **_):
        calls.append(len(completions))
        log_metric("accuracy", 1.0)
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [1.0]

    def call():
        checked_reward(reward, "reward")(
            prompts=["a"] * 4, completions=["b"] * 4, log_metric=lambda *a: logged.append(a)
        )

    with pytest.raises(RuntimeError):
        call()
    assert (calls, logged) == ([4, 1, 1, 1, 1], [("accuracy", 1.0)])
    monkeypatch.setattr(reward_checks, "SEARCH_SECONDS", -1.0)
    with pytest.raises(RuntimeError) as raised:
        call()
    assert raised.value.__notes__[1].endswith("none of the first 0 rows.")


LOGGED = [
    ("reward", 1.0, r"log_metric\('reward', 1.0\): the trainer logs a metric of this name"),
    ("loss", 1.0, "the trainer logs"),
    ("learning_rate", 1.0, "the trainer logs"),
    ("completions/mean_length", 1.0, "the trainer logs"),
    ("completions/max_terminated_length", 1.0, "the trainer logs"),
    ("rewards/watching/mean", 1.0, "the trainer logs"),
    ("rewards/another/std", 1.0, "the trainer logs"),
    ("dro/kl_k2", 1.0, "the trainer logs"),
    (5, 1.0, "the trainer logs"),
    ("accuracy", None, r"log_metric\('accuracy', None\): the value must be one number"),
    ("accuracy", "good", "must be one number"),
    ("accuracy", torch.ones(8), "must be one number"),
]


def watching_with(log):
    def watching(completions, log_metric, log_extra, **_):
        log(log_metric, log_extra, len(completions))
        return length_reward(completions)

    return watching


@pytest.mark.parametrize(("name", "value", "message"), LOGGED, ids=str)
def test_a_metric_that_is_taken_or_no_number_is_refused(build, name, value, message):
    reward = watching_with(lambda log_metric, log_extra, size: log_metric(name, value))
    with pytest.raises(ValueError, match=f"reward function 'watching' at step 0 called .*{message}") as raised:
        build(DROTrainer, reward_funcs=reward).train()
    assert not hasattr(raised.value, "__notes__")


NUMBERS = [0.25, 1, True, numpy.float32(0.25), torch.tensor(0.25), torch.tensor([0.25])]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers_of_any_kind_are_logged(build, value):
    trainer = build(
        DROTrainer, reward_funcs=watching_with(lambda log_metric, log_extra, size: log_metric("completions/x", value))
    )
    trainer.train()
    assert trainer.state.log_history[0]["completions/x"] == float(value)


COLUMNS = [
    ("note", lambda size: ["x"] * 3, r"log_extra\('note', ...\) with 3 values for 8 completions"),
    ("note", lambda size: "x" * size, "must be a list of 8 values"),
    ("note", lambda size: 5, "must be a list of 8 values"),
    ("completion", lambda size: ["x"] * size, "the table of completions has a column of this name"),
    ("watching", lambda size: ["x"] * size, "the table of completions has a column of this name"),
]


@pytest.mark.parametrize(("column", "values", "message"), COLUMNS)
def test_a_logged_column_that_is_taken_or_of_another_length_is_refused(build, column, values, message):
    reward = watching_with(lambda log_metric, log_extra, size: log_extra(column, values(size)))
    with pytest.raises(ValueError, match=message):
        build(DROTrainer, reward_funcs=reward).train()


def test_a_column_may_be_logged_a_row_at_a_time(build):
    reward = watching_with(lambda log_metric, log_extra, size: [log_extra("note", [row]) for row in range(size)])
    build(DROTrainer, reward_funcs=reward).train()


def test_names_given_twice_get_a_number_that_is_free():
    assert distinct_names(["a", "b", "a", "a_2", "a"]) == ["a", "b", "a_3", "a_2", "a_4"]


# Rollouts


def rollout_with(**changes):
    def rollout(prompts, trainer):
        output = scripted(prompts, trainer)
        for name, change in changes.items():
            output[name] = change(output[name] if name in output else len(prompts))
        return output

    return rollout


ROLLOUTS = [
    (lambda prompts, trainer: None, "returned a NoneType, it must return a dict with the keys 'prompt_ids'"),
    (lambda prompts, trainer: {"completion_ids": []}, "without 'prompt_ids', 'logprobs'"),
    (rollout_with(completion_ids=lambda rows: rows[:4]), "returned 4 rows of completion_ids for 8 prompts"),
    (rollout_with(prompt_ids=lambda rows: rows[:4]), "returned 4 rows of prompt_ids for 8 prompts"),
    (rollout_with(logprobs=lambda rows: rows[:4]), "returned 4 rows of logprobs for 8 prompts"),
    (rollout_with(logprobs=lambda rows: 5), "returned logprobs=5: it must be a list"),
    (
        rollout_with(logprobs=lambda rows: [*rows[:2], rows[2][:-1], *rows[3:]]),
        "returned 2 logprobs for the 3 completion_ids of row 2",
    ),
    (
        rollout_with(logprobs=lambda rows: [-1.0] * len(rows)),
        "returned -1.0 logprobs for the 1 completion_ids of row 0",
    ),
    (
        rollout_with(logprobs=lambda rows: [[0.05] * len(row) for row in rows]),
        "logprobs from 0.05 to 0.05, a log-prob is at most 0",
    ),
    (
        rollout_with(logprobs=lambda rows: [[[-1.0, -2.0]] * len(row) for row in rows]),
        r"logprobs with \[-1.0, -2.0\] in row 0: each token has one number",
    ),
    (
        rollout_with(env_mask=lambda size: [[1] * (index % 5) for index in range(size)]),
        "returned 0 env_mask for the 1 completion_ids of row 0",
    ),
    (rollout_with(env_mask=lambda size: [[1]]), "returned 1 rows of env_mask for 8 prompts"),
    (rollout_with(prompt_ids=lambda rows: [[], *rows[1:]]), "prompt_ids of rollout_func has no tokens in row 0"),
    (rollout_with(score=lambda size: [1.0] * 4), "returned 4 values of 'score' for 8 prompts"),
    (rollout_with(score=lambda size: [1.0] * 9), "returned 9 values of 'score' for 8 prompts"),
    (rollout_with(completions=lambda size: ["x"] * size), "returned the key 'completions', a name"),
    (rollout_with(log_metric=lambda size: ["x"] * size), "returned the key 'log_metric', a name"),
]


@pytest.mark.parametrize(("rollout", "message"), ROLLOUTS, ids=[message[:40] for _, message in ROLLOUTS])
def test_a_rollout_that_cannot_be_right_is_refused_with_key_and_row(build, rollout, message):
    with pytest.raises(ValueError, match=message) as raised:
        build(DROTrainer, rollout_func=rollout).train()
    assert "rollout_func" in str(raised.value)


def test_rounding_above_zero_is_no_probability(build):
    build(DROTrainer, rollout_func=rollout_with(logprobs=lambda rows: [[1e-6] * len(row) for row in rows])).train()


def test_a_rollout_beyond_the_table_of_positions_is_refused(build):
    rollout = rollout_with(prompt_ids=lambda rows: [[5] * 62 for _ in rows])
    with pytest.raises(ValueError, match=r"62 prompt_ids and 3 completion_ids in row 2, .* only 64 positions"):
        build(DROTrainer, model=gpt2(), rollout_func=rollout).train()


def test_an_engine_that_loses_a_completion_is_refused(build, monkeypatch):
    from trl import GRPOTrainer

    def losing(self, prompt_ids, *_):
        return [[5, 6, 2]] * (len(prompt_ids) - 1), None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", losing)
    with pytest.raises(ValueError, match="the generation engine returned 7 rows of completion_ids for 8 prompts"):
        build(DROTrainer).train()
