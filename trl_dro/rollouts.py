"""The order of prompts, and what engines and rollout functions bring back."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from .checks import RESERVED_COLUMNS


# Log-probs are at most 0, give or take an engine's rounding. What was sampled has none below the other bound: such
# numbers stand for "none".
TOLERANCE = 1e-3
LOWEST_LOGPROB = -1e3

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


class ResumableSampler(Sampler):
    """Begins with the epoch that a run resumes in: TRL's sampler always begins with epoch 0."""

    def __init__(self, sampler: Any, epoch: Callable[[], int]):
        self.sampler, self.epoch = sampler, epoch
        self._placed = False

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle and not self._placed:
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)
        self._placed = True
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


def fill_empty(completion_ids: list[list[int]], logprobs: Any, eos: int) -> tuple[list[list[int]], Any]:
    """Give an empty completion the end-of-sequence token that the engine left out; TRL cannot index an empty one."""
    if all(len(ids) for ids in completion_ids):
        return completion_ids, logprobs
    if logprobs is not None:
        logprobs = [list(row) if len(ids) else [math.nan] for ids, row in zip(completion_ids, logprobs, strict=True)]
    return [list(ids) if len(ids) else [eos] for ids in completion_ids], logprobs


def check_prompt_ids(prompt_ids: Any, source: str, positions: int | None = None) -> None:
    """Refuse prompts that no completion can begin after.

    Args:
        prompt_ids: the tokens of each prompt.
        source: where they come from.
        positions: how many positions the model can tell apart, None if they are not counted.

    Raises:
        ValueError: a prompt has no tokens, or fills all positions.
    """
    for row, ids in enumerate(prompt_ids):
        if len(ids) == 0:
            raise ValueError(
                f"{source} has no tokens in row {row} of the batch (an empty text?): there is nothing to continue. "
                "Write `dataset.filter(lambda row: row['prompt'])`."
            )
        if positions is not None and len(ids) >= positions:
            raise ValueError(
                f"{source} has {len(ids)} tokens in row {row} of the batch, the model has only {positions} positions "
                f"for prompt and completion together. Leave out prompts of {positions} tokens and more."
            )


def shortened(prompt_ids: list[list[int]], positions: int | None, wanted: int | None) -> dict[str, int]:
    """The generation setting by which the longest prompt and its completion fit the model's positions.

    Args:
        prompt_ids: the tokens of each prompt.
        positions: how many positions the model can tell apart, None if they are not counted.
        wanted: tokens of a completion, at most; None leaves it to the model.
    """
    if positions is None or wanted is None:
        return {}
    room = positions - max(len(ids) for ids in prompt_ids)
    if wanted <= room:
        return {}
    warnings.warn(
        f"max_completion_length={wanted} goes beyond the {positions} positions of the model for some prompts: their "
        "batch gets shorter completions.",
        stacklevel=3,
    )
    return {"max_new_tokens": room}


def check_completions(source: str, rows: int, completion_ids: Any, logprobs: Any) -> Any:
    """Refuse completions and log-probs that do not belong together.

    Args:
        source: the engine or function that they come from.
        rows: how many completions are due.
        completion_ids: the tokens of each completion.
        logprobs: the log-prob of each of these tokens, or None; None or NaN where there is none.

    Returns:
        The log-probs as lists of one number (or None) for each token. What no log-prob of a sampled token can be,
        above 0 or below -1000, counts as none, with a warning.

    Raises:
        ValueError: a completion or log-prob is missing or left over, or all log-probs look like probabilities.
    """
    _check_rows(source, "completion_ids", completion_ids, rows)
    if logprobs is None:
        return None
    _check_rows(source, "logprobs", logprobs, rows)
    for row, (ids, values) in enumerate(zip(completion_ids, logprobs, strict=True)):
        _check_length(source, "logprobs", row, values, len(ids))
    checked = []
    logprobs = [[_single(value) for value in _plain(values)] for values in logprobs]
    numbers = [
        value for values in logprobs for value in values if isinstance(value, (int, float)) and not math.isnan(value)
    ]
    if any(value > TOLERANCE for value in numbers) and all(0.0 <= value <= 1.0 for value in numbers):
        raise ValueError(
            f"{source} returned logprobs from {min(numbers)!r} to {max(numbers)!r}, a log-prob is at most 0. Of "
            "probabilities take the logarithm: `math.log(p)`."
        )
    for row, values in enumerate(logprobs):
        for value in values:
            if value is not None and not isinstance(value, (int, float)):
                raise ValueError(
                    f"{source} returned logprobs with {value!r} in row {row}: each token has one number, the log-prob "
                    "of the token that was sampled (None where there is none)."
                )
        given = [value for value in values if value is not None and not math.isnan(value)]
        broken = {value for value in given if not LOWEST_LOGPROB <= value <= TOLERANCE}
        wrong = broken - {-math.inf}  # that one is how some engines say that they have none
        if wrong:
            warnings.warn(
                f"{source} returned {min(wrong)!r} in row {row}, which is no log-prob of a sampled token: such tokens "
                "count as if it had reported none, see the metric rollout_corr/unscored_fraction.",
                stacklevel=2,
            )
        checked.append([None if value in broken else value for value in values])
    return checked


