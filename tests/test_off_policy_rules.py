"""Rules of the options for rollout correction, baselines and adaptive beta, each with the line to write instead."""

import dataclasses
import math
import re
import warnings

import pytest
from trl import GRPOConfig

from trl_dro import DROConfig
from trl_dro.rollout_correction import PRESETS, REFUSED_PRESETS, STATISTICS, Rejection


BASE = {"use_cpu": True, "bf16": False, "report_to": "none", "num_iterations": 2, "dro_beta": 0.5}
RS = {"rollout_rs": ["token_k1", "seq_mean_k3"], "rollout_rs_threshold": [2.0, 0.01]}


def config(**overrides) -> DROConfig:
    return DROConfig(**{**BASE, **overrides})


BAD = [
    ({"rollout_is": "tokens"}, "rollout_is='tokens'", "Write `rollout_is='token'`"),
    ({"rollout_is": "token", "rollout_is_threshold": 0}, "rollout_is_threshold=0", "a finite number > 0"),
    ({"rollout_is": "token", "rollout_is_threshold": math.nan}, "rollout_is_threshold=nan", "a finite number > 0"),
    ({"rollout_is": "token", "rollout_is_threshold_lower": 2.0}, "rollout_is_threshold_lower=2.0", "must be below"),
    ({"rollout_is": "token", "rollout_is_batch_normalize": "no"}, "rollout_is_batch_normalize='no'", "True or False"),
    ({"rollout_is_threshold": 3.0}, "rollout_is_threshold=3.0", "Write `rollout_is='token'`"),
    ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=True", "without rollout_is nothing reads it"),
    ({"rollout_rs_threshold": [2.0]}, "rollout_rs_threshold=[2.0]", "without rollout_rs nothing reads it"),
    ({"rollout_rs": ["seq_max_k1"], "rollout_rs_threshold": [2.0]}, "rollout_rs=['seq_max_k1']", "'seq_max_k2'"),
    ({"rollout_rs": []}, "rollout_rs=[]", "at least one entry"),
    ({"rollout_rs": 5}, "rollout_rs=5", "it must be a list"),
    ({"rollout_rs": ["token_k2"]}, "rollout_rs_threshold=None", "Write `rollout_rs_threshold=[0.01]`"),
    (RS, "rollout_rs_threshold_lower=None", "Write `rollout_rs_threshold_lower=[0.5]`"),
    ({**RS, "rollout_rs_threshold": [2.0]}, "rollout_rs_threshold=[2.0]", "for each of token_k1, seq_mean_k3"),
    ({**RS, "rollout_rs_threshold": [2.0, "x"]}, "rollout_rs_threshold=[2.0, 'x']", "one finite number > 0"),
    ({**RS, "rollout_rs_threshold_lower": [2.5]}, "rollout_rs_threshold_lower=2.5", "below the upper bound 2.0"),
    ({**RS, "rollout_rs_threshold_lower": [0.5, 0.1]}, "rollout_rs_threshold_lower=[0.5, 0.1]", "never negative"),
    (
        {"rollout_rs": ["token_k2"], "rollout_rs_threshold": [1.0], "rollout_rs_threshold_lower": [0.5]},
        "rollout_rs_threshold_lower=[0.5]",
        "no lower bound",
    ),
    ({"rollout_rs": ["token_k2"] * 2, "rollout_rs_threshold": [1.0, 2.0]}, "rollout_rs=", "stands twice"),
    (
        {"rollout_is": "token", "anchor_policy": "sampling"},
        "rollout_is='token'",
        "with anchor_policy='sampling' it would count the engine's mismatch twice",
    ),
    ({"rollout_is": "token", "use_vllm": True, "vllm_importance_sampling_correction": True}, "vllm_imp", "=False"),
    ({"rollout_correction_preset": "decoupled_tokn_is"}, "rollout_correction_preset=", "='decoupled_token_is'"),
    (
        {"rollout_correction_preset": "decoupled_token_is", "rollout_is_threshold": 3.0},
        "rollout_is_threshold=3.0",
        "Write `rollout_is='token', rollout_is_threshold=3.0`",
    ),
    ({"rollout_correction_preset": "bypass_ppo_clip"}, "rollout_correction_preset='bypass_ppo_clip'", "ppo_clip'"),
    ({"advantage_baseline": "loo"}, "advantage_baseline='loo'", "Write `advantage_baseline='leave-one-out'`"),
    ({"advantage_baseline_temperature": 0.1}, "advantage_baseline_temperature=0.1", "advantage_baseline='soft'"),
    ({"advantage_baseline": "soft", "advantage_baseline_temperature": 0}, "advantage_baseline_temperature=0", "> 0"),
    (
        {"advantage_baseline": "soft", "dro_beta": None, "policy_loss": "reinforce"},
        "advantage_baseline_temperature=None",
        "has no dro_beta to take it from",
    ),
    (
        {"advantage_baseline": "soft", "multi_objective_aggregation": "normalize_then_sum"},
        "advantage_baseline='soft'",
        "sum_then_normalize",
    ),
    ({"dro_target_kl": 0}, "dro_target_kl=0", "a finite number > 0 or None"),
    ({"dro_target_kl": "x"}, "dro_target_kl='x'", "a finite number > 0 or None"),
    ({"dro_target_kl": 0.01, "num_iterations": 1}, "dro_target_kl=0.01", "Write `num_iterations=4`"),
    ({"dro_target_kl": 0.01, "dro_beta": None, "policy_loss": "reinforce"}, "dro_target_kl=0.01", "policy_loss='dro'"),
    ({"dro_target_kl": 0.01, "dro_beta": None}, "dro_beta is not set", "Write `dro_beta=0.5`"),
    ({"dro_huber_delta": -1.0}, "dro_huber_delta=-1.0", "a finite number > 0 or None"),
    (
        {"dro_huber_delta": 1.0, "dro_beta": None, "policy_loss": "ppo_clip"},
        "dro_huber_delta=1.0",
        "policy_loss='dro'",
    ),
    ({"dro_huber_delta": 1.0, "policy_loss_kwargs": {"huber_delta": 2.0}}, "huber_delta is given twice", "only"),
    ({"rollout_is": "token", "rollout_is_threshold": 1e39}, "rollout_is_threshold=1e+39", "32 bits"),
    ({**RS, "rollout_rs_threshold": [1e39, 0.01]}, "rollout_rs_threshold=[1e+39, 0.01]", "one finite number > 0"),
    (
        {
            "rollout_rs": ["token_k1", "seq_sum_k1"],
            "rollout_rs_threshold": [2.0, 2.0],
            "rollout_rs_threshold_lower": [0.5, 3.0],
        },
        "rollout_rs_threshold_lower=3.0",
        "Write `rollout_rs_threshold_lower=[0.5, 0.3333]`",
    ),
    ({"rollout_correction_preset": ["decoupled_token_is"]}, "rollout_correction_preset=[", "the name of a preset"),
    (
        {"rollout_correction_preset": "decoupled_token_is", "anchor_policy": "sampling"},
        "rollout_correction_preset='decoupled_token_is'",
        "count the engine's mismatch twice",
    ),
    ({"advantage_baseline": "soft", "advantage_baseline_temperature": 1e39}, "advantage_baseline_temp", "32 bits"),
    ({"dro_huber_delta": 1e300}, "dro_huber_delta=1e+300", "32 bits"),
    ({"dro_beta": 1e39}, "dro_beta=1e+39", "a finite number > 0"),
    ({"policy_loss_kwargs": {"beta": 1e39}, "dro_beta": None}, "policy_loss_kwargs=", "32 bits"),
]


