import math

import pytest
import torch

from trl_dro.metrics import MetricAccumulator, add_log_ratio_metrics
from trl_dro.policy_loss import PolicyLossInputs


def alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0)


def log_ratio_inputs(log_ratio: torch.Tensor, mask: torch.Tensor) -> PolicyLossInputs:
    return PolicyLossInputs(log_ratio, torch.zeros_like(log_ratio), torch.ones(len(log_ratio), 1), mask)


def test_means_weigh_every_token_alike_over_micro_batches_and_windows():
    metrics = MetricAccumulator()
    metrics.add_mean("x", torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]]))
    metrics.add_mean("x", torch.tensor([[6.0]]), torch.tensor([[True]]))
    metrics.close_window(alone)
    metrics.add_mean("x", torch.tensor([[7.0]]), torch.tensor([[True]]))
    metrics.close_window(alone)
    assert metrics.flush() == {"x": 4.0}
    assert metrics.flush() == {}


def test_a_window_sum_adds_micro_batches_and_averages_ranks_and_windows():
    metrics = MetricAccumulator()
    other_rank = torch.tensor([0.0, 4.0])  # of [count, sum]: the same count, a sum that is 4 higher
    for window in ([1.0, 2.0], [5.0]):
        for share in window:
            metrics.add_to_window("policy_loss", torch.tensor(share))
        metrics.close_window(lambda local: torch.stack([local, local + other_rank]))
    assert metrics.flush()["policy_loss"] == ((3 + 7) / 2 + (5 + 9) / 2) / 2


def test_ranks_are_pooled_by_kind():
    metrics = MetricAccumulator()
    mask = torch.tensor([[True, True]])
    metrics.add_mean("mean", torch.tensor([[1.0, 3.0]]), mask)
    metrics.add_extreme("low_min", torch.tensor([[1.0, 3.0]]), mask, largest=False)
    metrics.add_extreme("high_max", torch.tensor([[1.0, 3.0]]), mask, largest=True)
    # A second rank whose every number is 10 higher; its counts stay what they are.
    keys = ["count:mean", "max:high_max", "min:low_min", "sum:mean"]
    other = torch.tensor([0.0, 10.0, 10.0, 20.0])
    assert keys == sorted(keys)
    metrics.close_window(lambda local: torch.stack([local, local + other]))
    assert metrics.flush() == {"mean": 7.0, "low_min": 1.0, "high_max": 13.0}


def test_one_window_costs_one_collective():
    metrics, calls = MetricAccumulator(), []
    for _ in range(5):
        metrics.add_mean("a", torch.ones(2, 2))
        metrics.add_quantiles("b", torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool))
    metrics.close_window(lambda local: calls.append(local) or alone(local))
    assert len(calls) == 1


def test_what_was_never_trained_is_left_out_of_the_log():
    metrics = MetricAccumulator()
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    values = torch.full((2, 3), float("nan"))
    metrics.add_mean("mean", values, nothing)
    metrics.add_extreme("x_max", values, nothing, largest=True)
    metrics.add_quantiles("q", values, nothing)
    metrics.close_window(alone)
    assert metrics.flush() == {}


@pytest.mark.parametrize("scale", [1e-4, 0.1, 5.0])
def test_quantiles_are_within_two_percent_of_the_exact_ones(scale):
    values = scale * torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(64, 128, generator=torch.Generator().manual_seed(1)) < 0.7
    metrics = MetricAccumulator()
    for rows in range(0, 64, 16):  # the sketch does not depend on the cut
        metrics.add_quantiles("l", values[rows : rows + 16], mask[rows : rows + 16])
    metrics.close_window(alone)
    logs = metrics.flush()
    for label, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        exact = torch.quantile(values[mask], share).item()
        assert logs[f"l_{label}"] == pytest.approx(exact, rel=0.02, abs=0.02 * scale)


