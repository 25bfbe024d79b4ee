"""Verifiable rewards, and looking rewards up by name."""

import json
import sys

import pytest

from trl_dro.rewards import (
    extract_answer,
    load_reward,
    reasoning_gym_final_number,
    reasoning_gym_reward,
    reasoning_gym_solved,
)
from trl_dro.tasks import build_task, entry_from_json


@pytest.fixture(scope="module")
def row():
    """A row whose answer is `tac`."""
    train, _ = build_task("spell_backward", train_size=1)
    entry = entry_from_json(train[0]["entry"]) | {"answer": "tac"}
    return {"entry": json.dumps(entry), "task": "spell_backward"}


def score(row, completion, reward=reasoning_gym_reward):
    (value,) = reward([completion], entry=[row["entry"]], task=[row["task"]], prompts=["unused"])
    return value


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("tac", 1.0),
        (" tac\n", 1.0),
        ("tab", pytest.approx(2 / 3)),
        ("", 0.0),
        ([], 0.0),
        ([{"role": "assistant", "content": "tac"}], 1.0),
        ([{"role": "assistant", "content": None}], 0.0),
        ([{"role": "tool", "content": "x"}, {"role": "assistant", "content": "tac"}], 1.0),
        ("<think>cat, so</think> tac", 1.0),
        ("it is backward</think>tac", 1.0),
        ("<think>so</think>It is <answer> tac </answer>.", 1.0),
        ("<answer>cat</answer> no, <answer>tac</answer>", 1.0),
        ("<think>never closed tac", 0.0),
    ],
)
def test_the_verifier_sees_the_answer_alone(row, completion, expected):
    assert score(row, completion) == expected


def test_partial_credit_does_not_count_as_solved(row):
    assert score(row, "tab", reasoning_gym_solved) == 0.0
    assert score(row, "tac", reasoning_gym_solved) == 1.0


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("7", "The answer is 7.", 1.0),
        ("7", "7", 1.0),
        ("7", "10-3=7", 1.0),
        ("3", "it is 10-3", 1.0),
        ("-3", "10 - 13 = -3\n", 1.0),
        ("1234", "So 1,234, I think", 1.0),
        ("7", "one of 5,6,7", 1.0),
        ("7", "7 or 8", 0.0),
        ("7", "The answer is 17.", 0.0),
        ("7", "seven", 0.0),
        ("7", "", 0.0),
        ("7", "<think>7</think>I do not know", 0.0),
        ("7", [{"role": "assistant", "content": "4 + 3 equals 7"}], 1.0),
    ],
)
def test_the_last_number_counts(answer, completion, expected):
    entry = entry_from_json(build_task("chain_sum", train_size=1)[0][0]["entry"]) | {"answer": answer}
    row = {"entry": json.dumps(entry), "task": "chain_sum"}
    assert score(row, completion, reasoning_gym_final_number) == expected


def test_an_answer_inside_the_thinking_does_not_count():
    assert extract_answer("<think><answer>early</answer></think>late") == "late"


def test_rows_of_several_tasks_are_scored_by_their_own_verifiers():
    rows = [build_task(task, train_size=1)[0][0] for task in ("spell_backward", "gcd")]
    answers = [entry_from_json(row["entry"])["answer"] for row in rows]
    columns = {"entry": [row["entry"] for row in rows], "task": [row["task"] for row in rows]}
    assert reasoning_gym_reward(answers, **columns) == [1.0, 1.0]
    assert reasoning_gym_reward(answers[::-1], **columns) != [1.0, 1.0]


def test_an_answer_on_which_the_verifier_fails_scores_zero():
    row = build_task("prime_factorization", train_size=1)[0][0]  # its verifier raises on text
    assert score(row, "seven times two") == 0.0


def test_verifiers_that_compare_tuples_still_give_full_marks():
    row = build_task("rearc", train_size=1)[0][0]
    assert score(row, entry_from_json(row["entry"])["answer"]) == 1.0


@pytest.mark.parametrize("name", ["reasoning_gym_reward", "reasoning_gym_solved", "think_format_reward"])
def test_a_known_name_gives_the_function_of_that_name(name):
    assert load_reward(name).__name__ == name


def test_trls_overlong_punishment_comes_with_the_parameters_of_trls_script():
    punish = load_reward("get_soft_overlong_punishment")
    assert punish(completion_ids=[[0] * 1000, [0] * 1280, [0] * 1300]) == [0.0, -1.0, -1]


def test_a_dotted_path_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_test_rewards.py").write_text("def brevity(completions, **kwargs):\n    return [0.5]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert load_reward("my_test_rewards.brevity")(["x"]) == [0.5]
    with pytest.raises(ValueError, match=r"`my_test_rewards` has no function 'brevty'. Nearest: brevity"):
        load_reward("my_test_rewards.brevty")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("accuracy_rewards", r"'accuracy_rewards' is not a known reward. Known: accuracy_reward, "),
        ("reasoning_gym", r"Known: reasoning_gym_"),
        ("no_such_module.reward", r"cannot import `no_such_module`"),
        ("math.pi", r"`math` has no function 'pi'"),
    ],
)
def test_an_unknown_reward_is_refused_with_the_nearest_names(name, message):
    with pytest.raises(ValueError, match=message):
        load_reward(name)
