"""What reward functions return and log is checked, with the row and the step it comes from."""

import asyncio
import functools
import inspect
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable

from .config import DROConfig
from .config_rules import is_number, refusal, short
from .masking import LARGEST


RANGE_HINT = f"Return a finite number of at most {LARGEST:g} in size, or None."

# How long to look for the row that makes a reward function raise.
SEARCH_SECONDS = 30.0

# How long a coroutine that is out of time may take to let itself be cancelled.
_SECONDS_TO_CANCEL = 10.0
_BLOCKS = (
    "It is an `async def` that waits without `await`, which blocks all that run beside it: write `await "
    "asyncio.sleep(...)` and asynchronous clients, or a plain `def`."
)

# TRL keeps the dataset's column 'completion' from reward functions. It travels under this name.
COMPLETION_COLUMN = "_dataset_completion"

# Metrics that the trainer logs: `log_metric` would be averaged with them, or written over them.
_RESERVED_METRICS = re.compile(
    r"loss|grad_norm|learning_rate|epoch|step|step_time|num_tokens|total_flos|runtime|(samples|steps)_per_second"
    r"|train_(loss|runtime|samples_per_second|steps_per_second)|reward|reward_std|frac_reward_zero_std|kl|entropy"
    r"|rewards/.+/(mean|std)|entropy_coef|aux_loss|policy_loss"
    r"|completions/((mean|min|max)(_terminated)?_length|clipped_ratio)|tools/(call|failure)_frequency"
    r"|sampling/(sampling_logp_difference|importance_sampling_ratio)/\w+"
    r"|clip_ratio/(low|high|region|dual)_(mean|min|max)|(dro|rollout_corr)/.*"
)

# Columns of the table of completions that the trainer fills.
_RESERVED_EXTRA = ("step", "prompt", "completion", "advantage")


def checked_rewards(
    reward_funcs: Any, args: DROConfig, reward_processing_classes: Any, *, has_environment: bool
) -> list[Any]:
    """The reward functions as a list, each wrapped so that what it returns is checked; models and names as they are.

    Raises:
        ValueError: there is none, one is none, or the weights or processing classes are not one for each.
    """
    if reward_funcs is None:
        rewards = []
    else:
        rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    for index, reward in enumerate(rewards):
        if not isinstance(reward, str) and not callable(reward):
            where = f"reward_funcs[{index}]" if isinstance(reward_funcs, (list, tuple)) else "reward_funcs"
            raise ValueError(
                f"{where}={short(reward)} is refused: it must be a function, a reward model, its name or path, or a "
                "list of these. Write `reward_funcs=[my_reward]`."
            )
    if not rewards and not has_environment:
        raise ValueError(
            f"reward_funcs={reward_funcs!r} is refused: there must be a reward to train on. Write "
            "`reward_funcs=[my_reward]`, or pass an environment_factory whose environments have a `get_reward`."
        )
    if args.reward_weights is not None and len(args.reward_weights) != len(rewards):
        instead = f"reward_weights={[1.0] * len(rewards) or None}"
        allowed = f"there are {len(rewards)} reward functions, each needs one weight"
        raise refusal("reward_weights", args.reward_weights, allowed, instead)
    if reward_processing_classes is not None:
        given = len(reward_processing_classes) if isinstance(reward_processing_classes, list) else 1
        if given != len(rewards):
            raise ValueError(
                f"There are {given} reward_processing_classes for {len(rewards)} reward functions. Write one for "
                f"each, None for a function: `reward_processing_classes={[None] * len(rewards)}`."
            )
    # Functions of one name are told apart here already, for the errors that name them.
    functions = [index for index, reward in enumerate(rewards) if _is_function(reward)]
    names = distinct_names([get_callable_name(rewards[index]) for index in functions])
    for index, name in zip(functions, names, strict=True):
        rewards[index] = checked_reward(rewards[index], name, args.reward_timeout)
    return rewards


def _is_function(reward: Any) -> bool:
    return callable(reward) and not isinstance(reward, nn.Module)


def distinct_names(names: list[str]) -> list[str]:
    """The names, with `_2`, `_3`... after those that came before: TRL logs rewards of one name as one."""
    distinct: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in distinct or (count > 1 and candidate in names):
            count += 1
            candidate = f"{name}_{count}"
        distinct.append(candidate)
    return distinct


def reward_names(names: list[str], reward_funcs: list[Any]) -> list[str]:
    """TRL's names of the rewards, each given once; a model that was built in memory goes by its class."""
    return distinct_names([name or type(reward).__name__ for name, reward in zip(names, reward_funcs, strict=True)])


