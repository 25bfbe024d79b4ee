"""Faults of TRL's trainer with data, rewards and rollouts: each shown on `GRPOTrainer`, and gone here.

When one of the `GRPOTrainer` tests fails, TRL has mended it, and what closes it here can go.
"""

import functools
import math
from pathlib import Path

import numpy
import pandas
import pytest
import torch
import trl
from datasets import Dataset
from transformers import Qwen3ForSequenceClassification
from trl import GRPOTrainer

from trl_dro import DROTrainer

from .test_inherited_faults import gpt2, scripted
from .test_vlm import tiny_processor, tiny_vlm
from .tiny import length_reward, prompts, tiny_model, tiny_tokenizer


BOTH = pytest.mark.parametrize("trainer_class", [GRPOTrainer, DROTrainer])


def first_log(trainer) -> dict:
    trainer.train()
    return trainer.state.log_history[0]


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'x' if m['role'] == 'assistant' else 'u' }}{{ m['content'] }}"
        "{% if not (loop.last and continue_final_message) %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}x{% endif %}"
    )
    return tokenizer


def conversation(*messages) -> list[dict]:
    return [{"role": role, "content": content} for role, content in messages]


def reward_model(seed: int = 0):
    torch.manual_seed(seed)
    return Qwen3ForSequenceClassification(
        tiny_model().config.__class__(**{**tiny_model().config.to_dict(), "num_labels": 1})
    )


# Rewards of one name


def judge(completions, value=1.0, **_) -> list[float]:
    return [value] * len(completions)


PAIRS = {
    "lambdas": lambda: [lambda completions, **_: judge(completions), lambda completions, **_: judge(completions, 0.0)],
    "partials": lambda: [functools.partial(judge, value=1.0), functools.partial(judge, value=0.0)],
}


@pytest.mark.parametrize(("pair", "name"), [("lambdas", "<lambda>"), ("partials", "judge")])
def test_rewards_of_one_name_are_logged_as_one_in_trl_and_apart_here(build, pair, name):
    logs = [
        first_log(build(trainer_class, reward_funcs=PAIRS[pair](), settings={"log_completions": True}))
        for trainer_class in (GRPOTrainer, DROTrainer)
    ]
    assert logs[0][f"rewards/{name}/mean"] == 0.5
    assert logs[1][f"rewards/{name}/mean"] == 1.0
    assert logs[1][f"rewards/{name}_2/mean"] == 0.0


def test_the_table_of_completions_has_a_column_for_each_reward(build, tmp_path):
    build(DROTrainer, reward_funcs=PAIRS["partials"](), settings={"log_completions": True}).train()
    table = pandas.read_parquet(sorted((tmp_path / "run" / "completions").glob("*.parquet"))[0])
    assert set(table["judge"]) == {1.0}
    assert set(table["judge_2"]) == {0.0}


@BOTH
def test_a_reward_model_in_memory_has_no_name_in_trl_and_its_class_here(build, trainer_class):
    trainer = build(
        trainer_class,
        reward_funcs=[reward_model()] * 2,
        reward_processing_classes=[tiny_tokenizer(), tiny_tokenizer()],
    )
    name = "Qwen3ForSequenceClassification"
    assert trainer.reward_func_names == (["", ""] if trainer_class is GRPOTrainer else [name, f"{name}_2"])


# Environments


@BOTH
def test_nan_from_an_environment_counts_as_no_reward_in_trl_and_is_refused_here(build, trainer_class):
    class Game:
        def reset(self, **_):
            return "ab"

        def act(self, move: str) -> str:
            """
            Make a move.

            Args:
                move: What to do.

            Returns:
                What happened.
            """
            return move

        def get_reward(self):
            return math.nan

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    trainer = build(
        trainer_class,
        reward_funcs=None,
        model=tiny_model(max_position_embeddings=4096),
        train_dataset=Dataset.from_dict({"prompt": [conversation(("user", "a"))] * 8}),
        tokenizer=tokenizer,
        environment_factory=Game,
        settings={"max_steps": 1},
    )
    if trainer_class is GRPOTrainer:
        assert first_log(trainer)["reward"] is None
    else:
        with pytest.raises(ValueError, match=r"reward function 'Game' at step 0 returned nan for row 0. Return None"):
            trainer.train()


# What reward functions log


def logging_reward(completions, log_metric, log_extra, **_) -> list[float]:
    log_metric("reward", 100.0)
    log_extra("completion", ["x"] * len(completions))
    return [0.0] * len(completions)


def test_a_logged_reward_is_mixed_with_the_trainers_in_trl(build, tmp_path):
    log = first_log(build(GRPOTrainer, reward_funcs=logging_reward, settings={"log_completions": True}))
    assert log["reward"] == 50.0
    table = pandas.read_parquet(next(Path(tmp_path / "run" / "completions").glob("*.parquet")))
    assert set(table["completion"]) == {"x"}