def checked_rollouts(rollout_func: Callable[..., dict[str, Any]] | None) -> Any:
    """The rollout function, with what it returns checked and `fill_empty` applied."""
    if rollout_func is None:
        return None

    def rollout(prompts: list, trainer: Any) -> dict[str, Any]:
        with trainer.as_configured():
            output = rollout_func(prompts, trainer)
        output = _checked_output(output, len(prompts), trainer.max_positions)
        ids = output["completion_ids"]
        if not all(len(row) for row in ids):
            if output.get("env_mask") is not None:
                output["env_mask"] = [
                    mask if len(row) else [1] for row, mask in zip(ids, output["env_mask"], strict=True)
                ]
            filled = fill_empty(ids, output["logprobs"], trainer.eos_token_ids[0])
            output["completion_ids"], output["logprobs"] = filled
        return output

    return rollout


def _checked_output(output: Any, rows: int, positions: int | None) -> dict[str, Any]:
    if not isinstance(output, Mapping):
        raise ValueError(
            f"rollout_func returned a {type(output).__name__}, it must return a dict with the keys "
            f"{', '.join(map(repr, _REQUIRED))}."
        )
    missing = [key for key in _REQUIRED if key not in output]
    if missing:
        raise ValueError(
            f"rollout_func returned a dict without {', '.join(map(repr, missing))}, it must have the keys "
            f"{', '.join(map(repr, _REQUIRED))}. Write `'logprobs': None` if there are none."
        )
    checked = dict(output)
    prompt_ids, completion_ids = checked["prompt_ids"], checked["completion_ids"]
    _check_rows("rollout_func", "prompt_ids", prompt_ids, rows)
    check_prompt_ids(prompt_ids, "the prompt_ids of rollout_func", positions)
    checked["logprobs"] = check_completions("rollout_func", rows, completion_ids, checked["logprobs"])
    for row, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
        if positions is not None and len(prompt) + len(completion) > positions:
            raise ValueError(
                f"rollout_func returned {len(prompt)} prompt_ids and {len(completion)} completion_ids in row {row}, "
                f"the model has only {positions} positions for both together."
            )
    if checked.get("env_mask") is not None:
        _check_rows("rollout_func", "env_mask", checked["env_mask"], rows)
        for row, mask in enumerate(checked["env_mask"]):
            _check_length("rollout_func", "env_mask", row, mask, len(completion_ids[row]))
    for key in checked.keys() - {*_REQUIRED, "env_mask"}:
        checked[key] = _checked_field(key, checked[key], rows)
    return checked


def _checked_field(key: str, values: Any, rows: int) -> Any:
    """A field for the reward functions: a list is one value for each row, anything else is the same for all."""
    if key in RESERVED_COLUMNS:
        raise ValueError(
            f"rollout_func returned the key {key!r}, a name under which the trainer passes something else to reward "
            f"functions (reserved: {', '.join(RESERVED_COLUMNS)}). Write `'my_{key}': ...`."
        )
    if isinstance(values, tuple) or getattr(values, "ndim", 0) > 0:
        return list(_plain(values)) if len(values) == rows else values
    if isinstance(values, list) and len(values) != rows:
        raise ValueError(
            f"rollout_func returned {len(values)} values of {key!r} for {rows} prompts: a list must have one for each "
            "(a number, a text or a dict is the same for all)."
        )
    return values


def _check_rows(source: str, key: str, values: Any, rows: int) -> None:
    if not isinstance(values, Sized) or isinstance(values, (str, Mapping)):
        raise ValueError(f"{source} returned {key}={values!r}: it must be a list with a list for each prompt.")
    if len(values) != rows:
        raise ValueError(
            f"{source} returned {len(values)} rows of {key} for {rows} prompts: there must be one for each (a prompt "
            "comes once for each of its completions)."
        )


def _check_length(source: str, key: str, row: int, values: Any, tokens: int) -> None:
    if not isinstance(values, Sized) or len(values) != tokens:
        given = len(values) if isinstance(values, Sized) else repr(values)
        raise ValueError(
            f"{source} returned {given} {key} for the {tokens} completion_ids of row {row}: there must be one for "
            "each token."
        )


def _plain(values: Any) -> Any:
    """A tensor or array as nested lists, anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def _single(value: Any) -> Any:
    """The log-prob of a token, which vLLM reports as a list of one."""
    value = _plain(value)
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
