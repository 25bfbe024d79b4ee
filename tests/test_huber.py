"""The linear tail of DRO's penalty."""

import math

import pytest
import torch

from trl_dro.policy_loss import PolicyLossInputs, get_policy_loss


LOG_RATIO = torch.tensor([[0.5, -1.0, 3.0, -8.0]], dtype=torch.float64)


def run(level: str, delta: float | None, log_ratio=LOG_RATIO, mask=None, advantage=0.0):
    logps = (log_ratio - 2.0).requires_grad_()
    mask = torch.ones_like(log_ratio) if mask is None else mask
    old, advantages = torch.full_like(log_ratio, -2.0), torch.full_like(log_ratio[:, :1], advantage)
    objective = get_policy_loss("dro", beta=0.7, level=level, huber_delta=delta)
    output = objective(PolicyLossInputs(logps, old, advantages, mask))
    loss = output.per_token_loss[mask.bool()]
    loss.sum().backward()
    return output.per_token_loss.detach(), logps.grad, output.metrics


def test_within_the_bound_the_penalty_is_quadratic_and_beyond_linear():
    loss, gradient, _ = run("token", 2.0)
    torch.testing.assert_close(loss, 0.7 * torch.tensor([[0.125, 0.5, 2 * (3 - 1), 2 * (8 - 1)]], dtype=torch.float64))
    torch.testing.assert_close(gradient, 0.7 * torch.tensor([[0.5, -1.0, 2.0, -2.0]], dtype=torch.float64))


@pytest.mark.parametrize(("total", "value", "pull"), [(1.0, 0.5, 1.0), (-5.0, 2 * 4, -2.0), (0.0, 0.0, 0.0)])
def test_at_sequence_level_the_sum_is_bounded(total, value, pull):
    log_ratio = torch.tensor([[total + 1.0, -1.0]], dtype=torch.float64)
    loss, gradient, _ = run("sequence", 2.0, log_ratio)
    assert loss.sum().item() == pytest.approx(0.7 * value)
    torch.testing.assert_close(gradient, torch.full((1, 2), 0.7 * pull, dtype=torch.float64))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_bound_that_nothing_reaches_changes_no_digit(level):
    for plain, bounded in zip(run(level, None)[:2], run(level, 100.0)[:2], strict=True):
        assert torch.equal(plain, bounded)


def test_the_value_has_no_step_at_the_bound():
    low, high = (run("token", 2.0, torch.tensor([[2.0 + side]], dtype=torch.float64))[0] for side in (-1e-9, 1e-9))
    assert (high - low).abs().item() < 1e-8


def test_an_advantage_beyond_the_bound_has_no_point_of_rest():
    _, gradient, metrics = run("token", 2.0, advantage=2.0)  # beta * delta = 1.4
    assert (gradient < 0).all()
    assert not metrics["dro/past_optimum"].any()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_positions_change_nothing(level):
    mask = torch.tensor([[1, 1, 1, 0]])
    poisoned = torch.where(mask.bool(), LOG_RATIO, math.nan)
    for clean, dirty in zip(run(level, 2.0, LOG_RATIO, mask)[:2], run(level, 2.0, poisoned, mask)[:2], strict=True):
        assert torch.equal(clean[mask.bool()], dirty[mask.bool()])


@pytest.mark.parametrize("delta", [0.0, -1.0, math.nan, math.inf, "2", True])
def test_a_bad_bound_is_refused(delta):
    with pytest.raises(ValueError, match=r"huber_delta=.* must be a finite number > 0 or None"):
        get_policy_loss("dro", beta=0.5, huber_delta=delta)