@pytest.mark.parametrize("value", [0.0, 0.3, -2000.0, 2000.0, 1e-9])
def test_quantiles_of_a_constant_are_that_constant(value):
    metrics = MetricAccumulator()
    metrics.add_quantiles("l", torch.full((2, 5), value), torch.ones(2, 5, dtype=torch.bool))
    metrics.close_window(alone)
    logs = metrics.flush()
    assert [logs["l_p01"], logs["l_p50"], logs["l_p99"]] == [pytest.approx(value)] * 3


def test_quantiles_beyond_the_grid_lie_between_its_end_and_the_largest_value():
    metrics = MetricAccumulator()
    values = torch.cat([torch.zeros(90), torch.full((10,), -5000.0)]).unsqueeze(0)
    metrics.add_quantiles("l", values, torch.ones(1, 100, dtype=torch.bool))
    metrics.close_window(alone)
    logs = metrics.flush()
    assert -5000.0 <= logs["l_p01"] <= -4000.0
    assert logs["l_p50"] == pytest.approx(0.0, abs=1e-6)


def test_log_ratio_metrics_at_token_level_match_hand_computed_numbers():
    log_ratio = torch.tensor([[0.5, -1.0], [2.0, 99.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    metrics = MetricAccumulator()
    add_log_ratio_metrics(metrics, log_ratio_inputs(log_ratio, mask), "token")
    metrics.close_window(alone)
    logs = metrics.flush()
    assert logs["dro/log_ratio_mean"] == pytest.approx(1.5 / 3)
    assert logs["dro/log_ratio_abs"] == pytest.approx(3.5 / 3)
    assert logs["dro/log_ratio_max"] == 2.0
    assert logs["dro/kl_k1"] == pytest.approx(-1.5 / 3)
    assert logs["dro/kl_k2"] == pytest.approx((0.25 + 1 + 4) / 2 / 3)
    k3 = sum(math.exp(x) - 1 - x for x in (0.5, -1.0, 2.0)) / 3
    assert logs["dro/kl_k3"] == pytest.approx(k3, rel=1e-5)


def test_log_ratio_metrics_at_sequence_level_use_the_summed_log_ratio():
    log_ratio = torch.tensor([[0.5, -1.0], [2.0, 99.0], [7.0, 7.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    metrics = MetricAccumulator()
    add_log_ratio_metrics(metrics, log_ratio_inputs(log_ratio, mask), "sequence")
    metrics.close_window(alone)
    logs = metrics.flush()
    assert logs["dro/log_ratio_mean"] == pytest.approx((-0.5 + 2.0) / 2)
    assert logs["dro/kl_k2"] == pytest.approx((0.125 + 2.0) / 2)


def test_the_penalty_share_is_a_ratio_of_means_and_left_out_at_zero_over_zero():
    for advantage, expected in ((2.0, 0.25), (0.0, None)):
        metrics = MetricAccumulator()
        mask = torch.ones(1, 2, dtype=torch.bool)
        metrics.add_objective_metrics(
            {
                "dro/penalty_abs": torch.full((1, 2), 0.25 * advantage),
                "dro/advantage_abs": torch.full((1, 2), advantage),
            },
            mask,
        )
        metrics.close_window(alone)
        assert metrics.flush().get("dro/penalty_share") == expected


def test_objective_metrics_are_reduced_by_the_suffix_of_their_name():
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    metrics = MetricAccumulator()
    metrics.add_objective_metrics(
        {
            "clip/mean": torch.tensor([[1.0, 0.0], [1.0, 5.0], [5.0, 5.0]]),
            "clip/low_min": torch.tensor([[0.5], [0.25], [-9.0]]),
            "clip/high_max": torch.tensor([[0.5], [0.25], [9.0]]),
            "per_sequence": torch.tensor([[1.0], [3.0], [99.0]]),
        },
        mask,
    )
    metrics.close_window(alone)
    logs = metrics.flush()
    assert logs["clip/mean"] == pytest.approx(2 / 3)
    assert logs["clip/low_min"] == 0.25
    assert logs["clip/high_max"] == 0.5
    assert logs["per_sequence"] == 2.0
