"""What several objectives share: the clipped surrogate, TRL's clip metrics, and the checks of parameters."""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Protocol

import torch

from ..masking import LARGEST, masked_mean


class Bounds(Protocol):
    """An objective that clips its ratio to [1 - epsilon_low, 1 + epsilon_high]."""

    @property
    def epsilon_low(self) -> float: ...

    @property
    def epsilon_high(self) -> float: ...


def clipped_surrogate(loss: Bounds, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    clipped = ratio.clamp(1 - loss.epsilon_low, 1 + loss.epsilon_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped_sides(loss: Bounds, ratio: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the clipped branch is the larger loss, below and above."""
    low = (ratio < 1 - loss.epsilon_low) & (advantages < 0)
    high = (ratio > 1 + loss.epsilon_high) & (advantages > 0)
    return low, high


def clip_metrics(low: torch.Tensor, high: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """TRL's five metrics, from 0/1 indicators (or shares) of what is clipped below and above."""
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/low_min": masked_mean(low, mask, dim=1, keepdim=True),
        "clip_ratio/high_mean": high,
        "clip_ratio/high_max": masked_mean(high, mask, dim=1, keepdim=True),
        "clip_ratio/region_mean": low + high,  # never both
    }


def check(loss: object, name: str, allowed: Callable[[Any], bool], what: str, instead: str) -> None:
    value = getattr(loss, name)
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not allowed(value):
        raise ValueError(
            f"{type(loss).__name__}: {name}={value!r} is not allowed: it must be {what}. Write {instead}."
        )
    if abs(value) > LARGEST:
        raise ValueError(
            f"{type(loss).__name__}: {name}={value!r} is not allowed: beyond {LARGEST:g} the arithmetic of 32 bits "
            f"ends. Write {instead}."
        )


def check_epsilons(loss: object, names: Sequence[str] = ("epsilon_low", "epsilon_high")) -> None:
    if "epsilon_low" in names:
        what = "a number from 0 to 1, where 1 means no lower clip"
        check(loss, "epsilon_low", lambda v: 0 <= v <= 1, what, "epsilon_low=0.2")
    if "epsilon_high" in names:
        check(loss, "epsilon_high", lambda v: v >= 0, "a finite number >= 0", "epsilon_high=0.2")
