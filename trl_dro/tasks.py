"""Tasks that need no download: procedural datasets with verifiers, and a tiny model to train on them.

The tasks are reasoning-gym's generators. Imports of heavy packages are inside functions, so that the names here cost
nothing to look at.
"""

import difflib
import json
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


TINY_MODELS: dict[str, dict[str, Any]] = {
    "tiny-qwen3": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.08,
        # Prompts and answers are a dozen characters: angles must tell neighbours apart, not far places.
        "rope_parameters": {"rope_type": "default", "rope_theta": 20.0},
    }
}
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}

# Generators repeat themselves. Give up once this many entries per wanted row have been drawn.
_DRAWS_PER_ROW = 50


def task_names() -> list[str]:
    """Names of the available tasks, sorted.

    Raises:
        ImportError: If reasoning-gym is not installed.
    """
    return sorted(_registry())


def build_task(
    task: str,
    *,
    train_size: int,
    eval_size: int = 0,
    seed: int = 0,
    prompt_template: str = "{question}",
    task_kwargs: dict[str, Any] | None = None,
    conversational: bool = False,
) -> tuple["Dataset", "Dataset"]:
    """Generate the training and held-out rows of a task. No prompt occurs twice, in either set or across them.

    Args:
        task: Name of a reasoning-gym generator, such as `spell_backward`.
        train_size: Number of training rows.
        eval_size: Number of held-out rows. They depend on the seed, not on `train_size`.
        seed: Seed of the generator.
        prompt_template: Format string over the fields of the generated entry, such as `"{metadata[word]}="`.
        task_kwargs: Settings of the generator, such as `{"max_word_len": 4}`.
        conversational: Whether prompts are lists of chat messages instead of strings.

    Returns:
        The training and the held-out dataset, with columns `prompt`, `entry` (JSON of the whole entry, which the
        verifier reads) and `task`.

    Raises:
        ValueError: For an unknown task, bad generator settings, a template that does not fit the entry, or fewer
            distinct prompts than rows asked for.
        ImportError: If reasoning-gym is not installed.
    """
    from datasets import Dataset

    for name, size, least in (("task_train_size", train_size, 1), ("task_eval_size", eval_size, 0)):
        if size < least:
            raise ValueError(f"{name}={size}: must be at least {least}.")
    wanted = train_size + eval_size
    rows: dict[str, dict[str, Any]] = {}
    for entry in _generate(task, seed, wanted * _DRAWS_PER_ROW, task_kwargs or {}):
        text = _format_prompt(prompt_template, entry)
        if text not in rows:
            prompt = [{"role": "user", "content": text}] if conversational else text
            rows[text] = {"prompt": prompt, "entry": entry_to_json(entry), "task": task}
        if len(rows) == wanted:
            break
    else:
        raise ValueError(
            f"task_train_size={train_size} and task_eval_size={eval_size} need {wanted} distinct prompts, but "
            f"{wanted * _DRAWS_PER_ROW} draws from task {task!r} gave only {len(rows)}: lower the sizes, or widen the "
            f"task with task_kwargs (now {task_kwargs or {}})."
        )
    ordered = list(rows.values())
    return Dataset.from_list(ordered[eval_size:]), Dataset.from_list(ordered[:eval_size])


def check_task(task: str, task_kwargs: dict[str, Any] | None = None, prompt_template: str = "{question}") -> None:
    """Generate and format one entry, to find bad settings early.

    Raises:
        ValueError: As `build_task` does.
        ImportError: If reasoning-gym is not installed.
    """
    for entry in _generate(task, 0, 1, task_kwargs or {}):
        _format_prompt(prompt_template, entry)


def entry_to_json(entry: dict[str, Any]) -> str:
    """JSON of an entry. Tuples are marked, because some verifiers compare them."""

    def mark(value: Any) -> Any:
        if isinstance(value, tuple):
            return {"__tuple__": [mark(item) for item in value]}
        if isinstance(value, list):
            return [mark(item) for item in value]
        if isinstance(value, dict):
            return {key: mark(item) for key, item in value.items()}
        return value

    return json.dumps(mark(entry))


