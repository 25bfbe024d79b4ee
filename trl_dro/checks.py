"""Arguments and data that cannot be right are refused where they come in, with the row they are in."""

import os
import tempfile
import warnings
from collections.abc import Iterator, Sized
from typing import Any, cast

from datasets import Dataset, IterableDataset
from datasets.features.features import require_decoding
from transformers.integrations import get_available_reporting_integrations

from .config import DROConfig
from .config_rules import MISSING_BETA, refusal, short
from .off_policy_rules import correcting_field


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

# Trackers that transformers leaves out of its list of those installed, always or sometimes.
_UNLISTED_TRACKERS = ("azure_ml", "flyte")

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
        if args.build_rollout_correction() is not None:
            name = correcting_field(args)
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
            f"{name}={short(given)} is refused: eval_dataset must be a Dataset, an IterableDataset, or a dict of "
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


def has_prompts_at_hand(dataset: Any) -> bool:
    """Whether prompts can be read off: not those of a stream, nor ones that are made or decoded when asked for."""
    if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
        return False
    return dataset.format["type"] != "custom" and not require_decoding(dataset.features["prompt"])


def _prompts(dataset: Any) -> Iterator[Any]:
    """The prompts of a dataset at hand. Others are checked batch by batch."""
    if has_prompts_at_hand(dataset):
        for table in dataset.select_columns("prompt").with_format("arrow").iter(1000):
            yield from table["prompt"].to_pylist()


def check_prompt(where: str, prompt: Any, *, has_rollout_func: bool) -> None:
    """Refuse what is no prompt, and what TRL would quietly turn into another one.

    Raises:
        ValueError: the prompt is neither text nor a conversation, or it ends in an assistant message.
    """
    if not isinstance(prompt, (str, list, tuple)) or (not isinstance(prompt, str) and len(prompt) == 0):
        raise ValueError(
            f"{where} has the prompt {short(prompt)}: it must be text or a list of messages. Write "
            "`dataset.filter(lambda row: row['prompt'])` to leave out empty ones."
        )
    last = prompt[-1] if prompt else None
    # A rollout function renders its prompts itself.
    if isinstance(last, dict) and last.get("role") == "assistant" and not has_rollout_func:
        raise ValueError(
            f"{where} has a prompt that ends in an assistant message, but {_PREFILL}, or end in a user message. "
            f"Prompt: {short(prompt)}."
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
                    f"a row of the dataset has {column}={short(row[column])}, a column for images, but "
                    "processing_class is a tokenizer: the model would not see them. Pass a processor, or write "
                    f"`dataset.rename_column({column!r}, 'my_{column}')`."
                )
    if image_columns and all(_is_missing(row[column]) for row in rows for column in image_columns):
        rows = [{**row, "images": []} for row in rows]
    return rows


def _is_missing(image: Any) -> bool:
    return image is None or (isinstance(image, (list, tuple)) and len(image) == 0)
