"""Group baselines, against values by hand and the properties that define them."""

import math

import pytest
import torch

from trl_dro.advantages import BASELINES, group_advantages


REWARDS = torch.tensor([1.0, 0.0, 0.0, 3.0, 2.0, 2.0, 2.0, 2.0], dtype=torch.float64)


def test_mean_is_the_groups_mean():
    assert group_advantages(REWARDS, 4, baseline="mean").tolist() == [0, -1, -1, 2, 0, 0, 0, 0]


def test_leave_one_out_is_the_mean_of_the_others():
    advantages = group_advantages(REWARDS, 4, baseline="leave-one-out")
    torch.testing.assert_close(advantages[:4], torch.tensor([0.0, -4 / 3, -4 / 3, 3 - 1 / 3], dtype=torch.float64))
    assert not advantages[4:].any()


def test_soft_is_the_log_mean_exp():
    advantages = group_advantages(REWARDS, 4, baseline="soft", temperature=0.5)
    value = 0.5 * math.log((math.exp(2) + 2 * math.exp(0) + math.exp(6)) / 4)
    torch.testing.assert_close(advantages[:4], REWARDS[:4] - value)
    # the fixed point it is named for: the optimal policy's weights exp(A / tau) average to 1
    assert (advantages[:4] / 0.5).exp().mean().item() == pytest.approx(1.0)
    assert not advantages[4:].any()


def test_soft_lies_between_mean_and_maximum():
    torch.testing.assert_close(
        group_advantages(REWARDS, 4, baseline="soft", temperature=1e6),
        group_advantages(REWARDS, 4, baseline="mean"),
        rtol=0,
        atol=1e-5,
    )
    torch.testing.assert_close(
        group_advantages(REWARDS.float(), 4, baseline="soft", temperature=1e6),
        group_advantages(REWARDS.float(), 4, baseline="mean"),
        rtol=0,
        atol=1e-5,
    )
    cold = group_advantages(REWARDS, 4, baseline="soft", temperature=1e-3)
    torch.testing.assert_close(cold[:4], REWARDS[:4] - 3.0, rtol=0, atol=1e-2)


@pytest.mark.parametrize("baseline", BASELINES)
def test_advantages_do_not_see_a_shift_of_the_rewards(baseline):
    torch.testing.assert_close(
        group_advantages(REWARDS + 1e3, 4, baseline=baseline, temperature=0.1),
        group_advantages(REWARDS, 4, baseline=baseline, temperature=0.1),
    )


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_completion_without_a_reward_is_left_out_of_its_group(baseline):
    rewards = torch.tensor([1.0, math.nan, 0.0, 2.0, math.nan, math.nan, 5.0, math.nan])
    advantages = group_advantages(rewards, 4, baseline=baseline, temperature=0.7)
    expected = group_advantages(torch.tensor([1.0, 0.0, 2.0]), 3, baseline=baseline, temperature=0.7)
    torch.testing.assert_close(advantages[[0, 2, 3]], expected)
    assert advantages[[1, 4, 5, 7]].tolist() == [0.0] * 4
    assert advantages[6] == 0.0  # nothing to compare it with


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("rewards", [[math.nan] * 4, [1e30, 0.0, 0.0, -1e30], [0.0] * 4])
def test_advantages_are_finite(baseline, rewards):
    assert group_advantages(torch.tensor(rewards), 4, baseline=baseline, temperature=1e-4).isfinite().all()


@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-8, 1e8, 1e30])
def test_soft_goes_from_the_best_to_the_mean_at_any_temperature(temperature):
    rewards = torch.tensor([1.0, 0.0, 3.0, 2.0])
    advantages = group_advantages(rewards, 4, baseline="soft", temperature=temperature)
    expected = rewards - (rewards.max() if temperature < 1 else rewards.mean())
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("baseline", BASELINES)
def test_one_completion_for_each_prompt_has_no_advantage(baseline):
    assert not group_advantages(REWARDS, 1, baseline=baseline, temperature=0.5).any()


def test_bad_parameters_are_refused():
    with pytest.raises(
        ValueError, match="baseline='loo' is not allowed: write one of 'mean', 'leave-one-out', 'soft'"
    ):
        group_advantages(REWARDS, 4, baseline="loo")
    with pytest.raises(ValueError, match="baseline='soft' needs a temperature"):
        group_advantages(REWARDS, 4, baseline="soft")
