"""Masked sums and means, and exponentials that cannot overflow: the one place that knows about NaN.

A masked position may hold anything. Multiplying by a mask of zeros keeps a NaN (`0 * nan` is NaN, in the value and in
the gradient), so everything here selects with `torch.where`.
"""

import torch


# exp(20) is about 5e8: far outside any trust region, and its square is still finite in float32.
MAX_LOG_RATIO = 20.0

# Parameters and rewards go no further: float32 ends at 3e38, and they are multiplied and added up.
LARGEST = 1e30


def upcast(values: torch.Tensor) -> torch.Tensor:
    """Raises half precision (and integers) to float32; float32 and float64 stay as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def zero_masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Replaces masked positions by 0, whatever they hold; they get no gradient.

    Args:
        values: any shape that broadcasts to the mask's.
        mask: true where a value counts.

    Returns:
        Values in the mask's shape.
    """
    return torch.where(mask.bool(), values, 0)


def masked_sum(
    values: torch.Tensor, mask: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> torch.Tensor:
    """Sum over the positions where the mask is true; `dim` and `keepdim` as in `torch.sum`."""
    return zero_masked(values, mask).sum(dim, keepdim=keepdim)


def masked_mean(
    values: torch.Tensor, mask: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> torch.Tensor:
    """Mean over the positions where the mask is true; a mean over nothing is 0, with a graph."""
    count = mask.bool().sum(dim, keepdim=keepdim)
    return masked_sum(values, mask, dim, keepdim) / count.clamp(min=1)


def safe_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(l) with l clamped to +-20 first: never inf, and no gradient outside the clamp."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3_estimate(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(l) - 1 - l with l clamped to +-20 first (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
