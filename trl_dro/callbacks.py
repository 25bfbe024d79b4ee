"""Progress in one line for each log, in place of a dict of numbers."""

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy


def format_seconds(seconds: float) -> str:
    """Like a clock: `00:35`, `1:02:05`."""
    minutes, second = divmod(max(round(seconds), 0), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute:02}:{second:02}"


def format_count(value: float) -> str:
    """Three digits and a letter: `856`, `1.2k`, `3.4M`."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def format_reward(value: float | None) -> str:
    """Three decimals, or `none` where no completion was given a reward."""
    return "none" if value is None or math.isnan(value) else f"{value:.3f}"


def progress_line(
    logs: Mapping[str, Any], *, step: int, max_steps: int, tokens_per_second: float | None, seconds_left: float | None
) -> str:
    """One log of training as a line. What was not logged is left out.

    Args:
        logs: the logged metrics, by DROTrainer's names.
        step, max_steps: optimizer steps done and planned.
        tokens_per_second: prompt and completion tokens seen each second, over the whole run.
        seconds_left: estimated time to the end.
    """
    parts = [f"step {step}/{max_steps}"]
    for label, name, form in (
        ("reward", "reward", "{:.3f}"),
        ("kl", "dro/kl_k2", "{:.4f}"),
        ("ref kl", "kl", "{:.4f}"),
        ("penalty", "dro/penalty_share", "{:.0%}"),
        ("loss", "policy_loss", "{:.4f}"),
    ):
        if logs.get(name) is not None:
            parts.append(f"{label} {form.format(logs[name])}")
    if tokens_per_second:
        parts.append(f"{format_count(tokens_per_second)} tok/s")
    if seconds_left is not None:
        parts.append(f"{format_seconds(seconds_left)} left")
    return " | ".join(parts)


def evaluated_rewards(logs: Mapping[str, Any]) -> dict[str, float | None]:
    """The mean of each reward function in the log of an evaluation, by the function's name."""
    return {
        name.removeprefix("eval_rewards/").removesuffix("/mean"): value
        for name, value in logs.items()
        if name.startswith("eval_rewards/") and name.endswith("/mean")
    }


def evaluation_line(logs: Mapping[str, Any], *, step: int) -> str:
    """One evaluation as a line: the reward, and each reward function if there are several."""
    parts = [f"eval at step {step}", f"reward {format_reward(logs['eval_reward'])}"]
    means = evaluated_rewards(logs)
    if len(means) > 1:
        parts += [f"{name} {format_reward(value)}" for name, value in means.items()]
    return " | ".join(parts)


class CompactProgressCallback(TrainerCallback):
    """Prints [`progress_line`] for every log of training and [`evaluation_line`] for every evaluation."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._first_step = 0
        self._first_tokens = 0.0

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._began, self._first_step = time.monotonic(), state.global_step
        self._first_tokens = float(state.num_input_tokens_seen)

    def on_log(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "eval_reward" in logs:
            print(evaluation_line(logs, step=state.global_step), flush=True)
        elif "loss" in logs and self._began is not None:
            elapsed = time.monotonic() - self._began
            done = state.global_step - self._first_step
            left = elapsed / done * (state.max_steps - state.global_step) if done else None
            tokens = float(state.num_input_tokens_seen) - self._first_tokens
            rate = tokens / elapsed if elapsed > 0 else None
            line = progress_line(
                logs, step=state.global_step, max_steps=state.max_steps, tokens_per_second=rate, seconds_left=left
            )
            print(line, flush=True)


class SavedSoFarCallback(TrainerCallback):
    """Knows the newest checkpoint of a run. Others in the output directory may be an earlier run's.

    Args:
        resumed_from: the checkpoint that the run starts from, if any.
    """

    def __init__(self, resumed_from: str | None = None) -> None:
        self._newest = resumed_from

    def on_save(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._newest = os.path.join(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def describe(self, args: Arguments, step: int) -> str:
        """What is left of a run that ends after this many optimizer steps."""
        trained = f"{step} optimizer step{'' if step == 1 else 's'} had been trained."
        if self._newest is not None:
            return f"{trained} The newest checkpoint on disk is {self._newest}."
        strategy = SaveStrategy(args.save_strategy).value
        interval = f" with save_steps={args.save_steps:g}" if strategy == "steps" else ""
        return f"{trained} Nothing was saved: save_strategy is {strategy}{interval}."


class FirstEvaluationCallback(TrainerCallback):
    """Keeps what the model could do before it was trained: the metrics and some completions of `eval_on_start`.

    Args:
        completions: called after the evaluation.
    """

    def __init__(self, completions: Callable[[], dict[str, str]]) -> None:
        self._completions_of = completions
        self.metrics: dict[str, float] | None = None
        self.completions: dict[str, str] = {}

    def on_evaluate(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.metrics is None and state.global_step == 0 and metrics is not None:
            self.metrics, self.completions = dict(metrics), self._completions_of()


def use_compact_progress(trainer: Trainer) -> None:
    """Replace the progress bar and the printed dicts of transformers by compact lines."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(CompactProgressCallback)
