import re

import pytest

from trl_dro.callbacks import evaluation_line, format_count, format_seconds, progress_line, use_compact_progress

from .test_trainer import make_trainer
from .tiny import prompts


LOGS = {"loss": 0.1, "reward": 0.5312, "dro/kl_k2": 0.01234, "dro/penalty_share": 0.084, "policy_loss": -0.0123}


def test_a_line_shows_reward_kl_penalty_speed_and_time_left():
    line = progress_line(LOGS, step=40, max_steps=200, tokens_per_second=1234.0, seconds_left=35.4)
    assert line == ("step 40/200 | reward 0.531 | kl 0.0123 | penalty 8% | loss -0.0123 | 1.2k tok/s | 00:35 left")


def test_the_reference_kl_is_shown_when_there_is_one():
    line = progress_line({**LOGS, "kl": 0.5}, step=1, max_steps=2, tokens_per_second=None, seconds_left=None)
    assert "| kl 0.0123 | ref kl 0.5000 |" in line


def test_what_was_not_logged_is_left_out():
    logs = {"loss": 0.1, "reward": None}
    assert progress_line(logs, step=1, max_steps=2, tokens_per_second=None, seconds_left=None) == "step 1/2"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "00:00"), (75, "01:15"), (3725, "1:02:05"), (-3, "00:00")])
def test_seconds_are_shown_like_a_clock(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12"), (999, "999"), (1234, "1.2k"), (3_400_000, "3.4M")])
def test_counts_are_shown_with_a_letter(value, text):
    assert format_count(value) == text


def test_an_evaluation_names_each_reward_only_if_there_are_several():
    one = {"eval_reward": 0.25, "eval_rewards/solved/mean": 0.25}
    assert evaluation_line(one, step=0) == "eval at step 0 | reward 0.250"
    two = {**one, "eval_rewards/style/mean": 0.5, "eval_rewards/style/std": 0.1}
    assert evaluation_line(two, step=8) == "eval at step 8 | reward 0.250 | solved 0.250 | style 0.500"


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_an_evaluation_without_any_reward_says_none(missing):
    logs = {"eval_reward": missing, "eval_rewards/solved/mean": missing, "eval_rewards/style/mean": 0.5}
    assert evaluation_line(logs, step=0) == "eval at step 0 | reward none | solved none | style 0.500"


def test_training_prints_one_line_for_each_log_and_no_dict(make_config, capsys):
    trainer = make_trainer(
        make_config(num_generations_eval=1, eval_strategy="steps", eval_steps=4, max_steps=4), eval_dataset=prompts(8)
    )
    use_compact_progress(trainer)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("{")] == []
    steps = [line for line in lines if re.match(r"step \d/4 \|.*tok/s \| \d\d:\d\d left$", line)]
    assert len(steps) == 4
    assert sum(line.startswith("eval at step 4 | reward") for line in lines) == 1
