"""Policy gradients without a surrogate: the log-probability, or the ratio, times a weight."""

import math
from dataclasses import dataclass, field

import torch

from ..policy_loss import PolicyLossInputs, PolicyLossOutput, register_policy_loss
from .shared import check, check_epsilons


@register_policy_loss("reinforce", "gpg")
@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """Policy gradient without any correction for stale tokens.

        -A logp

    Paper: Williams, 1992, https://doi.org/10.1007/BF00992696; as GPG, https://arxiv.org/abs/2504.02546.

    Returns:
        [`PolicyLossOutput`] without metrics.
    """

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        return PolicyLossOutput(-inputs.advantages * inputs.per_token_logps)


@register_policy_loss("importance_sampling")
@dataclass(frozen=True, kw_only=True)
class ImportanceSampling:
    """Policy gradient weighted by the importance ratio, without a trust region.

        -A r

    Paper: the surrogate of TRPO, https://arxiv.org/abs/1502.05477.

    Returns:
        [`PolicyLossOutput`] without metrics.
    """

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        return PolicyLossOutput(-inputs.advantages * inputs.ratio)


@register_policy_loss("cispo")
@dataclass(frozen=True, kw_only=True)
class CISPO:
    """Policy gradient weighted by the clipped ratio: clipped tokens keep a gradient.

        -sg(clip(r, lower, upper)) A logp

    Paper: https://arxiv.org/abs/2506.13585. The bounds are given in one of two ways.

    Args:
        epsilon_low (`float`, *optional*, 0.2 unless a ratio bound is given):
            The lower bound is 1 - epsilon_low; from 0 to 1, where 1 is no lower bound.
        epsilon_high (`float`, *optional*, 0.2 unless a ratio bound is given):
            The upper bound is 1 + epsilon_high; >= 0.
        ratio_min (`float`, *optional*):
            The lower bound itself, >= 0. With `ratio_max` alone there is none.
        ratio_max (`float`, *optional*):
            The upper bound itself, > 0. With `ratio_min` alone there is none.

    Returns:
        [`PolicyLossOutput`] with `cispo_clip_ratio`, the share of tokens with r above the upper bound and A > 0.

    Raises:
        ValueError: a parameter is not allowed, or the two ways are mixed.
    """

    epsilon_low: float | None = field(default=None, metadata={"default": 0.2})
    epsilon_high: float | None = field(default=None, metadata={"default": 0.2})
    ratio_min: float | None = None
    ratio_max: float | None = None

    def __post_init__(self) -> None:
        given = [
            name
            for name in ("epsilon_low", "epsilon_high", "ratio_min", "ratio_max")
            if getattr(self, name) is not None
        ]
        if len({name.split("_")[0] for name in given}) > 1:
            raise ValueError(
                f"CISPO: {', '.join(given)} mix two ways to give the same bounds: write either epsilon_low and "
                "epsilon_high (distances from 1) or ratio_min and ratio_max (the bounds themselves)."
            )
        check_epsilons(self, [name for name in given if name.startswith("epsilon")])
        if self.ratio_min is not None:
            check(self, "ratio_min", lambda v: v >= 0, "a finite number >= 0", "ratio_min=0.0")
        if self.ratio_max is not None:
            check(self, "ratio_max", lambda v: v > 0, "a finite number > 0", "ratio_max=4.0")
        lower, upper = self.bounds
        if lower > upper:
            raise ValueError(f"CISPO: ratio_min={lower!r} is above ratio_max={upper!r}: swap them.")

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio."""
        if self.ratio_min is None and self.ratio_max is None:
            epsilon_low = 0.2 if self.epsilon_low is None else self.epsilon_low
            epsilon_high = 0.2 if self.epsilon_high is None else self.epsilon_high
            return 1 - epsilon_low, 1 + epsilon_high
        return (
            0.0 if self.ratio_min is None else self.ratio_min,
            math.inf if self.ratio_max is None else self.ratio_max,
        )

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        lower, upper = self.bounds
        ratio, advantages = inputs.ratio.detach(), inputs.advantages
        loss = -ratio.clamp(lower, upper) * advantages * inputs.per_token_logps
        return PolicyLossOutput(loss, {"cispo_clip_ratio": (ratio > upper) & (advantages > 0)})


@dataclass(frozen=True, kw_only=True)
class _DPPO:
    """The parameters of both trust regions in probability space."""

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    ratio_max: float = 20.0

    def __post_init__(self) -> None:
        for name in ("epsilon_low", "epsilon_high"):
            check(self, name, lambda v: v >= 0, "a finite number >= 0, a bound of the divergence", f"{name}=0.2")
        check(self, "ratio_max", lambda v: v > 0, "a finite number > 0", "ratio_max=20.0")


@register_policy_loss("dppo_tv")
@dataclass(frozen=True, kw_only=True)
class DPPOTV(_DPPO):
    """Policy gradient inside a trust region in total variation, estimated on the sampled token.

        -sg(min(r, ratio_max)) A logp where p - p_old <= epsilon_high (A > 0) or >= -epsilon_low (A <= 0), else 0

    Paper: https://arxiv.org/abs/2602.04879.

    Args:
        epsilon_low (`float`, *optional*, defaults to `0.2`):
            Largest loss of probability, >= 0.
        epsilon_high (`float`, *optional*, defaults to `0.2`):
            Largest gain of probability, >= 0.
        ratio_max (`float`, *optional*, defaults to `20.0`):
            Cap of the importance ratio, > 0.

    Returns:
        [`PolicyLossOutput`] with `dppo/masked_ratio`, the share of tokens outside the trust region.

    Raises:
        ValueError: a parameter is not allowed.
    """

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        gain = (inputs.per_token_logps.exp() - inputs.old_per_token_logps.exp()).detach()
        inside = torch.where(inputs.advantages > 0, gain <= self.epsilon_high, gain >= -self.epsilon_low)
        return _trust_region_output(inputs, inside, self.ratio_max)


@register_policy_loss("dppo_kl")
@dataclass(frozen=True, kw_only=True)
class DPPOKL(_DPPO):
    """Policy gradient inside a trust region in KL divergence, estimated on "the sampled token or any other".

        -sg(min(r, ratio_max)) A logp where KL <= epsilon, or the step leads back towards p_old; else 0
        KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    epsilon is epsilon_high for A > 0, where back means p <= p_old; otherwise epsilon_low, where it means p >= p_old.

    Paper: https://arxiv.org/abs/2602.04879.

    Args:
        epsilon_low (`float`, *optional*, defaults to `0.2`):
            Largest divergence for negative advantages, >= 0.
        epsilon_high (`float`, *optional*, defaults to `0.2`):
            Largest divergence for positive advantages, >= 0.
        ratio_max (`float`, *optional*, defaults to `20.0`):
            Cap of the importance ratio, > 0.

    Returns:
        [`PolicyLossOutput`] with `dppo/masked_ratio`, the share of tokens outside the trust region.

    Raises:
        ValueError: a parameter is not allowed.
    """

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        logps, old_logps = inputs.per_token_logps.detach(), inputs.old_per_token_logps
        prob, old_prob = logps.exp(), old_logps.exp()
        # 1 - p may be 0, or below it by rounding.
        rest, old_rest = (1 - prob).clamp(min=0) + 1e-8, (1 - old_prob).clamp(min=0) + 1e-8
        kl = old_prob * (old_logps - logps) + (1 - old_prob) * (old_rest / rest).log()
        inside = torch.where(
            inputs.advantages > 0,
            (kl <= self.epsilon_high) | (prob <= old_prob),
            (kl <= self.epsilon_low) | (prob >= old_prob),
        )
        return _trust_region_output(inputs, inside, self.ratio_max)


def _trust_region_output(inputs: PolicyLossInputs, inside: torch.Tensor, ratio_max: float) -> PolicyLossOutput:
    weight = inputs.ratio.detach().clamp(max=ratio_max)
    loss = torch.where(inside, -weight * inputs.advantages * inputs.per_token_logps, 0.0)
    return PolicyLossOutput(loss, {"dppo/masked_ratio": ~inside})
