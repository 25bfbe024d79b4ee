"""Evaluation apart from training: measured over its rows, where TRL averages its batches."""

import math
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from .advantages import total_rewards
from .checks import check_columns
from .config import DROConfig
from .metrics import MetricAccumulator
from .steering import temporarily


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
        reduced = reduce_metrics(per_batch, self.rows)
        if not self.rows:
            return reduced
        rewards = torch.tensor([list(self.logs["rewards"][name]) for name in reward_names], dtype=torch.float32).T
        total = total_rewards(rewards, weights)
        exact = {"reward": torch.nanmean(total), "reward_std": nanstd(total)}
        for name, column in zip(reward_names, rewards.T, strict=True):
            exact |= {f"rewards/{name}/mean": torch.nanmean(column), f"rewards/{name}/std": nanstd(column)}
        return reduced | {name: _or_none(value.item()) for name, value in exact.items()}


def unlimited_copy(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Empty logs of the same columns as TRL's, which hold every row instead of the last generated batch."""
    return {name: defaultdict(deque) if isinstance(column, dict) else deque() for name, column in logs.items()}


def reduce_metrics(per_batch: Mapping[str, list[float]], rows: Sequence[int] = ()) -> dict[str, float | None]:
    """One value for each metric, see `reduce_batches`; lengths of terminated completions only of batches with some."""
    reduced = {}
    clipped = per_batch.get("completions/clipped_ratio", [])
    for name, values in per_batch.items():
        weights: Sequence[float] = rows
        if name.endswith("_terminated_length") and len(clipped) == len(values) and min(clipped) < 1.0:
            sizes = rows if len(rows) == len(values) else [1] * len(values)
            weights = [size * (1.0 - share) for size, share in zip(sizes, clipped, strict=True)]
            # TRL's length for a batch without any is 0
            values = [value if weight > 0 else math.nan for value, weight in zip(values, weights, strict=True)]
        reduced[name] = reduce_batches(name, values, weights)
    return reduced


def reduce_batches(name: str, values: Sequence[float], rows: Sequence[float] = ()) -> float | None:
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


class EvaluatingTrainer(GRPOTrainer):
    """TRL's trainer, with metrics kept on the device and evaluations that leave no trace in training."""

    args: DROConfig
    model: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._accumulators = {"train": MetricAccumulator(), "eval": MetricAccumulator()}
        self._evaluation: Evaluation | None = None
        self._latest_logs = self._logs

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """As in transformers, with metrics over all rows, and without a trace in training.

        Every batch must hold whole groups of completions.
        """
        self.args.check_evaluation_batch()
        check_columns("eval_dataset", eval_dataset, has_environment=self.environment_factories is not None)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # comes back for each of them
        if isinstance(dataset, str):
            known = list(self.eval_dataset) if isinstance(self.eval_dataset, dict) else []
            if dataset not in known:
                raise ValueError(
                    f"eval_dataset={dataset!r} is refused: the trainer's eval_dataset has "
                    f"{', '.join(map(repr, known)) or 'no names'}. Write one of them, or pass a Dataset."
                )
            dataset = cast(dict, self.eval_dataset)[dataset]
        with self._evaluating(metric_key_prefix, dataset):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As in TRL. A loader for a dataset that one call is given is not kept for the next."""
        if eval_dataset is None or isinstance(eval_dataset, str):
            return super().get_eval_dataloader(eval_dataset)
        self._forget_loader()
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self._forget_loader()

    def _forget_loader(self) -> None:
        """TRL keeps all loaders that have no name under one key."""
        getattr(self, "_eval_dataloaders", {}).pop("eval", None)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As for evaluation, so that a stream gets its completions in groups too."""
        return self.get_eval_dataloader(test_dataset)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """As in transformers: `predictions` stay None, `metrics` hold the loss, the rewards and the rest."""
        self.args.check_evaluation_batch()
        if test_dataset is None or isinstance(test_dataset, (dict, str)):
            raise ValueError(
                f"test_dataset is a {type(test_dataset).__name__}, it must be a Dataset or an IterableDataset. Call "
                "predict() for each, or write `Dataset.from_list([{'prompt': ...}, ...])`."
            )
        check_columns("test_dataset", test_dataset, has_environment=self.environment_factories is not None)
        with self._evaluating(metric_key_prefix, test_dataset):
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
            cast(dict, output.metrics).update(self._flush_metrics())
        return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in transformers. Before training it leaves the model as it found it."""
        with self._unprepared_afterwards():
            return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def _unprepared_afterwards(self) -> Iterator[None]:
        """What accelerate has once prepared for evaluation it does not prepare for training again: each process would
        train a model of its own, and DeepSpeed none."""
        trained = self.model_wrapped is not self.model or getattr(self.model, "_is_accelerate_prepared", False)
        if self.is_in_train or trained:
            yield
            return
        if self.is_fsdp_enabled:
            self._check_sharding_without_optimizer()
            yield
            return
        model, models = self.model, list(self.accelerator._models)
        wrapped = {name: vars(model)[name] for name in ("forward", "_original_forward") if name in vars(model)}
        # Only ZeRO-3, whose weights are in pieces, evaluates with an engine.
        stage = self.accelerator.state.deepspeed_plugin.zero_stage if self.is_deepspeed_enabled else None
        whole = {"is_deepspeed_enabled": False} if stage is not None and stage < 3 else {}
        try:
            with temporarily(self, **whole):
                yield
        finally:
            for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
                vars(model).pop(name, None)
            vars(model).update(wrapped)
            self.accelerator._models[:] = models
            if self.is_deepspeed_enabled and self.deepspeed is not None:
                self.deepspeed.destroy()
                self.deepspeed, self.model_wrapped = None, model

    def _check_sharding_without_optimizer(self) -> None:
        if cast(Any, self.accelerator.state.fsdp_plugin).fsdp_version == 2:
            raise ValueError(
                "evaluate() and predict() are refused before train() under FSDP2: accelerate shards a model only "
                "together with its optimizer. Write `eval_on_start=True`, which evaluates once both are there."
            )

    @contextmanager
    def _evaluating(self, prefix: str, dataset: Any) -> Iterator[None]:
        """Evaluation apart from training: with metrics, logs, random numbers and a model mode of its own."""
        training, should_log = self.model.training, self.control.should_log
        states = random.getstate(), numpy.random.get_state()
        self._start_metrics("eval")
        generations = self.args.num_generations_eval or cast(int, self.args.num_generations)
        wanted = len(dataset) * generations if hasattr(dataset, "__len__") else None
        evaluation = Evaluation(prefix, unlimited_copy(self._logs), wanted)
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            temporarily(self, _evaluation=evaluation, _logs=evaluation.logs),
        ):
            try:
                yield
            finally:
                self.model.train(training)
                random.setstate(states[0])
                numpy.random.set_state(states[1])
                self.control.should_log = should_log  # the log of an evaluation is not the one that is due

    def _start_metrics(self, mode: str) -> None:
        """Forget what an interrupted call left behind."""
        self._accumulators[mode] = MetricAccumulator()
        self._metrics[mode].clear()
        self._pending_metrics.clear()
        self._pending_extra_logs.clear()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self._latest_logs = self._logs
        if self._evaluation is not None:
            self._evaluation.rows.append(len(inputs) * self.accelerator.num_processes)
        return output

    def last_completions(self) -> list[tuple[Any, Any]]:
        """Prompts and completions (strings or lists of messages) of the latest generation, oldest first.

        Of training, at most `generation_batch_size` rows over all ranks; of an evaluation, every row.
        """
        return list(zip(self._latest_logs["prompt"], self._latest_logs["completion"], strict=True))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in TRL. Minima and maxima are those of the whole stretch; evaluations keep completions of their own."""
        logs.update(self._flush_metrics())  # type: ignore[arg-type]  # None where a metric has no value, as in TRL
        with self._completions_file():
            super().log(logs, start_time)

    def _flush_metrics(self) -> dict[str, float | None]:
        """The metrics since the last flush, under the names they are logged by."""
        mode = "train" if self._evaluation is None else "eval"
        for name, value in self._accumulators[mode].flush().items():
            self._metrics[mode][name].append(value)
        batches = dict(self._metrics[mode])
        self._metrics[mode].clear()
        if self._evaluation is None:
            return reduce_metrics(batches)
        metrics = self._evaluation.metrics(batches, self.reward_func_names, self.reward_weights)
        return {f"{self._evaluation.prefix}_{name}": value for name, value in metrics.items()}

    @contextmanager
    def _completions_file(self) -> Iterator[None]:
        """Training and evaluation at the same step each keep their table of completions, which TRL names alike."""
        if self._evaluation is None or not self.log_completions or not self.accelerator.is_main_process:
            yield
            return
        table = Path(str(self.args.output_dir), "completions", f"completions_{self.state.global_step:05d}.parquet")
        aside = table.with_suffix(".train")
        if table.exists():
            table.rename(aside)
        try:
            yield
            name = quote(self._evaluation.prefix, safe="")  # may hold a slash
            table.rename(table.with_name(table.name.replace("completions_", f"{name}_")))
        finally:
            if aside.exists():
                aside.rename(table)
