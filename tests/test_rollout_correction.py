"""Rollout correction: equal to verl's on recorded values, and harmless on what an engine should never report."""

import json
import math
from pathlib import Path

import pytest
import torch

from trl_dro.rollout_correction import (
    PRESETS,
    REFUSED_PRESETS,
    STATISTICS,
    Rejection,
    RolloutCorrection,
    importance_weights,
    mismatch_metrics,
    preset_fields,
    rejection_mask,
)


# Made by running verl; see the note in the file.
VERL = json.loads((Path(__file__).parent / "data" / "verl_rollout_correction.json").read_text())["batches"]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log_ratio_and_mask(batch) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor(batch["old_per_token_logps"]) - tensor(batch["sampling_per_token_logps"]), tensor(batch["mask"])


def check_metrics(metrics: dict[str, torch.Tensor], expected: dict[str, float]) -> None:
    # verl logs float32 shares
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected, abs=1e-7, rel=1e-7)


def cases(kind: str) -> list:
    def name(case) -> str:
        return "-".join(str(value) for key, value in case.items() if not isinstance(value, (list, dict)))

    return [pytest.param(batch, case, id=name(case)) for batch in VERL for case in batch[kind]]


@pytest.mark.parametrize(("batch", "case"), cases("importance"))
def test_weights_are_verls(batch, case):
    weights, metrics = importance_weights(
        *log_ratio_and_mask(batch),
        level=case["rollout_is"],
        threshold=case["threshold"],
        threshold_lower=case["threshold_lower"],
        batch_normalize=case["batch_normalize"],
    )
    torch.testing.assert_close(weights, tensor(case["weights"]), rtol=0, atol=1e-8)
    check_metrics(metrics, case["metrics"])


@pytest.mark.parametrize(("batch", "case"), cases("rejection"))
def test_rejection_is_verls(batch, case):
    mask, metrics = rejection_mask(
        *log_ratio_and_mask(batch),
        statistic=case["rollout_rs"],
        threshold=case["threshold"],
        threshold_lower=case["threshold_lower"],
    )
    torch.testing.assert_close(mask, tensor(case["mask"]), rtol=0, atol=0)
    check_metrics(metrics, case["metrics"])


def test_every_statistic_of_verl_is_compared():
    assert {case["rollout_rs"] for batch in VERL for case in batch["rejection"]} == set(STATISTICS)


@pytest.mark.parametrize("batch", VERL)
def test_mismatch_metrics_are_verls(batch):
    old, sampling, mask = (tensor(batch[name]) for name in ("old_per_token_logps", "sampling_per_token_logps", "mask"))
    check_metrics(mismatch_metrics(old, sampling, mask), batch["mismatch_metrics"])


# By hand


def test_weights_outside_two_bounds_are_zero_and_counted():
    log_ratio = torch.tensor([[0.1, 3.0, 1.0, 2.0, 7.0]]).log()
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    weights, metrics = importance_weights(log_ratio, mask, level="token", threshold=2.5, threshold_lower=0.5)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.0, 1.0, 2.0, 0.0]]))
    assert metrics["rollout_is_oob_ratio"] == 0.5
    assert metrics["rollout_is_ratio_fraction_high"] == metrics["rollout_is_ratio_fraction_low"] == 0.25
    assert metrics["rollout_is_mean"] == 0.75
    # (sum of weights)^2 / (n * sum of their squares)
    assert metrics["rollout_is_eff_sample_size"].item() == pytest.approx(9 / (4 * 5))


def test_the_weight_of_a_sequence_is_the_product_of_its_tokens():
    log_ratio = torch.tensor([[1.5, 0.5, 9.0], [0.5, 1.0, 0.25]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    weights, _ = importance_weights(log_ratio, mask, level="sequence", threshold=2.0)
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.75, 0.0], [0.125, 0.125, 0.125]]))
    weights, metrics = importance_weights(log_ratio, mask, level="sequence", threshold=2.0, batch_normalize=True)
    assert metrics["rollout_is_batch_norm_factor"] == (0.75 + 0.125) / 2  # each sequence counts once
    torch.testing.assert_close(weights[:, :2].sum(), torch.tensor(4.0))


def test_normalised_weights_have_mean_one_whatever_the_engine_is_off_by():
    torch.manual_seed(0)
    log_ratio, mask = torch.randn(4, 6) * 0.1 - 3.0, torch.rand(4, 6) < 0.7
    weights, _ = importance_weights(log_ratio, mask, level="token", threshold=2.0, batch_normalize=True)
    assert weights[mask].mean().item() == pytest.approx(1.0)