@pytest.mark.parametrize(("settings", "start", "hint"), BAD, ids=[str(settings)[:80] for settings, *_ in BAD])
def test_a_bad_setting_is_refused_with_the_line_to_write(settings, start, hint):
    with pytest.raises(ValueError, match=f"(?s)^{re.escape(start)}.*{re.escape(hint)}"):
        config(**settings)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_fields(name):
    extra = {"policy_loss": "ppo_clip", "dro_beta": None} if name.startswith("bypass") else {}
    by_name = config(rollout_correction_preset=name, **extra)
    by_hand = config(**PRESETS[name], **extra)
    assert by_name.build_rollout_correction() == by_hand.build_rollout_correction()
    assert by_name.anchor_policy == by_hand.anchor_policy
    assert (by_name.build_rollout_correction() is None) == (name in ("disabled", "bypass_ppo_clip"))
    again = dataclasses.replace(by_name, learning_rate=1e-3)
    assert again.build_rollout_correction() == by_name.build_rollout_correction()


def test_presets_that_cannot_be_carried_out_name_the_nearest():
    for name in REFUSED_PRESETS:
        with pytest.raises(ValueError, match=r"that is being trained.*Nearest is `rollout_correction_preset='decoup"):
            config(rollout_correction_preset=name)


def test_statistics_may_be_written_as_text_and_bounds_as_numbers():
    by_text = config(rollout_rs="token_k1", rollout_rs_threshold=2.0, rollout_rs_threshold_lower=0.5)
    (rejection,) = by_text.build_rollout_correction().rejections
    assert rejection == Rejection(statistic="token_k1", threshold=2.0, threshold_lower=0.5)
    several = config(
        rollout_rs="seq_mean_k3, token_k1", rollout_rs_threshold=(0.01, 2.0), rollout_rs_threshold_lower=0.5
    )
    assert several.build_rollout_correction().rejections[1] == rejection
    with_gaps = config(**{**RS, "rollout_rs_threshold_lower": [0.5, None]})
    assert with_gaps.build_rollout_correction().rejections[0] == rejection