def checked_reward(reward_func: Callable[..., Any], name: str, timeout: float | None = None) -> Callable[..., Any]:
    """The function, called `name`, with what it returns and logs checked, and at most `timeout` seconds for a call."""
    takes_completion = _takes(reward_func, "completion")

    if is_async_callable(reward_func):

        async def checked_async(**kwargs: Any) -> list[float | None]:
            call = _RewardCall(name, kwargs, takes_completion)
            try:
                with _watched(timeout, call):
                    rewards = _listed(await _within_async(timeout, reward_func(**call.kwargs)))
            except _BadLog:
                raise
            except _TooSlow:
                raise call.too_slow(timeout) from None
            except Exception as error:
                for row, alone in call.rows_alone():
                    try:
                        with _watched(timeout, call):
                            _listed(await _within_async(timeout, reward_func(**alone)))
                    except Exception as again:
                        call.blame(row, again)
                        break
                call.note(error)
                raise
            return call.checked(rewards)

        wrapper: Callable[..., Any] = checked_async
    else:

        def once(arguments: dict[str, Any]) -> Any:
            return _listed(reward_func(**arguments))

        def checked(**kwargs: Any) -> list[float | None]:
            call = _RewardCall(name, kwargs, takes_completion)
            try:
                rewards = _within(timeout, functools.partial(once, call.kwargs))
            except _BadLog:
                raise
            except _TooSlow:
                raise call.too_slow(timeout) from None
            except Exception as error:
                for row, alone in call.rows_alone():
                    try:
                        _within(timeout, functools.partial(once, alone))
                    except Exception as again:
                        call.blame(row, again)
                        break
                call.note(error)
                raise
            return call.checked(rewards)

        wrapper = checked
    functools.update_wrapper(wrapper, reward_func)
    wrapper.__name__ = name  # TRL names metrics by it
    return wrapper


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # written in C
        return False
    return name in parameters or any(item.kind is item.VAR_KEYWORD for item in parameters.values())


def _listed(rewards: Any) -> Any:
    """A generator's values, so that what it raises is raised here; anything else as it is."""
    return list(rewards) if isinstance(rewards, Iterator) else rewards


class _TooSlow(Exception):
    pass


def _within(timeout: float | None, function: Callable[[], Any]) -> Any:
    """What the function returns or raises. A call that takes longer goes on in its thread, which nothing waits for.

    Raises:
        _TooSlow: it takes longer than `timeout` seconds.
    """
    if timeout is None:
        return function()
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = results.get(timeout=timeout)
    except queue.Empty:
        raise _TooSlow from None
    if error is not None:
        raise error
    return value


async def _within_async(timeout: float | None, call: Awaitable[Any]) -> Any:
    """The same for a coroutine, which is cancelled."""
    task = asyncio.ensure_future(call)
    done, _ = await asyncio.wait({task}, timeout=timeout)
    if not done:
        task.cancel()
        raise _TooSlow
    return task.result()


@contextmanager
def _watched(timeout: float | None, call: "_RewardCall") -> Iterator[None]:
    """End the process, with a message, if a coroutine blocks its event loop for long after its time is up.

    Nothing can interrupt it there: the loop cannot cancel what does not await, and the main thread waits for the loop.
    """
    if timeout is None:
        yield
        return

    def end() -> None:
        print(f"TimeoutError: {call.too_slow(timeout)} {_BLOCKS}", file=sys.stderr, flush=True)
        os._exit(1)

    watch = threading.Timer(timeout + _SECONDS_TO_CANCEL, end)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


class _BadLog(ValueError):
    """What a reward function logs is refused; the function itself is fine."""


