"""Objectives that single out tokens by the covariance of their advantage and log-probability over the micro-batch."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..masking import masked_mean
from ..policy_loss import PolicyLossInputs, PolicyLossOutput, register_policy_loss
from .shared import check, check_epsilons, clip_metrics, clipped_sides, clipped_surrogate


@register_policy_loss("clip_cov")
@dataclass(frozen=True, kw_only=True)
class ClipCov:
    """Clipped surrogate that drops a random few of the tokens with a high covariance of advantage and log-probability.

        ppo_clip without second clip, and 0 on k random tokens with cov_low < (A - mean A)(logp - mean logp) < cov_high

    The means are over the micro-batch, k = max(1, floor(cov_fraction * number of tokens)), and a token that is clipped
    anyway is no candidate.

    Paper: https://arxiv.org/abs/2505.22617.

    Args:
        epsilon_low (`float`, *optional*, defaults to `0.2`):
            From 0 to 1; 1 switches the lower clip off.
        epsilon_high (`float`, *optional*, defaults to `0.2`):
            >= 0.
        cov_fraction (`float`, *optional*, defaults to `2e-4`):
            Share of the tokens that is dropped, > 0 and <= 1.
        cov_low, cov_high (`float`, *optional*, default to `1.0` and `5.0`):
            The range of covariances to draw from.

    Returns:
        [`PolicyLossOutput`] with TRL's `clip_ratio/*` metrics and `clip_cov/dropped_ratio`.

    Raises:
        ValueError: a parameter is not allowed.
    """

    decomposes_over_rows: ClassVar[bool] = False

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    cov_fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        check_epsilons(self)
        _check_cov_fraction(self)
        check(self, "cov_low", lambda v: True, "a finite number", "cov_low=1.0")
        check(
            self, "cov_high", lambda v: v > self.cov_low, f"a finite number > cov_low={self.cov_low!r}", "cov_high=5.0"
        )

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        ratio, advantages = inputs.ratio, inputs.advantages
        low, high = clipped_sides(self, ratio, advantages)
        covariance = _covariance(inputs)
        candidates = inputs.mask & ~low & ~high & (covariance > self.cov_low) & (covariance < self.cov_high)
        dropped = _highest(torch.rand_like(covariance), candidates, _share_of(self.cov_fraction, inputs.mask))
        loss = torch.where(dropped, 0.0, clipped_surrogate(self, ratio, advantages))
        return PolicyLossOutput(loss, {**clip_metrics(low, high, inputs.mask), "clip_cov/dropped_ratio": dropped})


@register_policy_loss("kl_cov")
@dataclass(frozen=True, kw_only=True)
class KLCov:
    """Importance-sampled surrogate with a penalty on the tokens of the highest covariance.

        -A r, plus kl_coef |l| on the k tokens with the largest (A - mean A)(logp - mean logp)

    The means are over the micro-batch, and k = max(1, floor(cov_fraction * number of tokens)).

    Paper: https://arxiv.org/abs/2505.22617.

    Args:
        cov_fraction (`float`, *optional*, defaults to `2e-4`):
            Share of the tokens that is penalised, > 0 and <= 1.
        kl_coef (`float`, *optional*, defaults to `1.0`):
            Strength of the penalty, >= 0.

    Returns:
        [`PolicyLossOutput`] with `kl_cov/selected_ratio`.

    Raises:
        ValueError: a parameter is not allowed.
    """

    decomposes_over_rows: ClassVar[bool] = False

    cov_fraction: float = 2e-4
    kl_coef: float = 1.0

    def __post_init__(self) -> None:
        _check_cov_fraction(self)
        check(self, "kl_coef", lambda v: v >= 0, "a finite number >= 0", "kl_coef=1.0")

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        selected = _highest(_covariance(inputs), inputs.mask, _share_of(self.cov_fraction, inputs.mask))
        penalty = torch.where(selected, self.kl_coef * inputs.log_ratio.abs(), 0.0)
        loss = -inputs.advantages * inputs.ratio + penalty
        return PolicyLossOutput(loss, {"kl_cov/selected_ratio": selected})


def _covariance(inputs: PolicyLossInputs) -> torch.Tensor:
    advantages, logps = inputs.advantages, inputs.per_token_logps.detach()
    return (advantages - masked_mean(advantages, inputs.mask)) * (logps - masked_mean(logps, inputs.mask))


def _share_of(fraction: float, mask: torch.Tensor) -> torch.Tensor:
    return (fraction * mask.sum()).floor().clamp(min=1)


def _highest(scores: torch.Tensor, candidates: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The k candidates of highest score, or all if they are fewer. By rank, since topk needs k on the host."""
    scores = torch.where(candidates, scores, -math.inf)
    rank = scores.flatten().argsort(descending=True, stable=True).argsort().view_as(scores)
    return candidates & (rank < k)


def _check_cov_fraction(loss: ClipCov | KLCov) -> None:
    what = "a number > 0 and <= 1, the share of the tokens"
    check(loss, "cov_fraction", lambda v: 0 < v <= 1, what, "cov_fraction=2e-4")
