"""What a completion's reward is compared with: the baselines of a group of completions to one prompt."""

import math

import torch
from torch import Tensor


# In float32 a smaller one would be 0. The soft value is the maximum long before.
_LOWEST_TEMPERATURE = 1e-30

BASELINES = ("mean", "leave-one-out", "soft")


def total_rewards(rewards_per_func: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each completion's rewards, NaN for one that no function rewards.

    Args:
        rewards_per_func: (B, number of reward functions), NaN where a function does not apply.
        weights: (number of reward functions,).
    """
    total = (rewards_per_func * weights.to(rewards_per_func)).nansum(dim=1)
    return torch.where(rewards_per_func.isnan().all(dim=1), math.nan, total)


def group_advantages(
    rewards: Tensor, num_generations: int, *, baseline: str, temperature: float | Tensor | None = None
) -> Tensor:
    """Rewards minus the baseline of their group.

        mean            mean(r)
        leave-one-out   mean of the group's other rewards (RLOO, https://arxiv.org/abs/2402.14740)
        soft            tau log mean exp(r / tau): the value of the KL-regularised optimum, which DRO regresses on
                        (https://arxiv.org/abs/2405.19107); between mean (tau large) and maximum (tau small)

    Args:
        rewards: (B,), the completions of a prompt next to each other; NaN where a completion has no reward, which
            leaves it out of its group.
        num_generations: completions in a group.
        baseline: `"mean"`, `"leave-one-out"` or `"soft"`.
        temperature: tau of `"soft"`, > 0, in units of reward.

    Returns:
        (B,) advantages, 0 for a completion without a reward and for the only one in its group that has one.

    Raises:
        ValueError: an unknown baseline, or `"soft"` without a temperature.
    """
    groups = rewards.view(-1, num_generations)
    valid = ~groups.isnan()
    count = valid.sum(dim=1, keepdim=True)
    if baseline == "soft":
        if temperature is None:
            raise ValueError("baseline='soft' needs a temperature > 0: write temperature=0.1.")
        temperature = torch.as_tensor(temperature).to(groups).clamp(min=_LOWEST_TEMPERATURE)
        # Measured from the best of the group, so that no temperature loses digits.
        gaps = groups - torch.where(valid, groups, -math.inf).amax(dim=1, keepdim=True)
        lost = torch.where(valid, torch.expm1(gaps / temperature), 0.0).sum(dim=1, keepdim=True)
        advantages = gaps - temperature * torch.log1p(lost / count.clamp(min=1))
    elif baseline in BASELINES:
        advantages = groups - torch.where(valid, groups, 0.0).sum(dim=1, keepdim=True) / count.clamp(min=1)
        if baseline == "leave-one-out":
            advantages = advantages * (count.to(groups) / (count - 1).clamp(min=1))
    else:
        raise ValueError(f"baseline={baseline!r} is not allowed: write one of {', '.join(map(repr, BASELINES))}.")
    return torch.where(valid, advantages, 0.0).flatten()