class _RewardCall:
    """One call of a reward function: the arguments that it gets, and the checks of what it logs and returns."""

    def __init__(self, name: str, kwargs: dict[str, Any], takes_completion: bool):
        self.name = name
        self.prompts, self.completions = kwargs["prompts"], kwargs["completions"]
        self.step = getattr(kwargs.get("trainer_state"), "global_step", "unknown")
        self.where = f"reward function {name!r} at step {self.step}"
        self.kwargs = dict(kwargs)
        column = self.kwargs.pop(COMPLETION_COLUMN, None)
        if column is not None and takes_completion:
            self.kwargs["completion"] = column
        self._logged: dict[str, int] = {}
        if "log_metric" in kwargs:
            self.kwargs["log_metric"] = self._log_metric
            self._metric_logger = kwargs["log_metric"]
        if "log_extra" in kwargs:
            self.kwargs["log_extra"] = self._log_extra
            self._extra_logger = kwargs["log_extra"]
        self.culprit: tuple[int, Exception] | None = None
        self._searched = 0

    def _log_metric(self, name: str, value: float) -> None:
        call = f"{self.where} called log_metric({name!r}, {short(value)})"
        if not isinstance(name, str) or _RESERVED_METRICS.fullmatch(name):
            raise _BadLog(
                f"{call}: the trainer logs a metric of this name, yours would be mixed with it. Write "
                f"`log_metric('my_{name}', value)`."
            )
        number = _plain(value)
        if not isinstance(number, (int, float)):
            raise _BadLog(f"{call}: the value must be one number. Write `log_metric({name!r}, float(value))`.")
        self._metric_logger(name, float(number))

    def _log_extra(self, column: str, values: list) -> None:
        call = f"{self.where} called log_extra({column!r}, {short(values)})"
        if not isinstance(column, str) or column in (*_RESERVED_EXTRA, self.name):
            raise _BadLog(
                f"{call}: the table of completions has a column of this name. Write "
                f"`log_extra('my_{column}', values)`."
            )
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise _BadLog(f"{call}: it must be a list of {len(self.completions)} values, one for each completion.")
        values = list(values)
        self._logged[column] = self._logged.get(column, 0) + len(values)
        self._extra_logger(column, values)

    def blame(self, row: int, error: Exception) -> None:
        """Note what the function raised for this row alone; that it took too long there is none of its errors."""
        if not isinstance(error, _TooSlow):
            self.culprit = (row, error)

    def rows_alone(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The arguments of the call for one row at a time, with nothing logged, until time is up."""
        began, size = time.monotonic(), len(self.completions)
        silent: dict[str, Any] = {name: _log_nothing for name in ("log_metric", "log_extra") if name in self.kwargs}
        for row in range(size):
            if time.monotonic() - began > SEARCH_SECONDS:
                return
            self._searched = row + 1
            columns = {
                name: value[row : row + 1] if isinstance(value, list) and len(value) == size else value
                for name, value in self.kwargs.items()
            }
            yield row, {**columns, **silent}

    def too_slow(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(
            f"{self.where} did not return within reward_timeout={timeout:g} seconds for {len(self.completions)} "
            "completions. Let it give up by itself and return None, or write a larger `reward_timeout`. "
            f"{self._shown(0)}"
        )

    def note(self, error: Exception) -> None:
        """Add to what the function raised: which function, at which step, and for which row."""
        error.add_note(f"Raised by reward function {self.name!r} at step {self.step}.")
        if self.culprit is None:
            error.add_note(f"Called with one row at a time it raises for none of the first {self._searched} rows.")
        else:
            row, again = self.culprit
            error.add_note(f"Called with one row at a time it raises {again!r} for row {row}. {self._shown(row)}")

    def checked(self, rewards: Any) -> list[float | None]:
        """What the function returned, as numbers.

        Raises:
            ValueError: it is no list of one number or None for each completion, or logged columns are too short.
        """
        if isinstance(rewards, (str, bytes, Mapping, Set)) or not isinstance(rewards, Iterable):
            raise ValueError(
                f"{self.where} returned {short(rewards)}: it must return a list of {len(self.completions)} numbers, "
                "one for each completion (None where it does not apply)."
            )
        rewards = [_plain(reward) for reward in rewards]
        if len(rewards) != len(self.completions):
            raise ValueError(
                f"{self.where} returned {len(rewards)} rewards for {len(self.completions)} completions: it must "
                "return one for each."
            )
        for row, reward in enumerate(rewards):
            if reward is None or isinstance(reward, bool) or (is_number(reward) and abs(reward) <= LARGEST):
                continue
            hint = "Return None where a reward does not apply." if _is_nan(reward) else RANGE_HINT
            raise ValueError(f"{self.where} returned {reward!r} for row {row}. {hint} {self._shown(row)}")
        for column, count in self._logged.items():
            if count != len(self.completions):
                raise ValueError(
                    f"{self.where} called log_extra({column!r}, ...) with {count} values for "
                    f"{len(self.completions)} completions: it must log one for each."
                )
        return [None if reward is None else float(reward) for reward in rewards]

    def _shown(self, row: int) -> str:
        return f"Prompt: {short(self.prompts[row])}. Completion: {short(self.completions[row])}."


def _log_nothing(*args: Any) -> None:
    pass


def _plain(reward: Any) -> Any:
    """The number inside an array or tensor of one element; anything else as it is."""
    try:
        return reward.item()
    except (AttributeError, RuntimeError, ValueError):  # not an array, or one of several elements
        return reward


def _is_nan(reward: Any) -> bool:
    return isinstance(reward, float) and math.isnan(reward)