def entry_from_json(text: str) -> dict[str, Any]:
    """The entry that `entry_to_json` wrote."""
    return json.loads(text, object_hook=lambda item: tuple(item["__tuple__"]) if "__tuple__" in item else item)


def _registry() -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("Tasks need reasoning-gym: `pip install trl-dro[tasks]`.") from error
    import reasoning_gym  # noqa: F401 (fills the registry)

    return DATASETS


def _generate(task: str, seed: int, size: int, task_kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Entries of one generator, with its complaints turned into ValueErrors that name the setting."""
    registry = _registry()
    if task not in registry:
        near = difflib.get_close_matches(task, registry, n=5, cutoff=0.3)
        raise ValueError(
            f"task={task!r} is unknown. Nearest: {', '.join(near) or 'none'}. All: {', '.join(sorted(registry))}."
        )
    for name, instead in (("seed", "task_seed"), ("size", "task_train_size and task_eval_size")):
        if name in task_kwargs:
            raise ValueError(f"task_kwargs={task_kwargs}: `{name}` is set by {instead}, remove it here.")
    dataset_cls, config_cls = registry[task]
    fields = sorted(set(config_cls.__dataclass_fields__) - {"seed", "size"})
    for name in task_kwargs:
        if name not in fields:
            raise ValueError(
                f"task_kwargs={task_kwargs}: task {task!r} has no setting {name!r}. It has: {', '.join(fields)}."
            )
    try:
        dataset = dataset_cls(config=config_cls(seed=seed, size=size, **task_kwargs))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task_kwargs={task_kwargs}: task {task!r} refuses these settings: {error}") from error
    return (dataset[index] for index in range(size))


def _format_prompt(template: str, entry: dict[str, Any]) -> str:
    try:
        return template.format_map(entry)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        fields = [name for name in entry if name != "metadata"]
        fields += [f"metadata[{name}]" for name in entry.get("metadata", {})]
        raise ValueError(
            f"task_prompt_template={template!r} does not fit this task ({type(error).__name__}: {error}). Fields: "
            f"{', '.join(fields)}; write literal braces twice."
        ) from error


def build_tiny_model(
    name: str, texts: Sequence[str], seed: int = 0
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """A decoder of a real architecture with random weights, small enough to train on a CPU in seconds.

    Args:
        name: One of `TINY_MODELS`.
        texts: Texts whose characters, one token each, become the vocabulary.
        seed: Seed of the weights.

    Returns:
        The model and its character-level tokenizer. Both can be saved and loaded with `from_pretrained`.

    Raises:
        ValueError: For an unknown name.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    if name not in TINY_MODELS:
        raise ValueError(f"Built-in model {name!r} is unknown: expected one of {', '.join(TINY_MODELS)}.")
    characters = sorted({character for text in texts for character in text})
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS.values(), *characters])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL_TOKENS["unk_token"]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )
    config = Qwen3Config(
        **TINY_MODELS[name],
        vocab_size=len(vocab),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    return model, tokenizer


def warm_up(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    answers: Sequence[str],
    *,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 5e-3,
    seed: int = 0,
) -> float:
    """Teach a tiny model which characters an answer is made of and where it ends, not their order.

    RL needs some rewarded samples to start from: the supervised targets are the answers with their characters
    shuffled, anew at each use. A plain loop, not `SFTTrainer`: every process of a launch must do the same steps to its
    own copy, on the CPU, before DDP, FSDP or DeepSpeed gets to see the model.

    Args:
        model: The model, changed in place.
        tokenizer: Its tokenizer.
        prompts, answers: One of each for every row.
        steps: Number of optimizer steps.
        batch_size: Rows in each step.
        learning_rate: Learning rate of AdamW.
        seed: Seed of the order of rows and characters.

    Returns:
        The last step's loss, NaN for 0 steps.
    """
    import torch

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    model.train()
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        rows = [rng.randrange(len(prompts)) for _ in range(batch_size)]
        targets = ["".join(rng.sample(answers[row], len(answers[row]))) + str(tokenizer.eos_token) for row in rows]
        texts = [prompts[row] + target for row, target in zip(rows, targets, strict=True)]
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        for label, target in zip(labels, targets, strict=True):
            label[: -len(tokenizer(target)["input_ids"])] = -100
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