def test_several_rejections_leave_what_each_of_them_accepts():
    log_ratio = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.4, 0.4, 0.4]])
    mask = torch.ones(3, 3, dtype=torch.bool)
    both = RolloutCorrection(
        rejections=(
            Rejection(statistic="token_k2", threshold=0.3),  # the second token
            Rejection(statistic="seq_sum_k1", threshold=3.0, threshold_lower=0.35),  # the third row: exp(-1.2)
        )
    )
    weights, kept, metrics = both(log_ratio, mask)
    assert weights is None
    assert kept.tolist() == [[True, False, True], [True, True, True], [False, False, False]]
    assert metrics["rollout_rs_masked_fraction"].item() == pytest.approx(4 / 9)
    assert metrics["rollout_rs_seq_masked_fraction"].item() == pytest.approx(2 / 3)
    assert metrics["rollout_rs_token_k2_masked_fraction"].item() == pytest.approx(1 / 9)
    assert metrics["rollout_rs_seq_sum_k1_masked_fraction"].item() == pytest.approx(3 / 9)


def test_weights_are_measured_on_all_tokens_also_beside_a_rejection():
    log_ratio, mask = torch.tensor([[0.1, 5.0]]), torch.ones(1, 2)
    correction = RolloutCorrection(level="token", rejections=(Rejection(statistic="token_k2", threshold=0.3),))
    weights, kept, _ = correction(log_ratio, mask)
    torch.testing.assert_close(weights, torch.tensor([[math.exp(0.1), 2.0]]))
    assert kept.tolist() == [[1.0, 0.0]]


# What an engine should never report

POISON = [math.nan, math.inf, -math.inf, 1e4, -1e4]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lower", [None, 0.5])
def test_poisoned_log_ratios_give_finite_weights_and_metrics(poison, level, lower):
    log_ratio = torch.zeros(3, 4)
    log_ratio[0, 1] = log_ratio[1] = poison
    mask = torch.ones(3, 4)
    weights, metrics = importance_weights(
        log_ratio, mask, level=level, threshold=2.0, threshold_lower=lower, batch_normalize=True
    )
    assert weights.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())
    assert (weights[2] > 0).all()
    for name in STATISTICS:
        kept, metrics = rejection_mask(
            log_ratio, mask, statistic=name, threshold=1.5, threshold_lower=0.5 if name.endswith("k1") else None
        )
        assert kept[2].all()
        assert all(value.isfinite() for value in metrics.values())
    metrics = mismatch_metrics(torch.full((3, 4), -1.0), -1.0 - log_ratio, mask)
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("poison", POISON[:3])
def test_a_token_that_the_engine_could_not_score_counts_as_unchanged(poison):
    known, poisoned = torch.tensor([[0.5, 0.0, -0.2]]), torch.tensor([[0.5, poison, -0.2]])
    mask = torch.ones(1, 3)
    for level in ("token", "sequence"):
        expected, _ = importance_weights(known, mask, level=level, threshold=2.0)
        weights, _ = importance_weights(poisoned, mask, level=level, threshold=2.0)
        torch.testing.assert_close(weights, expected)
    old = torch.full((1, 3), -1.0)
    expected = mismatch_metrics(old, old - known, mask)
    assert mismatch_metrics(old, old - poisoned, mask) == expected


@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_without_a_trained_token_gives_zeros(rows):
    nothing, mask = torch.full((rows, 3), math.nan), torch.zeros(rows, 3)
    weights, metrics = importance_weights(nothing, mask, level="sequence", threshold=2.0, batch_normalize=True)
    assert not weights.any()
    kept, of_rejection = rejection_mask(nothing, mask, statistic="seq_max_k2", threshold=1.0)
    assert not kept.any()
    for name, value in {**metrics, **of_rejection, **mismatch_metrics(nothing, nothing, mask)}.items():
        assert value == (1.0 if name == "rollout_is_batch_norm_factor" else 0.0), name


def test_masked_positions_change_nothing():
    torch.manual_seed(0)
    log_ratio, mask = torch.randn(3, 5), torch.rand(3, 5) < 0.6
    poisoned = torch.where(mask, log_ratio, math.nan)
    correction = RolloutCorrection(level="sequence", rejections=(Rejection(statistic="seq_mean_k3", threshold=0.3),))
    expected, got = correction(log_ratio, mask), correction(poisoned, mask)
    torch.testing.assert_close(got, expected)


