"""Training metrics, kept on the device: one collective for each window, one host sync for each log."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .masking import k3_estimate, masked_sum
from .policy_loss import PolicyLossInputs


# Log-ratio quantiles are read off counts at these fixed values, because counts add up over micro-batches and ranks
# where quantiles do not. 1024 values to a side from 1e-6 to 1e3 nats are 2 % apart.
_GRID = torch.logspace(-6, 3, 1024, dtype=torch.float64)
_GRID = torch.cat([-_GRID.flip(0), torch.zeros(1, dtype=torch.float64), _GRID]).to(torch.float32)

_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@cache
def _grid_on(device: torch.device) -> Tensor:
    return _GRID.to(device)


class MetricAccumulator:
    """Sums, counts, minima, maxima and quantile sketches of a stretch of training.

    Add values while micro-batches run, `close_window` once for each optimizer step (every rank must call it, with the
    same names added), `flush` when logging. Means are over every token (or sequence) since the last flush, not means
    of means.
    """

    def __init__(self) -> None:
        self._open: dict[str, Tensor] = {}
        self._closed: dict[str, Tensor] = {}

    def _add(self, key: str, value: Tensor) -> None:
        _merge(self._open, {key: value.detach().to(torch.float32)})

    def add_mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add to the mean of `name`. Without a mask every value counts."""
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        self._add(f"sum:{name}", masked_sum(values, mask))
        self._add(f"count:{name}", mask.sum())

    def add_extreme(self, name: str, values: Tensor, mask: Tensor, *, largest: bool) -> None:
        """Track the largest (or smallest) value of `name`; nothing trained leaves it out of the log."""
        empty = float("-inf") if largest else float("inf")
        values = torch.where(mask, values, empty)
        self._add(f"{'max' if largest else 'min'}:{name}", values.max() if largest else values.min())

    def add_to_window(self, name: str, value: Tensor) -> None:
        """Add a micro-batch's share of a quantity that is a sum over the window (averaged over ranks and windows)."""
        self._add(f"sum:{name}", value)
        self._open[f"count:{name}"] = torch.ones((), device=value.device)

    def add_quantiles(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add to the distribution of `name`, logged as `<name>_p01`, `_p50`, `_p99`, within 1 % of the value."""
        # Masked values sort behind every grid point, so they are never counted.
        ordered = torch.where(mask, values, float("inf")).flatten().to(torch.float32).sort().values
        grid = _grid_on(values.device)
        self._add(f"cdf:{name}", torch.searchsorted(ordered, grid, right=True))
        self.add_extreme(f"{name}_min", values, mask, largest=False)
        self.add_extreme(f"{name}_max", values, mask, largest=True)
        self._add(f"total:{name}", mask.sum())

    def add_objective_metrics(self, metrics: dict[str, Tensor], mask: Tensor) -> None:
        """Add an objective's metrics, reduced by the suffix of their name (see `PolicyLossOutput`)."""
        sequences = mask.any(dim=1, keepdim=True)
        for name, values in metrics.items():
            where = sequences if values.shape[1] == 1 else mask
            if name.endswith(("_min", "_max")):
                self.add_extreme(name, values, where, largest=name.endswith("_max"))
            else:
                self.add_mean(name, values, where)

    def close_window(self, gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Reduce what was added since the last call over all ranks, with one collective.

        Args:
            gather: takes this rank's (n,) tensor, returns the (world_size, n) tensor of all ranks.

        Returns:
            The window's reduced state, on the device.
        """
        keys = sorted(self._open)
        if not keys:
            return {}
        ranks = gather(torch.cat([self._open[key].reshape(-1) for key in keys]))
        window: dict[str, Tensor] = {}
        parts = torch.split(ranks, [self._open[key].numel() for key in keys], dim=1)
        for key, part in zip(keys, parts, strict=True):
            for rank in part:
                _merge(window, {key: rank.reshape(self._open[key].shape)})
        self._open = {}
        _merge(self._closed, window)
        return window

    def state(self) -> dict[str, Tensor]:
        """What was added since the last flush, between two windows."""
        return dict(self._closed)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from where [`state`] was taken."""
        self._closed = dict(state)

    def flush(self) -> dict[str, float]:
        """The metrics since the last flush, as Python floats. Names without a single value are left out."""
        if not self._closed:
            return {}
        keys = list(self._closed)
        flat = torch.cat([self._closed[key].reshape(-1) for key in keys]).tolist()
        state: dict[str, list[float]] = {}
        for key in keys:
            size = self._closed[key].numel()
            state[key], flat = flat[:size], flat[size:]
        self._closed = {}
        return _log_values(state)


def _merge(into: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    for key, value in new.items():
        if key not in into:
            into[key] = value
        elif key.startswith("min:"):
            into[key] = torch.minimum(into[key], value)
        elif key.startswith("max:"):
            into[key] = torch.maximum(into[key], value)
        else:
            into[key] = into[key] + value


def _log_values(state: dict[str, list[float]]) -> dict[str, float]:
    logs: dict[str, float] = {}
    for key, values in state.items():
        kind, name = key.split(":", 1)
        if name.startswith("_"):  # for the trainer's own use
            continue
        if kind == "sum" and state[f"count:{name}"][0] > 0:
            logs[name] = values[0] / state[f"count:{name}"][0]
        elif kind in ("min", "max") and abs(values[0]) != float("inf"):
            logs[name] = values[0]
        elif kind == "cdf" and state[f"total:{name}"][0] > 0:
            low, high = state[f"min:{name}_min"][0], state[f"max:{name}_max"][0]
            for label, share in _QUANTILES.items():
                logs[f"{name}_{label}"] = _quantile(values, share * state[f"total:{name}"][0], low, high)
    penalty = logs.pop("dro/penalty_abs", None)
    if penalty is not None and logs["dro/advantage_abs"] > 0:
        logs["dro/penalty_share"] = penalty / logs["dro/advantage_abs"]
    return logs


def _quantile(cdf: list[float], rank: float, low: float, high: float) -> float:
    """The value below which `rank` of the counted values lie, interpolated between grid points."""
    # The smallest and the largest value close the two open ends.
    edges = [min(low, _GRID[0].item()), *_GRID.tolist(), max(high, _GRID[-1].item())]
    counts = [0.0, *cdf, max(rank, cdf[-1])]
    upper = next(index for index, count in enumerate(counts) if count >= rank and index > 0)
    step = counts[upper] - counts[upper - 1]
    share = (rank - counts[upper - 1]) / step if step > 0 else 1.0
    value = edges[upper - 1] + share * (edges[upper] - edges[upper - 1])
    return max(low, min(value, high))


def add_log_ratio_metrics(accumulator: MetricAccumulator, inputs: PolicyLossInputs, level: str) -> None:
    """Add the distance of the policy from its anchor: `dro/log_ratio_*` and the `dro/kl_*` estimates.

    With l = logp - anchor_logp, and for tokens sampled by the anchor, -l, l^2/2 and e^l - 1 - l are the k1, k2 and k3
    estimates of KL(anchor || policy) (Schulman 2020, http://joschu.net/blog/kl-approx.html).

    Args:
        level: "token", or "sequence" to use each sequence's summed log-ratio in place of l.
    """
    log_ratio, mask = inputs.log_ratio.detach(), inputs.mask
    if level == "sequence":
        log_ratio, mask = masked_sum(log_ratio, mask, dim=1, keepdim=True), mask.any(dim=1, keepdim=True)
    accumulator.add_quantiles("dro/log_ratio", log_ratio, mask)
    values = {
        "dro/log_ratio_mean": log_ratio,
        "dro/log_ratio_abs": log_ratio.abs(),
        "dro/kl_k1": -log_ratio,
        "dro/kl_k2": log_ratio.square() / 2,
        "dro/kl_k3": k3_estimate(log_ratio),
    }
    for name, value in values.items():
        accumulator.add_mean(name, value, mask)
