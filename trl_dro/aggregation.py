"""From per-token losses to the scalar that is differentiated."""

import math

import torch

from .masking import masked_sum, upcast, zero_masked
from .policy_loss import nearest_first


LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregate_loss(
    per_token_loss: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    *,
    num_tokens: int | float | torch.Tensor | None = None,
    num_sequences: int | float | torch.Tensor | None = None,
    scale_factor: float | None = None,
    num_processes: int = 1,
) -> torch.Tensor:
    r"""Reduces per-token losses to a scalar whose gradients add up to the window's, however the window was cut.

    With N trained tokens and B sequences with at least one of them, both counted over the whole window and all ranks:

    | `mode` | value |
    |---|---|
    | `token-mean` | sum / N * num_processes |
    | `token-sum` | sum * num_processes |
    | `seq-mean-token-sum` | sum / B * num_processes |
    | `seq-mean-token-mean` | sum of the sequences' means / B * num_processes |
    | `seq-mean-token-sum-norm` | seq-mean-token-sum / scale_factor |

    `num_processes` undoes the averaging of gradients over ranks by DDP and FSDP. Callers add up the micro-batches of a
    window without dividing by their number.

    Args:
        per_token_loss (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            The loss of each token; (B, 1) gives each token of a row the same. Masked positions may hold anything.
        mask (`torch.Tensor` of shape `(B, T)`):
            Nonzero on the tokens that are trained.
        mode (`str`):
            One of [`LOSS_AGG_MODES`].
        num_tokens, num_sequences (`int`, `float` or 0-dim `torch.Tensor`, *optional*):
            The window's N and B. `None` counts this micro-batch, which is right only if it is the whole window.
        scale_factor (`float`, *optional*):
            Divisor of `seq-mean-token-sum-norm`; the other modes do not use it.
        num_processes (`int`, *optional*, defaults to `1`):
            The data-parallel size.

    Returns:
        `torch.Tensor`: a scalar. With nothing to train it is 0 and has a graph, so that `backward` works.

    Raises:
        ValueError: an unknown mode, a shape that does not fit, a missing count or a bad scale factor.
    """
    if mode not in LOSS_AGG_MODES:
        known = ", ".join(nearest_first(str(mode), LOSS_AGG_MODES))
        raise ValueError(f"loss_agg_mode={mode!r} is unknown. Use one of, nearest first: {known}.")
    if mask.ndim != 2 or per_token_loss.shape not in (mask.shape, (mask.shape[0], 1)):
        raise ValueError(
            f"per_token_loss and mask must both have shape (B, T), or (B, 1) and (B, T); got "
            f"{tuple(per_token_loss.shape)} and {tuple(mask.shape)}."
        )

    mask = mask.bool()
    loss = zero_masked(upcast(per_token_loss), mask)
    tokens_in_row = mask.sum(1)

    if mode == "token-sum":
        return loss.sum() * num_processes
    if mode == "token-mean":
        count = _window_count("num_tokens", num_tokens, tokens_in_row.sum(), num_processes, loss)
        return loss.sum() / count * num_processes

    count = _window_count("num_sequences", num_sequences, (tokens_in_row > 0).sum(), num_processes, loss)
    if mode == "seq-mean-token-mean":
        return (masked_sum(loss, mask, dim=1) / tokens_in_row.clamp(min=1)).sum() / count * num_processes
    if mode == "seq-mean-token-sum-norm":
        return loss.sum() / (count * _checked_scale_factor(scale_factor)) * num_processes
    return loss.sum() / count * num_processes


def _window_count(
    name: str, given: int | float | torch.Tensor | None, local: torch.Tensor, num_processes: int, loss: torch.Tensor
) -> float | torch.Tensor:
    if given is None and num_processes > 1:
        raise ValueError(
            f"{name}=None counts this micro-batch only, which is wrong with num_processes={num_processes}: "
            f"pass the exact count of the whole window over all processes, {name}=<count>."
        )
    count = local if given is None else given
    # An empty window sums to 0; dividing by 1 keeps it 0.
    return count.clamp(min=1).to(loss) if isinstance(count, torch.Tensor) else max(count, 1)


def _checked_scale_factor(scale_factor: object) -> float:
    if isinstance(scale_factor, int | float) and not isinstance(scale_factor, bool) and 0 < scale_factor < math.inf:
        return scale_factor
    raise ValueError(
        f"scale_factor={scale_factor!r} is not allowed: loss_agg_mode='seq-mean-token-sum-norm' divides by it, so it "
        "must be a finite number > 0. Write the longest possible completion, scale_factor=<max_completion_length>."
    )