def test_weights_have_no_gradient():
    log_ratio = torch.zeros(1, 2, requires_grad=True)
    weights, _ = importance_weights(log_ratio, torch.ones(1, 2), level="token", threshold=2.0)
    assert not weights.requires_grad


def test_half_precision_is_measured_in_float32():
    weights, _ = importance_weights(
        torch.full((1, 2), 0.3, dtype=torch.bfloat16), torch.ones(1, 2), level="token", threshold=2.0
    )
    assert weights.dtype == torch.float32


# Bad parameters


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"level": "tokens", "threshold": 2.0}, "level='tokens' is not allowed: write one of 'token', 'sequence'"),
        ({"level": "token", "threshold": 0.0}, "threshold=0.0 is not allowed"),
        ({"level": "token", "threshold": math.nan}, "threshold=nan is not allowed"),
        ({"level": "token", "threshold": True}, "threshold=True is not allowed"),
        ({"level": "token", "threshold": 2.0, "threshold_lower": 3.0}, "must be below threshold=2.0"),
        ({"level": "token", "threshold": 2.0, "threshold_lower": -1.0}, "threshold_lower=-1.0 is not allowed"),
    ],
)
def test_bad_weights_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        importance_weights(torch.zeros(1, 1), torch.ones(1, 1), **parameters)
    with pytest.raises(ValueError, match=message):
        RolloutCorrection(**parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"statistic": "seq_max_k1", "threshold": 2.0}, "statistic='seq_max_k1' is not allowed"),
        ({"statistic": "token_k1", "threshold": 2.0}, r"threshold_lower is missing. Write threshold_lower=0\.5"),
        ({"statistic": "token_k2", "threshold": 2.0, "threshold_lower": 0.5}, "has no lower bound"),
        ({"statistic": "token_k2", "threshold": math.inf}, "threshold=inf is not allowed"),
    ],
)
def test_bad_rejections_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        rejection_mask(torch.zeros(1, 1), torch.ones(1, 1), **parameters)


def test_presets_are_correct_corrections_and_the_others_say_why():
    assert preset_fields("decoupled_seq_is_rs") == {
        "rollout_is": "sequence",
        "rollout_rs": ["seq_sum_k1"],
        "rollout_rs_threshold": [2.0],
        "rollout_rs_threshold_lower": [0.5],
    }
    for name in REFUSED_PRESETS:
        with pytest.raises(ValueError, match="it corrects the policy that is being trained"):
            preset_fields(name)
        assert name not in PRESETS
    with pytest.raises(ValueError, match=r"'decoupled_tokn_is' is not allowed: write one of .*'decoupled_token_is'"):
        preset_fields("decoupled_tokn_is")


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)], ids=str)
def test_nothing_to_correct_is_no_error(shape):
    empty, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for level in ("token", "sequence"):
        weights, metrics = importance_weights(empty, mask, level=level, threshold=2.0, batch_normalize=True)
        assert weights.shape == shape
        assert all(value.isfinite() for value in metrics.values())
    for statistic in STATISTICS:
        lower = 0.5 if statistic.endswith("k1") else None
        kept, metrics = rejection_mask(empty, mask, statistic=statistic, threshold=2.0, threshold_lower=lower)
        assert kept.shape == shape
        assert all(value.isfinite() for value in metrics.values())
    assert all(value.isfinite() for value in mismatch_metrics(empty, empty, mask).values())


@pytest.mark.parametrize("threshold", [1e39, 10**400, math.inf, math.nan, 0.0, "2"])
def test_bounds_beyond_float32_are_refused(threshold):
    with pytest.raises(ValueError, match=r"threshold=.* is not allowed"):
        importance_weights(torch.zeros(1, 2), torch.ones(1, 2), level="token", threshold=threshold)
    with pytest.raises(ValueError, match=r"threshold=.* is not allowed"):
        rejection_mask(torch.zeros(1, 2), torch.ones(1, 2), statistic="token_k2", threshold=threshold)


def test_bounds_of_k1_are_on_the_ratio_of_engine_to_trainer():
    log_ratio = torch.tensor([[3.0, 0.3]]).log()
    kept, _ = rejection_mask(log_ratio, torch.ones(1, 2), statistic="token_k1", threshold=4.0, threshold_lower=0.5)
    assert kept.tolist() == [[0.0, 1.0]]  # 1/3 is below 0.5, 1/0.3 is not above 4