@BOTH
def test_a_column_of_the_wrong_length_is_an_index_error_in_trl(build, trainer_class):
    def short(completions, log_extra, **_):
        log_extra("note", ["x"] * 3)
        return length_reward(completions)

    error = IndexError if trainer_class is GRPOTrainer else ValueError
    with pytest.raises(error, match=None if trainer_class is GRPOTrainer else r"3 values for 8 completions"):
        build(trainer_class, reward_funcs=short, settings={"log_completions": True}).train()


# NaN, dicts and sets


@BOTH
def test_nan_from_a_reward_model_counts_as_no_reward_in_trl_and_is_refused_here(build, trainer_class):
    model = reward_model()
    model.score.weight.data.fill_(math.nan)
    trainer = build(trainer_class, reward_funcs=[model], reward_processing_classes=[tiny_tokenizer()])
    if trainer_class is GRPOTrainer:
        assert first_log(trainer)["reward"] is None
    else:
        with pytest.raises(ValueError, match="'Qwen3ForSequenceClassification' is NaN for row 0 at step 0"):
            trainer.train()


RETURNED = [
    (lambda completions, **_: dict.fromkeys(range(len(completions)), 1.0), 3.5),
    (lambda completions, **_: {float(8 - index) for index in range(len(completions))}, 4.5),
]


@pytest.mark.parametrize(("reward", "mean"), RETURNED, ids=["dict", "set"])
def test_keys_and_unordered_rewards_are_trained_on_in_trl_and_refused_here(build, reward, mean):
    assert first_log(build(GRPOTrainer, reward_funcs=reward))["reward"] == mean
    with pytest.raises(ValueError, match="must return a list of 8 numbers"):
        build(DROTrainer, reward_funcs=reward).train()


# Columns


