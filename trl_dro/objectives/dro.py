"""Direct Reward Optimization."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..masking import masked_mean, masked_sum
from ..policy_loss import PolicyLossInputs, PolicyLossOutput, register_policy_loss
from .shared import check


_BETA_HELP = (
    "beta sets where a token stops: its pull vanishes at the log-ratio l* = A / beta. With advantages of size 1, "
    "beta=0.5 stops at 2 nats, beta=5 about where PPO clips, and beta=0.05 only at 20 nats"
)


@register_policy_loss("dro")
@dataclass(frozen=True, kw_only=True)
class DRO:
    """Direct Reward Optimization: policy gradient with a quadratic pull of the log-ratio towards zero.

        token:     -(A logp - beta/2 l^2)
        sequence:  -A logp + beta l sg(S) - sg(beta/2 l S),    S = sum of l over the sequence

    The gradient of a token is -(A - beta l) grad logp, at sequence level -(A - beta S) grad logp: it shrinks as the
    policy moves and vanishes at l = A/beta (S = A/beta). The sequence form sums to beta/2 S^2 per sequence; the
    stop-gradients keep the gradient of a token on that token, so that a token of weight 0 gets none. l is not clamped:
    the pull has to grow with distance, or with `huber_delta` = d at least stay:

        |l| > d:   beta d (|l| - d/2) in place of beta/2 l^2, and the gradient -(A - beta d sign(l)) grad logp

    (at sequence level the same of S). Advantages with |A| > beta d then have no point of rest.

    Paper: https://arxiv.org/abs/2405.19107 (the same quadratic: https://arxiv.org/abs/2501.12599).

    Args:
        beta (`float`):
            Strength of the penalty, finite and > 0. No default: the token stops at l = A/beta.
        level (`str`, *optional*, defaults to `"token"`):
            `"token"` or `"sequence"`. The two match at about beta_token = beta_sequence * length.
        huber_delta (`float`, *optional*):
            Log-ratio (at sequence level sum of log-ratios) where the penalty turns from quadratic to linear, > 0.

    Returns:
        [`PolicyLossOutput`] with `dro/penalty_abs` (size of beta l), `dro/advantage_abs` (size of A) and
        `dro/past_optimum` (1 beyond l = A/beta), per token; at sequence level per sequence, with S for l.

    Raises:
        ValueError: a parameter is not allowed.
    """

    beta: float = field(metadata={"help": f"{_BETA_HELP}. Start with beta=0.5"})
    level: Literal["token", "sequence"] = "token"
    huber_delta: float | None = None

    def __post_init__(self) -> None:
        check(self, "beta", lambda v: v > 0, f"a finite number > 0; {_BETA_HELP}", "beta=0.5")
        if self.level not in ("token", "sequence"):
            raise ValueError(f"DRO: level={self.level!r} is not allowed: write level='token' or level='sequence'.")
        if self.huber_delta is not None:
            check(self, "huber_delta", lambda v: v > 0, "a finite number > 0 or None", "huber_delta=2.0")

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        log_ratio, advantages = inputs.log_ratio, inputs.advantages
        bound = math.inf if self.huber_delta is None else self.huber_delta
        if self.level == "token":
            reached = log_ratio.clamp(-bound, bound)
            pull = self.beta * reached
            penalty = pull * (log_ratio - 0.5 * reached)
        else:
            total = masked_sum(log_ratio, inputs.mask, dim=1, keepdim=True).detach()
            reached = total.clamp(-bound, bound)
            pull = self.beta * reached
            share = torch.where(total == 0, 1.0, reached / total)  # 1 as far as the penalty is quadratic
            penalty = pull * log_ratio - (pull * log_ratio * 0.5 * share).detach()
        loss = -advantages * inputs.per_token_logps + penalty

        if self.level == "sequence":
            advantages = masked_mean(advantages, inputs.mask, dim=1, keepdim=True)
        metrics = {
            "dro/penalty_abs": pull.abs(),
            "dro/advantage_abs": advantages.abs(),
            "dro/past_optimum": pull * advantages.sign() > advantages.abs(),
        }
        return PolicyLossOutput(loss, metrics)