def test_every_statistic_can_be_configured():
    for name in STATISTICS:
        lower = [0.5] if name.endswith("k1") else None
        settings = {"rollout_rs": [name], "rollout_rs_threshold": [2.0], "rollout_rs_threshold_lower": lower}
        assert config(**settings).build_rollout_correction().rejections[0].statistic == name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"anchor_policy": "sampling"}, False),
        ({"rollout_is": "token"}, False),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0}, False),
        ({"rollout_correction_preset": "disabled"}, False),
        (
            {"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0, "vllm_importance_sampling_correction": True},
            True,
        ),
    ],
    ids=str,
)
def test_the_correction_of_verl_takes_the_place_of_trls(settings, expected):
    assert config(use_vllm=True, **settings).vllm_importance_sampling_correction is expected


def test_a_translated_config_leaves_trls_correction_to_what_is_asked_for():
    source = GRPOConfig(
        **{key: BASE[key] for key in ("use_cpu", "bf16", "report_to", "num_iterations")},
        use_vllm=True,
        scale_rewards="none",
        activation_checkpointing=False,
    )
    assert DROConfig.from_grpo_config(source, dro_beta=0.5).vllm_importance_sampling_correction
    corrected = DROConfig.from_grpo_config(source, dro_beta=0.5, rollout_is="token")
    assert not corrected.vllm_importance_sampling_correction


@pytest.mark.parametrize("settings", [{"anchor_policy": "sampling"}, {"rollout_is": "token"}], ids=str)
@pytest.mark.parametrize("bias", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}], ids=str)
def test_sampling_that_biases_the_log_probs_draws_a_warning(settings, bias):
    ((name, value),) = bias.items()
    with pytest.warns(UserWarning, match=f"{name}={value} changes the distribution that is sampled from"):
        config(**settings, **bias)