@BOTH
def test_the_column_completion_reaches_no_reward_in_trl_and_those_that_take_it_here(build, trainer_class):
    seen: list = []

    def comparing(completions, completion=None, **_):
        seen.append(completion)
        return length_reward(completions)

    def strict(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
        return length_reward(completions)

    rows = prompts(8).add_column("completion", ["gold"] * 8)
    build(trainer_class, reward_funcs=[comparing, strict], train_dataset=rows).train()
    assert seen[0] == (None if trainer_class is GRPOTrainer else ["gold"] * 8)


EMPTY_IMAGES = [{"image": [None] * 8}, {"images": [None] * 8}]


@pytest.mark.parametrize("columns", EMPTY_IMAGES, ids=str)
@BOTH
def test_a_column_of_no_images_is_taken_for_images_in_trl(build, trainer_class, columns):
    trainer = build(trainer_class, train_dataset=Dataset.from_dict({"prompt": ["a="] * 8, **columns}))
    if trainer_class is GRPOTrainer:
        with pytest.raises(ValueError, match="Multimodal training requires conversational prompts"):
            trainer.train()
    else:
        trainer.train()
        assert trainer.state.global_step == 2


@BOTH
def test_a_batch_without_images_breaks_a_multimodal_model_in_trl(build, trainer_class):
    def reward(completions, **_):
        return length_reward([completion[0]["content"] for completion in completions])

    rows = Dataset.from_dict({"prompt": [conversation(("user", "ab"))] * 8, "image": [None] * 8})
    trainer = build(
        trainer_class, model=tiny_vlm(), reward_funcs=reward, train_dataset=rows, tokenizer=tiny_processor("llava")
    )
    if trainer_class is GRPOTrainer:
        with pytest.raises(TypeError, match="NoneType"):
            trainer.train()
    else:
        trainer.train()
        assert trainer.state.global_step == 2


# Rows that are never trained


@BOTH
def test_the_tail_of_an_unshuffled_dataset_is_dropped_without_a_word_in_trl(build, trainer_class):
    seen: set = set()

    def watching(prompts, completions, **_):
        seen.update(prompts)
        return length_reward(completions)

    def make():
        settings = {"shuffle_dataset": False, "max_steps": -1, "num_train_epochs": 3}
        return build(trainer_class, reward_funcs=watching, train_dataset=prompts(5), settings=settings)

    if trainer_class is GRPOTrainer:
        trainer = make()
    else:
        with pytest.warns(UserWarning, match="the last 1 rows of train_dataset are left out of every epoch"):
            trainer = make()
    trainer.train()
    assert seen == set(prompts(4)["prompt"])


# Sampling settings of the model


def sampled_with(build, trainer_class, **settings) -> list:
    model, seen = tiny_model(), []
    for name, value in settings.items():
        setattr(model.generation_config, name, value)

    def watching(completions, completion_ids, **_):
        seen.extend(completion_ids)
        return length_reward(completions)

    trainer = build(trainer_class, model=model, reward_funcs=watching)
    trainer.train()
    for name, value in settings.items():
        assert getattr(trainer.model.generation_config, name) == value  # as it was, to be saved with the model
    return seen


MODEL_SAMPLING = [
    {"min_p": 0.99},
    {"typical_p": 0.1},
    {"suppress_tokens": [index for index in range(33) if index != 7]},
    {"num_beams": 2},
]


@pytest.mark.parametrize("settings", MODEL_SAMPLING, ids=lambda settings: next(iter(settings)))
def test_sampling_settings_of_the_model_apply_in_trl_and_are_left_out_here(build, settings):
    assert sampled_with(build, GRPOTrainer, **settings) != sampled_with(build, GRPOTrainer)
    with pytest.warns(UserWarning, match=f"own generation_config sets {next(iter(settings))}="):
        ours = sampled_with(build, DROTrainer, **settings)
    assert ours == sampled_with(build, DROTrainer)


@pytest.mark.parametrize("settings", [{"num_return_sequences": 2}, {"return_dict_in_generate": True}], ids=str)
def test_settings_of_the_model_that_break_trl_are_left_out_here(build, settings):
    with pytest.raises((RuntimeError, TypeError)):
        sampled_with(build, GRPOTrainer, **settings)
    with pytest.warns(UserWarning, match=f"own generation_config sets {next(iter(settings))}="):
        assert sampled_with(build, DROTrainer, **settings) == sampled_with(build, DROTrainer)


def test_neutral_settings_of_the_model_and_those_given_here_draw_no_warning(build):
    model = tiny_model()
    model.generation_config.num_beams = 1
    model.generation_config.suppress_tokens = [5]
    build(DROTrainer, model=model, settings={"generation_kwargs": {"suppress_tokens": [6]}})


# Prompts


@pytest.mark.parametrize("texts", [[""] * 8, ["", "a="] * 4], ids=["all", "some"])
@BOTH
def test_an_empty_prompt_is_an_error_from_inside_torch_in_trl(build, trainer_class, texts):
    trainer = build(trainer_class, train_dataset=Dataset.from_dict({"prompt": texts}))
    expected = ((IndexError, RuntimeError), None)
    if trainer_class is DROTrainer:
        expected = (ValueError, r"prompt has no tokens in row \d of the batch")
    with pytest.raises(expected[0], match=expected[1]):
        trainer.train()


def test_an_empty_prompt_that_has_a_beginning_of_sequence_trains(build):
    class WithBeginning(type(tiny_tokenizer())):
        def __call__(self, text, **kwargs):
            encoded = super().__call__(text, **kwargs)
            encoded["input_ids"] = [[self.bos_token_id, *ids] for ids in encoded["input_ids"]]
            return encoded

    tokenizer = tiny_tokenizer()
    tokenizer.__class__ = WithBeginning
    build(DROTrainer, train_dataset=Dataset.from_dict({"prompt": [""] * 8}), tokenizer=tokenizer).train()


@BOTH
def test_a_last_assistant_message_is_closed_in_trl_and_refused_here(build, trainer_class):
    prompt = conversation(("user", "ab"), ("assistant", "cd"))
    rows = Dataset.from_dict({"prompt": [prompt] * 8})
    if trainer_class is GRPOTrainer:
        trainer = build(trainer_class, train_dataset=rows, tokenizer=chat_tokenizer())
        ids = trainer._tokenize_prompts([prompt])[0][0]
        assert trainer.processing_class.decode(ids).replace(" ", "") == "uab<eos>xcd<eos>x"
    else:
        with pytest.raises(ValueError, match="row 0 has a prompt that ends in an assistant message"):
            build(trainer_class, train_dataset=rows, tokenizer=chat_tokenizer())


@pytest.mark.parametrize(
    "option", [{"continue_final_message": True}, {"add_generation_prompt": False}, {"tokenize": False}], ids=str
)
@BOTH
def test_options_of_the_chat_template_that_the_trainer_sets_are_raw_errors_in_trl(build, trainer_class, option):
    rows = Dataset.from_dict({"prompt": [conversation(("user", "ab"))] * 8})

    def make():
        settings = {"chat_template_kwargs": option}
        return build(trainer_class, train_dataset=rows, tokenizer=chat_tokenizer(), settings=settings)

    if trainer_class is GRPOTrainer:
        trainer = make()
        with pytest.raises((TypeError, ValueError), match=r"multiple values|not compatible"):
            trainer.train()
    else:
        with pytest.raises(ValueError, match=rf"chat_template_kwargs\['{next(iter(option))}'\]=.* is refused"):
            make()


# Absolute positions have an end


@BOTH
def test_a_prompt_beyond_the_table_of_positions_is_an_index_error_in_trl(build, trainer_class):
    trainer = build(trainer_class, model=gpt2(), train_dataset=Dataset.from_dict({"prompt": ["abcdefgh" * 10] * 8}))
    if trainer_class is GRPOTrainer:
        with pytest.raises(IndexError, match="index out of range"):
            trainer.train()
    else:
        with pytest.raises(ValueError, match=r"prompt has 80 tokens in row 0 of the batch, .* only 64 positions"):
            trainer.train()


@BOTH
def test_completions_end_where_the_table_of_positions_does(build, trainer_class):
    trainer = build(trainer_class, model=gpt2(), train_dataset=Dataset.from_dict({"prompt": ["abcdef" * 10] * 8}))
    if trainer_class is GRPOTrainer:
        with pytest.raises(IndexError, match="index out of range"):
            trainer.train()
    else:
        with pytest.warns(UserWarning, match="max_completion_length=6 goes beyond the 64 positions of the model"):
            assert first_log(trainer)["completions/max_length"] <= 4
        assert trainer.generation_config.max_new_tokens == 6


# Rollout functions


def changed(**changes):
    def rollout(prompts, trainer):
        output = scripted(prompts, trainer)
        for name, change in changes.items():
            output[name] = change(output)
        return output

    return rollout


def test_what_is_missing_of_the_log_probs_is_filled_with_zeros_in_trl(build):
    short = changed(logprobs=lambda output: [row[:-1] if len(row) < 5 else row for row in output["logprobs"]])
    trainer = build(GRPOTrainer, rollout_func=short)
    output = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts(8)["prompt"]])
    mask = output["completion_mask"].bool()
    assert (output["sampling_per_token_logps"][mask] == 0.0).any()


