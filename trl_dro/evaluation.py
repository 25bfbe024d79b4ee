"""What one evaluation measures: over its rows, where TRL averages its batches."""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import nanstd


@dataclass
class Evaluation:
    """One pass over a held-out dataset.

    Args:
        prefix: what its metrics' names begin with, such as `eval` or `eval_math`.
        logs: where TRL notes prompts, completions and rewards of every batch, over all ranks.
        wanted: how many rows there are, None for a stream. What comes after them are repeats that only fill the last
            batch up to the same size on every rank.
        rows: rows of each batch, over all ranks.
    """

    prefix: str
    logs: dict[str, Any]
    wanted: int | None = None
    rows: list[int] = field(default_factory=list)

    def _drop_repeats(self) -> None:
        repeats = max(0, sum(self.rows) - self.wanted) if self.wanted is not None else 0
        if repeats:
            self.rows[-1] -= repeats
            for column in _columns(self.logs):
                for _ in range(min(repeats, len(column))):
                    column.pop()

    def metrics(
        self, per_batch: Mapping[str, list[float]], reward_names: Sequence[str], weights: Tensor
    ) -> dict[str, float | None]:
        """The metrics over all rows.

        Args:
            per_batch: TRL's metrics, one value for each batch.
            reward_names: the reward functions' names.
            weights: (number of reward functions,) their weights.

        Returns:
            Metrics by name, None where there is no value: rewards and their spread over every row, other means
            weighted by the rows of their batch, minima and maxima as such.
        """
        self._drop_repeats()
        reduced = {name: reduce_batches(name, values, self.rows) for name, values in per_batch.items()}
        if not self.rows:
            return reduced
        rewards = torch.tensor([list(self.logs["rewards"][name]) for name in reward_names], dtype=torch.float32).T
        total = (rewards * weights.to(rewards)).nansum(dim=1)
        total[rewards.isnan().all(dim=1)] = math.nan
        exact = {"reward": torch.nanmean(total), "reward_std": nanstd(total)}
        for name, column in zip(reward_names, rewards.T, strict=True):
            exact |= {f"rewards/{name}/mean": torch.nanmean(column), f"rewards/{name}/std": nanstd(column)}
        return reduced | {name: _or_none(value.item()) for name, value in exact.items()}


def unlimited_copy(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Empty logs of the same columns as TRL's, which hold every row instead of the last generated batch."""
    return {name: defaultdict(deque) if isinstance(column, dict) else deque() for name, column in logs.items()}


def reduce_batches(name: str, values: Sequence[float], rows: Sequence[int] = ()) -> float | None:
    """One value for a metric that has one for each batch.

    Args:
        name: its name: the last part says whether it is a minimum (`min`, `min_...`, `..._min`), a maximum or a mean.
        values: one for each batch; NaN where there is none.
        rows: rows of each batch, if batches differ; used where every batch has a value.

    Returns:
        The smallest, the largest or the mean value, None without any.
    """
    weights = rows if len(rows) == len(values) else [1] * len(values)
    valid = [(value, weight) for value, weight in zip(values, weights, strict=True) if not math.isnan(value)]
    words = name.rsplit("/", 1)[-1].split("_")
    for word, extreme in (("min", min), ("max", max)):
        if valid and word in (words[0], words[-1]):
            return extreme(value for value, _ in valid)
    total = sum(weight for _, weight in valid)
    return sum(value * weight for value, weight in valid) / total if total else None


def _columns(logs: Mapping[str, Any]) -> list[deque]:
    columns: list[deque] = []
    for column in logs.values():
        columns += column.values() if isinstance(column, dict) else [column]
    return columns


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