def test_a_target_that_beta_can_hardly_reach_draws_a_warning():
    with pytest.warns(UserWarning, match=r"dro_target_kl=0\.01 with 2 optimizer steps on each generated batch"):
        config(dro_target_kl=0.01)
    config(dro_target_kl=0.01, num_iterations=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(dro_target_kl=0.01, anchor_policy="reference")


@pytest.mark.filterwarnings("ignore:Moved from generation_kwargs")
def test_sampling_set_in_generation_kwargs_draws_it_too():
    with pytest.warns(UserWarning, match=r"top_p=0\.9 changes the distribution that is sampled from"):
        config(anchor_policy="sampling", generation_kwargs={"top_p": 0.9})


def test_bounds_may_be_numbers_of_numpy_or_text_of_yaml():
    import numpy

    for bounds in ([numpy.float32(2)], numpy.int64(2), ["2.0"], "2e0", [2]):
        assert config(rollout_rs="token_k2", rollout_rs_threshold=bounds).rollout_rs_threshold == [2.0]


REPLACED = [
    ({"use_vllm": True}, {"rollout_is": "token"}),
    ({"use_vllm": True}, {"rollout_correction_preset": "decoupled_seq_is_rs"}),
    ({"use_vllm": True}, {"anchor_policy": "sampling"}),
    ({"use_vllm": True, "rollout_is": "token"}, {"rollout_is": None}),
    ({"use_vllm": True, "anchor_policy": "sampling"}, {"anchor_policy": "old"}),
    ({"rollout_correction_preset": "decoupled_seq_is_rs"}, {"rollout_correction_preset": "decoupled_token_is"}),
    ({"rollout_correction_preset": "decoupled_seq_is_rs"}, {"rollout_correction_preset": "disabled"}),
    ({"rollout_correction_preset": "decoupled_seq_is_rs"}, {"rollout_correction_preset": None}),
    ({"activation_checkpointing": None}, {"gradient_checkpointing": False}),
]


@pytest.mark.parametrize(("settings", "changes"), REPLACED, ids=str)
def test_what_was_derived_is_derived_anew_for_a_copy(settings, changes):
    fresh = config(**{**settings, **changes})
    for copy in (
        dataclasses.replace(config(**settings), **changes),
        DROConfig(**{**config(**settings).to_dict(), **changes}),
    ):
        assert copy.to_dict() == fresh.to_dict()


def test_what_was_given_stays_with_a_copy():
    kept = dataclasses.replace(config(use_vllm=True, vllm_importance_sampling_correction=False), seed=7)
    assert kept.vllm_importance_sampling_correction is False
    with pytest.raises(ValueError, match="vllm_importance_sampling_correction=True is refused"):
        dataclasses.replace(config(use_vllm=True, vllm_importance_sampling_correction=True), rollout_is="token")


@pytest.mark.parametrize(
    "bias",
    [{"presence_penalty": 1.0}, {"frequency_penalty": 0.5}, {"suppress_tokens": [3]}, {"logit_bias": {"3": 1.0}}],
    ids=str,
)
def test_penalties_of_the_engine_draw_a_warning(bias):
    ((name, value),) = bias.items()
    expected = re.escape(f"generation_kwargs[{name!r}]={value!r} changes the distribution")
    with pytest.warns(UserWarning, match=expected):
        config(anchor_policy="sampling", use_vllm=True, generation_kwargs=bias)


@pytest.mark.parametrize(
    "neutral", [{"min_p": 0.0}, {"use_vllm": True, "generation_kwargs": {"presence_penalty": 0.0}}], ids=str
)
def test_sampling_that_changes_nothing_draws_no_warning(neutral):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(anchor_policy="sampling", **neutral)


@pytest.mark.parametrize(
    "off", [{"rollout_is": "token"}, {"anchor_policy": "sampling"}, {"vllm_importance_sampling_correction": False}]
)
@pytest.mark.parametrize(
    "idle", [{"vllm_importance_sampling_mode": "token_mask"}, {"vllm_importance_sampling_clip_max": 5.0}], ids=str
)
def test_options_of_a_correction_that_is_off_draw_a_warning(off, idle):
    ((name, _),) = idle.items()
    with pytest.warns(UserWarning, match=f"{name}=.* has no effect: TRL's correction is off"):
        config(use_vllm=True, **off, **idle)