def test_probabilities_pass_for_log_probs_in_trl(build):
    likely = changed(logprobs=lambda output: [[0.05] * len(row) for row in output["logprobs"]])
    assert first_log(build(GRPOTrainer, rollout_func=likely))["grad_norm"] > 0


AS_USUAL = {
    "lists of one, as from vLLM": lambda rows: [[[value] for value in row] for row in rows],
    "tensors": lambda rows: [torch.tensor(row) for row in rows],
    "arrays": lambda rows: [numpy.array(row, dtype=numpy.float32) for row in rows],
    "tuples": lambda rows: tuple(tuple(row) for row in rows),
    "lists of arrays": lambda rows: [[numpy.float32(value) for value in row] for row in rows],
}


@pytest.mark.parametrize("shape", AS_USUAL.values(), ids=AS_USUAL.keys())
def test_log_probs_of_any_usual_shape_train_alike(build, shape):
    weights = []
    for rollout in (scripted, changed(logprobs=lambda output: shape(output["logprobs"]))):
        trainer = build(DROTrainer, rollout_func=rollout, settings={"anchor_policy": "sampling"})
        trainer.train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


UNKNOWN = {"None": None, "NaN": math.nan, "-inf": -math.inf}


@pytest.mark.parametrize("unknown", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_tokens_that_the_engine_could_not_score_stay_legal(build, unknown):
    rollout = changed(logprobs=lambda output: [[unknown, *row[1:]] for row in output["logprobs"]])
    trainer = build(DROTrainer, rollout_func=rollout, settings={"anchor_policy": "sampling"})
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


FIELDS = {
    "tensor": lambda size: torch.arange(size),
    "array": lambda size: numpy.arange(size),
    "tuple": lambda size: tuple(range(size)),
}


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS.keys())
def test_a_field_that_is_no_list_reaches_every_row_whole_in_trl_and_row_by_row_here(build, field):
    received = []
    for trainer_class in (GRPOTrainer, DROTrainer):

        def watching(completions, score, **_):
            received.append(score)
            return length_reward(completions)

        rollout = changed(score=lambda output: field(len(output["completion_ids"])))
        build(trainer_class, reward_funcs=watching, rollout_func=rollout, settings={"max_steps": 1}).train()
    assert len(received[0][0]) == 8
    assert received[1] == list(range(8))


def test_fields_that_are_the_same_for_all_rows_stay_whole(build):
    received: dict = {}

    def watching(completions, level, setup, weights, **_):
        received.update(level=level[0], setup=setup[7], weights=weights[0])
        return length_reward(completions)

    rollout = changed(level=lambda _: 3, setup=lambda _: {"a": 1}, weights=lambda _: torch.ones(3))
    build(DROTrainer, reward_funcs=watching, rollout_func=rollout).train()
    assert (received["level"], received["setup"]) == (3, {"a": 1})
    assert received["weights"].shape == (3,)
