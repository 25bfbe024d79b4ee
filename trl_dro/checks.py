"""Data and rewards that cannot be right are refused where they come in, with the row they are in."""

import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sized
from typing import Any

from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable

from .config import DROConfig
from .config_rules import MISSING_BETA, is_number, refusal


# Rewards become float32, and a group's are added up.
LARGEST_REWARD = 1e30
RANGE_HINT = f"Return a finite number of at most {LARGEST_REWARD:g} in size, or None."

# Names under which the trainer itself passes something to reward functions.
RESERVED_COLUMNS = ("prompts", "completions", "trainer_state", "log_extra", "log_metric", "environments")


def check_args(args: Any, *, has_rollout_func: bool) -> DROConfig:
    """Refuse a configuration that is none of ours, or that this trainer cannot carry out.

    Raises:
        ValueError: `args` is missing or not a `DROConfig`, nothing reports the log-probs that it anchors to, or its
            output directory cannot be written.
    """
    if args is None:
        raise ValueError(f"DROTrainer needs `args=DROConfig(...)`. {MISSING_BETA}")
    if not isinstance(args, DROConfig):
        raise ValueError(
            f"args is a {type(args).__name__}, DROTrainer takes a DROConfig. Write "
            "`args=DROConfig.from_grpo_config(args, dro_beta=0.5)`."
        )
    if args.anchor_policy == "sampling" and not args.use_vllm and not has_rollout_func:
        allowed = "no engine here reports log-probs: it needs use_vllm=True or a rollout_func that returns logprobs"
        raise refusal("anchor_policy", "sampling", allowed, "anchor_policy='old'")
    try:
        os.makedirs(str(args.output_dir), exist_ok=True)
        with tempfile.TemporaryFile(dir=args.output_dir):
            pass
    except OSError as error:
        raise refusal(
            "output_dir", args.output_dir, f"it cannot be written ({error})", "output_dir='runs/mine'"
        ) from error
    return args


def check_datasets(args: DROConfig, train_dataset: Any, eval_dataset: Any, *, has_environment: bool) -> None:
    """Check what the trainer is given to train and evaluate on.

    Raises:
        ValueError: a column is missing or has a reserved name, or the training rows do not fill one generation batch.
    """
    held_out = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
    for name, dataset in {"train_dataset": train_dataset, **held_out}.items():
        check_columns(name, dataset, has_environment=has_environment)
    needed = args.batch_plan().prompts_per_generation
    if isinstance(train_dataset, Sized) and len(train_dataset) < needed:
        plan = args.batch_plan()
        raise ValueError(
            f"train_dataset has {len(train_dataset)} rows, one generation batch takes {needed} prompts "
            f"({plan.rows_per_generation} completions / num_generations={plan.num_generations}): no step could be "
            "trained. Write a smaller per_device_train_batch_size or steps_per_generation, or give more rows."
        )


def check_columns(name: str, dataset: Any, *, has_environment: bool) -> None:
    """Refuse a dataset without prompts, or with a column whose name the trainer uses otherwise."""
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list):  # no dataset, or a stream that does not know its columns
        return
    if "prompt" not in columns and not has_environment:
        raise ValueError(
            f"{name} has no column 'prompt' (it has: {', '.join(columns)}). Write "
            f"`dataset.rename_column({columns[0] if columns else 'question'!r}, 'prompt')`."
        )
    for column in columns:
        if column in RESERVED_COLUMNS:
            raise ValueError(
                f"{name} has a column {column!r}, a name under which the trainer passes something else to reward "
                f"functions (reserved: {', '.join(RESERVED_COLUMNS)}). Write "
                f"`dataset.rename_column({column!r}, 'my_{column}')`."
            )


def checked_rewards(reward_funcs: Any) -> Any:
    """The reward functions, each wrapped so that what it returns is checked; models and names as they are."""
    if isinstance(reward_funcs, list):
        return [checked_rewards(reward_func) for reward_func in reward_funcs]
    if isinstance(reward_funcs, nn.Module) or not callable(reward_funcs):
        return reward_funcs
    return _checked(reward_funcs)


def _checked(reward_func: Callable[..., Any]) -> Callable[..., Any]:
    name = get_callable_name(reward_func)

    def note(error: Exception, kwargs: dict[str, Any]) -> None:
        error.add_note(f"Raised by reward function {name!r} at step {_step(kwargs)}.")

    if is_async_callable(reward_func):

        async def checked_async(*args: Any, **kwargs: Any) -> list[float | None]:
            try:
                rewards = await reward_func(*args, **kwargs)
            except Exception as error:
                note(error, kwargs)
                raise
            return _check_rewards(name, rewards, kwargs)

        wrapper: Callable[..., Any] = checked_async
    else:

        def checked(*args: Any, **kwargs: Any) -> list[float | None]:
            try:
                rewards = reward_func(*args, **kwargs)
            except Exception as error:
                note(error, kwargs)
                raise
            return _check_rewards(name, rewards, kwargs)

        wrapper = checked
    functools.update_wrapper(wrapper, reward_func)
    wrapper.__name__ = name  # TRL names metrics by it
    return wrapper


def _step(kwargs: dict[str, Any]) -> Any:
    return getattr(kwargs.get("trainer_state"), "global_step", "unknown")


def _check_rewards(name: str, rewards: Any, kwargs: dict[str, Any]) -> list[float | None]:
    where = f"reward function {name!r} at step {_step(kwargs)}"
    completions = kwargs["completions"]
    if isinstance(rewards, str) or not isinstance(rewards, Iterable):
        raise ValueError(
            f"{where} returned {rewards!r}: it must return a list of {len(completions)} numbers, one for each "
            "completion (None where it does not apply)."
        )
    rewards = [_plain(reward) for reward in rewards]
    if len(rewards) != len(completions):
        raise ValueError(
            f"{where} returned {len(rewards)} rewards for {len(completions)} completions: it must return one for each."
        )
    for row, reward in enumerate(rewards):
        if reward is None or isinstance(reward, bool) or (is_number(reward) and abs(reward) <= LARGEST_REWARD):
            continue
        hint = "Return None where a reward does not apply." if _is_nan(reward) else RANGE_HINT
        raise ValueError(
            f"{where} returned {reward!r} for row {row}. {hint} Prompt: {_short(kwargs['prompts'][row])}. "
            f"Completion: {_short(completions[row])}."
        )
    return [None if reward is None else float(reward) for reward in rewards]


def _plain(reward: Any) -> Any:
    """The number inside an array or tensor of one element; anything else as it is."""
    try:
        return reward.item()
    except (AttributeError, RuntimeError, ValueError):  # not an array, or one of several elements
        return reward


def _is_nan(reward: Any) -> bool:
    return isinstance(reward, float) and math.isnan(reward)


def _short(text: Any, limit: int = 200) -> str:
    shown = repr(text)
    return shown if len(shown) <= limit else f"{shown[:limit]}..."
