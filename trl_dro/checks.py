"""Data and rewards that cannot be right are refused where they come in, with the row they are in."""

import functools
import inspect
import math
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, Sized
from typing import Any, cast

from datasets import Dataset, IterableDataset
from datasets.features.features import require_decoding
from torch import nn
from transformers.integrations import get_available_reporting_integrations
from trl.trainer.utils import get_callable_name, is_async_callable

from .config import DROConfig
from .config_rules import MISSING_BETA, is_number, refusal


# Rewards become float32, and a group's are added up.
LARGEST_REWARD = 1e30
RANGE_HINT = f"Return a finite number of at most {LARGEST_REWARD:g} in size, or None."

# How long to look for the row that makes a reward function raise.
SEARCH_SECONDS = 30.0

# Names under which the trainer itself passes something to reward functions.
RESERVED_COLUMNS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
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

# Trackers that transformers leaves out of its list of those installed, always or sometimes.
_UNLISTED_TRACKERS = ("azure_ml", "flyte")

# Columns of the table of completions that the trainer fills.
_RESERVED_EXTRA = ("step", "prompt", "completion", "advantage")

# What the trainer passes to `apply_chat_template` itself.
_OWN_TEMPLATE_OPTIONS = ("conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "return_dict")

_PREFILL = (
    "completions begin a new assistant message. Have the model continue one with a prompt of text, "
    "`tokenizer.apply_chat_template(prompt, tokenize=False, continue_final_message=True)`"
)


def check_args(args: Any, *, has_rollout_func: bool) -> DROConfig:
    """Refuse a configuration that is none of ours, or that this trainer cannot carry out.

    Raises:
        ValueError: `args` is missing or not a `DROConfig`, nothing reports the log-probs that it anchors to, a tracker
            is not installed, the chat template is given what the trainer sets, or the output directory cannot be
            written.
    """
    if args is None:
        raise ValueError(f"DROTrainer needs `args=DROConfig(...)`. {MISSING_BETA}")
    if not isinstance(args, DROConfig):
        raise ValueError(
            f"args is a {type(args).__name__}, DROTrainer takes a DROConfig. Write "
            "`args=DROConfig.from_grpo_config(args, dro_beta=0.5)`."
        )
    if not args.use_vllm and not has_rollout_func:
        allowed = "no engine here reports log-probs: it needs use_vllm=True or a rollout_func that returns logprobs"
        if args.anchor_policy == "sampling":
            raise refusal("anchor_policy", "sampling", allowed, "anchor_policy='old'")
        for name in ("rollout_is", "rollout_rs"):
            if getattr(args, name) is not None:
                raise refusal(name, getattr(args, name), allowed, f"{name}=None")
    trackers = cast(list[str], args.report_to)  # resolved by transformers
    for name in trackers:
        if name not in (*get_available_reporting_integrations(), *_UNLISTED_TRACKERS):
            rest = [other for other in trackers if other != name] or "none"
            raise refusal("report_to", name, f"it is not installed (`pip install {name}`)", f"report_to={rest!r}")
    if not has_rollout_func:
        _check_template_options(args.chat_template_kwargs or {})
    try:
        os.makedirs(str(args.output_dir), exist_ok=True)
        with tempfile.TemporaryFile(dir=args.output_dir):
            pass
    except OSError as error:
        raise refusal(
            "output_dir", args.output_dir, f"it cannot be written ({error})", "output_dir='runs/mine'"
        ) from error
    return args


def _check_template_options(given: Any) -> None:
    for name, value in given.items():
        rest = {key: item for key, item in given.items() if key != name} or None
        if name in _OWN_TEMPLATE_OPTIONS:
            allowed = "the trainer sets it"
        elif name == "continue_final_message" and value:
            allowed = _PREFILL
        else:
            continue
        raise refusal(f"chat_template_kwargs[{name!r}]", value, allowed, f"chat_template_kwargs={rest}")


def check_tokenizer(processing_class: Any, *, generates: bool) -> None:
    """Refuse a tokenizer by which no completion could end, or none be padded.

    Args:
        processing_class: a tokenizer, a processor, or None if it comes with the model.
        generates: whether the trainer generates with transformers, which needs the end token itself.

    Raises:
        ValueError: the tokenizer has no end token.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer is None or getattr(tokenizer, "eos_token", "") is not None:
        return
    if generates or tokenizer.pad_token is None:
        raise ValueError(
            "processing_class.eos_token=None is refused: completions end with it, and are padded with it where there "
            "is no pad_token. Write `tokenizer.eos_token = '</s>'` with the token that ends a text in this vocabulary."
        )


def check_data(
    args: DROConfig, train_dataset: Any, eval_dataset: Any, *, has_environment: bool, has_rollout_func: bool
) -> None:
    """Check what the trainer is given to train and evaluate on, prompts included.

    Raises:
        ValueError: a dataset is missing or of the wrong kind, or what [`check_datasets`] and [`check_prompt`] refuse.
    """
    _check_train_type(train_dataset, has_environment=has_environment)
    _check_eval_type(eval_dataset)
    for name, value in (("eval_strategy", args.eval_strategy), ("eval_on_start", args.eval_on_start)):
        if value not in ("no", False) and eval_dataset is None:
            raise ValueError(
                f"{name}={getattr(value, 'value', value)!r} is refused: there is no eval_dataset to evaluate on. "
                f"Write `{name}={'no' if name == 'eval_strategy' else False!r}`, or pass an `eval_dataset`."
            )
    _check_best_metric(args, eval_dataset)
    if isinstance(train_dataset, IterableDataset) and args.max_steps < 1:
        raise refusal(
            "max_steps", args.max_steps, "train_dataset is a stream, whose length nobody knows", "max_steps=1000"
        )
    check_datasets(args, train_dataset, eval_dataset, has_environment=has_environment)
    for name, dataset in _named(train_dataset, eval_dataset):
        for row, prompt in enumerate(_prompts(dataset)):
            check_prompt(f"{name} row {row}", prompt, has_rollout_func=has_rollout_func)
    size = args.batch_plan().prompts_per_generation
    if isinstance(train_dataset, Sized) and not args.shuffle_dataset and len(train_dataset) % size:
        warnings.warn(
            f"shuffle_dataset=False and {len(train_dataset)} rows: batches take {size} prompts each, so the last "
            f"{len(train_dataset) % size} rows of train_dataset are left out of every epoch. Write "
            "`shuffle_dataset=True`, or give a multiple.",
            stacklevel=3,
        )


def _named(train_dataset: Any, eval_dataset: Any) -> Iterator[tuple[str, Any]]:
    yield "train_dataset", train_dataset
    if isinstance(eval_dataset, dict):
        yield from ((f"eval_dataset[{name!r}]", dataset) for name, dataset in eval_dataset.items())
    else:
        yield "eval_dataset", eval_dataset


def _check_eval_type(eval_dataset: Any) -> None:
    wrong = {
        name: dataset
        for name, dataset in _named(None, eval_dataset)
        if name != "train_dataset" and not isinstance(dataset, (Dataset, IterableDataset))
    }
    if eval_dataset is not None and (wrong or eval_dataset == {}):
        name, given = next(iter(wrong.items()), ("eval_dataset", eval_dataset))
        raise ValueError(
            f"{name}={_short(given)} is refused: eval_dataset must be a Dataset, an IterableDataset, or a dict of "
            "them. Write `eval_dataset=load_dataset(...)['test']`."
        )


def _check_best_metric(args: DROConfig, eval_dataset: Any) -> None:
    """Of several held-out datasets, one has to be named."""
    read = args.metric_for_best_model is not None or args.lr_scheduler_type == "reduce_lr_on_plateau"
    if not (read and isinstance(eval_dataset, dict) and args.eval_strategy != "no"):
        return
    metric = str(args.metric_for_best_model or "loss").removeprefix("eval_")
    if not any(metric.startswith(f"{name}_") for name in eval_dataset):
        names = [f"eval_{name}_reward" for name in eval_dataset]
        allowed = f"each of several datasets has its own: {', '.join(names)}, ..."
        raise refusal(
            "metric_for_best_model", args.metric_for_best_model, allowed, f"metric_for_best_model={names[0]!r}"
        )


def _check_train_type(train_dataset: Any, *, has_environment: bool) -> None:
    if isinstance(train_dataset, (Dataset, IterableDataset)) or (train_dataset is None and has_environment):
        return
    if isinstance(train_dataset, dict):
        splits = list(train_dataset)
        raise ValueError(
            f"train_dataset is a {type(train_dataset).__name__} of the splits {', '.join(map(repr, splits))}, it must "
            f"be one of them. Write `train_dataset=dataset[{splits[0] if splits else 'train'!r}]`."
        )
    given = "missing" if train_dataset is None else f"a {type(train_dataset).__name__}"
    raise ValueError(
        f"train_dataset is {given}, it must be a Dataset or an IterableDataset. Write "
        "`train_dataset=Dataset.from_list([{'prompt': ...}, ...])`."
    )


def check_datasets(args: DROConfig, train_dataset: Any, eval_dataset: Any, *, has_environment: bool) -> None:
    """Check columns and sizes.

    Raises:
        ValueError: a column is missing or has a reserved name, there is nothing to evaluate on, or the training rows
            do not fill one generation batch.
    """
    for name, dataset in _named(train_dataset, eval_dataset):
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
    """Refuse a dataset without prompts or held-out rows, or with a column whose name the trainer uses otherwise."""
    if name != "train_dataset" and isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"{name} has 0 rows: there is nothing to evaluate on. Write `{name}=None`, or give rows.")
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list):  # else no dataset, or a stream that does not know its columns
        _check_names(name, columns, has_environment=has_environment)


def _check_names(name: str, columns: list[str], *, has_environment: bool) -> None:
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


def _prompts(dataset: Any) -> Iterator[Any]:
    """The prompts of a dataset at hand. Streams, and prompts that are made or decoded, are checked batch by batch."""
    if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
        return
    if dataset.format["type"] != "custom" and not require_decoding(dataset.features["prompt"]):
        for table in dataset.select_columns("prompt").with_format("arrow").iter(1000):
            yield from table["prompt"].to_pylist()


def check_prompt(where: str, prompt: Any, *, has_rollout_func: bool) -> None:
    """Refuse what is no prompt, and what TRL would quietly turn into another one.

    Raises:
        ValueError: the prompt is neither text nor a conversation, or it ends in an assistant message.
    """
    if not isinstance(prompt, (str, list, tuple)) or (not isinstance(prompt, str) and len(prompt) == 0):
        raise ValueError(
            f"{where} has the prompt {_short(prompt)}: it must be text or a list of messages. Write "
            "`dataset.filter(lambda row: row['prompt'])` to leave out empty ones."
        )
    last = prompt[-1] if prompt else None
    # A rollout function renders its prompts itself.
    if isinstance(last, dict) and last.get("role") == "assistant" and not has_rollout_func:
        raise ValueError(
            f"{where} has a prompt that ends in an assistant message, but {_PREFILL}, or end in a user message. "
            f"Prompt: {_short(prompt)}."
        )


def checked_rows(
    rows: list[dict[str, Any]], *, multimodal: bool, has_environment: bool, has_rollout_func: bool
) -> list[dict[str, Any]]:
    """The rows of a batch as TRL can take them; the trainer's data collator.

    Rows of a stream may differ in their keys: what one lacks is None, as in a dataset in memory. Where no row has an
    image, TRL is told so, which takes a column of None for images.

    Raises:
        ValueError: what [`check_columns`] and [`check_prompt`] refuse, or an image for a model that takes text only.
    """
    for row in rows:
        _check_names("a row of the dataset", list(row), has_environment=has_environment)
        if "prompt" in row:
            check_prompt("a row of the dataset", row["prompt"], has_rollout_func=has_rollout_func)
    others = {name: None for row in rows for name in row if name != "prompt"}
    rows = [{**others, **row} for row in rows]
    image_columns = [name for name in ("images", "image") if name in others]
    for column in image_columns:
        for row in rows:
            if not _is_missing(row[column]) and not multimodal:
                raise ValueError(
                    f"a row of the dataset has {column}={_short(row[column])}, a column for images, but "
                    "processing_class is a tokenizer: the model would not see them. Pass a processor, or write "
                    f"`dataset.rename_column({column!r}, 'my_{column}')`."
                )
    if image_columns and all(_is_missing(row[column]) for row in rows for column in image_columns):
        rows = [{**row, "images": []} for row in rows]
    return rows


def _is_missing(image: Any) -> bool:
    return image is None or (isinstance(image, (list, tuple)) and len(image) == 0)


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
                f"{where}={_short(reward)} is refused: it must be a function, a reward model, its name or path, or a "
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
        rewards[index] = checked_reward(rewards[index], name)
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


def checked_reward(reward_func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, called `name`, with what it returns and logs checked."""
    takes_completion = _takes(reward_func, "completion")

    if is_async_callable(reward_func):

        async def checked_async(**kwargs: Any) -> list[float | None]:
            call = _RewardCall(name, kwargs, takes_completion)
            try:
                rewards = _listed(await reward_func(**call.kwargs))
            except _BadLog:
                raise
            except Exception as error:
                for row, alone in call.rows_alone():
                    try:
                        _listed(await reward_func(**alone))
                    except Exception as again:
                        call.culprit = (row, again)
                        break
                call.note(error)
                raise
            return call.checked(rewards)

        wrapper: Callable[..., Any] = checked_async
    else:

        def checked(**kwargs: Any) -> list[float | None]:
            call = _RewardCall(name, kwargs, takes_completion)
            try:
                rewards = _listed(reward_func(**call.kwargs))
            except _BadLog:
                raise
            except Exception as error:
                for row, alone in call.rows_alone():
                    try:
                        _listed(reward_func(**alone))
                    except Exception as again:
                        call.culprit = (row, again)
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
        call = f"{self.where} called log_metric({name!r}, {_short(value)})"
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
        call = f"{self.where} called log_extra({column!r}, {_short(values)})"
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
                f"{self.where} returned {_short(rewards)}: it must return a list of {len(self.completions)} numbers, "
                "one for each completion (None where it does not apply)."
            )
        rewards = [_plain(reward) for reward in rewards]
        if len(rewards) != len(self.completions):
            raise ValueError(
                f"{self.where} returned {len(rewards)} rewards for {len(self.completions)} completions: it must "
                "return one for each."
            )
        for row, reward in enumerate(rewards):
            if reward is None or isinstance(reward, bool) or (is_number(reward) and abs(reward) <= LARGEST_REWARD):
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
        return f"Prompt: {_short(self.prompts[row])}. Completion: {_short(self.completions[row])}."


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


def _short(text: Any, limit: int = 200) -> str:
    shown = repr(text)
    return shown if len(shown) <= limit else f"{shown[:limit]}..."
