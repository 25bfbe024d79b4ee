"""Surrogates that bound the ratio: per token, per sequence, or smoothly."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..masking import masked_mean, safe_exp, zero_masked
from ..policy_loss import PolicyLossInputs, PolicyLossOutput, register_policy_loss
from .shared import check, check_epsilons, clip_metrics, clipped_sides, clipped_surrogate


@register_policy_loss("ppo_clip", "vanilla")
@dataclass(frozen=True, kw_only=True)
class PPOClip:
    """Clipped surrogate with separate bounds and an optional second clip for negative advantages.

        L = -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A);    for A < 0: min(L, -dual_clip A)

    Paper: https://arxiv.org/abs/1707.06347; separate bounds https://arxiv.org/abs/2503.14476; second clip
    https://arxiv.org/abs/1912.09729.

    Args:
        epsilon_low (`float`, *optional*, defaults to `0.2`):
            From 0 to 1; 1 switches the lower clip off.
        epsilon_high (`float`, *optional*, defaults to `0.2`):
            >= 0.
        dual_clip (`float` or `None`, *optional*, defaults to `3.0`):
            Ratio beyond which a token of negative advantage is ignored, > 1; `None` switches it off.

    Returns:
        [`PolicyLossOutput`] with TRL's `clip_ratio/*` metrics and `clip_ratio/dual_mean`.

    Raises:
        ValueError: a parameter is not allowed.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float | None = 3.0

    def __post_init__(self) -> None:
        check_epsilons(self)
        if self.dual_clip is not None:
            check(
                self, "dual_clip", lambda v: v > 1, "a finite number > 1, or None for no second clip", "dual_clip=3.0"
            )

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        ratio, advantages = inputs.ratio, inputs.advantages
        loss = clipped_surrogate(self, ratio, advantages)
        low, high = clipped_sides(self, ratio, advantages)
        metrics = clip_metrics(low, high, inputs.mask)
        if self.dual_clip is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)
            metrics["clip_ratio/dual_mean"] = (ratio > self.dual_clip) & (advantages < 0)
        return PolicyLossOutput(loss, metrics)


@register_policy_loss("gspo")
@dataclass(frozen=True, kw_only=True)
class GSPO:
    """Clipped surrogate on the length-normalised ratio of the whole sequence, in its token form.

        -min(s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A),    s = exp(min(logp - sg(logp) + sg(mean l), 10))

    Every token of a sequence has the same s; its gradient is that of the token's own log-probability.

    Paper: https://arxiv.org/abs/2507.18071. Meant for `seq-mean-token-mean`, and for bounds near 3e-4.

    Args:
        epsilon_low (`float`, *optional*, defaults to `0.2`):
            From 0 to 1; 1 switches the lower clip off.
        epsilon_high (`float`, *optional*, defaults to `0.2`):
            >= 0.

    Returns:
        [`PolicyLossOutput`] with TRL's `clip_ratio/*` metrics, counted in sequences.

    Raises:
        ValueError: a parameter is not allowed.
    """

    recommended_loss_agg_mode: ClassVar[str | None] = "seq-mean-token-mean"

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2

    def __post_init__(self) -> None:
        check_epsilons(self)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        logps, advantages = inputs.per_token_logps, inputs.advantages
        mean_log_ratio = masked_mean(inputs.log_ratio, inputs.mask, dim=1, keepdim=True).detach()
        ratio = (logps - logps.detach() + mean_log_ratio).clamp(max=10.0).exp()
        loss = clipped_surrogate(self, ratio, advantages)
        low, high = (
            masked_mean(side, inputs.mask, dim=1, keepdim=True) for side in clipped_sides(self, ratio, advantages)
        )
        return PolicyLossOutput(loss, clip_metrics(low, high, inputs.mask.any(dim=1, keepdim=True)))


@register_policy_loss("sapo")
@dataclass(frozen=True, kw_only=True)
class SAPO:
    """Surrogate with a smooth gate in place of the clip.

        -(4/t) sigmoid(t (r - 1)) A,    t = temperature_pos if A > 0 else temperature_neg

    Its gradient at r = 1 is that of -A r, and fades on both sides.

    Paper: https://arxiv.org/abs/2511.20347. Meant for `seq-mean-token-mean`.

    Args:
        temperature_pos (`float`, *optional*, defaults to `1.0`):
            Sharpness of the gate for positive advantages, > 0.
        temperature_neg (`float`, *optional*, defaults to `1.05`):
            Sharpness of the gate for the others, > 0.

    Returns:
        [`PolicyLossOutput`] without metrics.

    Raises:
        ValueError: a parameter is not allowed.
    """

    recommended_loss_agg_mode: ClassVar[str | None] = "seq-mean-token-mean"

    temperature_pos: float = 1.0
    temperature_neg: float = 1.05

    def __post_init__(self) -> None:
        for name in ("temperature_pos", "temperature_neg"):
            check(self, name, lambda v: v > 0, "a finite number > 0", f"{name}=1.0")

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        ratio, advantages = inputs.ratio, inputs.advantages

        def gate(temperature: float) -> torch.Tensor:
            return 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0))

        weight = torch.where(advantages > 0, gate(self.temperature_pos), gate(self.temperature_neg))
        return PolicyLossOutput(-weight * advantages)


@register_policy_loss("gmpo", "geo_mean")
@dataclass(frozen=True, kw_only=True)
class GMPO:
    """Surrogate on the geometric mean of a sequence's ratios, each clipped in log space.

        -mean(A) exp(mean c),    c = s min(s l, s clip(l, -epsilon_low, epsilon_high)),    s = sign(A)

    Every trained token of a sequence gets the sequence's value, so that `seq-mean-token-mean` is the published loss.
    Correction weights are pooled in the same way, by their geometric mean.

    Paper: https://arxiv.org/abs/2507.20673.

    Args:
        epsilon_low (`float`, *optional*, defaults to `0.2`):
            Bound of the log-ratio for negative advantages, >= 0 (the paper uses 0.4).
        epsilon_high (`float`, *optional*, defaults to `0.2`):
            Bound of the log-ratio for positive advantages, >= 0 (the paper uses 0.4).

    Returns:
        [`PolicyLossOutput`] with TRL's `clip_ratio/*` metrics, for the clip in log space.

    Raises:
        ValueError: a parameter is not allowed.
    """

    correction_pooling: ClassVar[str] = "geometric"
    recommended_loss_agg_mode: ClassVar[str | None] = "seq-mean-token-mean"

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2

    def __post_init__(self) -> None:
        for name in ("epsilon_low", "epsilon_high"):
            check(self, name, lambda v: v >= 0, "a finite number >= 0, a bound of the log-ratio", f"{name}=0.2")

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        log_ratio, advantages, mask = inputs.log_ratio, inputs.advantages, inputs.mask
        sign = advantages.sign()
        clipped = log_ratio.clamp(-self.epsilon_low, self.epsilon_high)
        one_sided = sign * torch.minimum(sign * log_ratio, sign * clipped)
        # The mean is clamped and not the tokens, so that only what would overflow is touched.
        ratio = safe_exp(masked_mean(one_sided, mask, dim=1, keepdim=True))
        loss = -masked_mean(advantages, mask, dim=1, keepdim=True) * ratio
        low = (log_ratio < -self.epsilon_low) & (advantages < 0)
        high = (log_ratio > self.epsilon_high) & (advantages > 0)
        return PolicyLossOutput(zero_masked(loss, mask), clip_metrics(low, high, mask))
