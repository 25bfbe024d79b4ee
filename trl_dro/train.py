"""The training script: `trl-dro train --config X.yaml`, or `accelerate launch -m trl_dro.train --config X.yaml`."""

import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from trl import DatasetMixtureConfig, ModelConfig

from .config import DROConfig
from .config_rules import refusal
from .policy_loss import nearest_first
from .steering import temporarily
from .tasks import TINY_MODELS
from .train_arguments import (
    DROScriptArguments,
    asked_evaluation,
    parse_loudly,
    prompt_template,
    reward_names,
    task_kwargs,
)


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from .trainer import DROTrainer


# Set by `trl-dro train` for the processes it launches.
EXPECTED_PROCESSES = "TRL_DRO_EXPECTED_PROCESSES"

# Turns the quickstart into a run of a pretrained chat model on the same task, on one GPU.
HUB_MODEL = (
    "--model_name_or_path Qwen/Qwen3-0.6B --use_cpu false --bf16 true --learning_rate 2e-6 --max_grad_norm 1.0 "
    "--per_device_train_batch_size 16 --gradient_accumulation_steps 16 --max_completion_length 32 "
    "--chat_template_kwargs '{\"enable_thinking\": false}' --output_dir runs/qwen3"
)


def check_output_dir(config: DROConfig) -> None:
    """Refuse an output directory that cannot be written, and leave none behind that was not there.

    Not where it is about to be used: of several launchers, one would remove what another has just made.

    Raises:
        ValueError: the directory cannot be written.
    """
    from .checks import check_args

    folder = Path(str(config.output_dir))
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        check_args(config, has_rollout_func=False)
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def run(script: DROScriptArguments, config: DROConfig, model_args: ModelConfig, data: DatasetMixtureConfig) -> int:
    """Build everything, train, evaluate before and after, save.

    Returns:
        An exit code: 1, with one line on stderr, for what is found wrong while everything is built. Later errors
        are raised, as it takes a traceback to see where they come from.
    """
    from .callbacks import FirstEvaluationCallback, SavedSoFarCallback

    try:
        checkpoint, trainer = _build(script, config, model_args, data)
    except (ValueError, ImportError, OSError) as error:
        _print_error(error)
        return 1
    saved = SavedSoFarCallback(checkpoint)
    before = FirstEvaluationCallback(lambda: _completions(trainer, script.show_completions))
    for callback in (saved, before):
        trainer.add_callback(callback)
    try:
        # Inside of `train`, because FSDP2 shards a model only together with its optimizer.
        with temporarily(config, eval_on_start=trainer.eval_dataset is not None):
            trainer.train(resume_from_checkpoint=checkpoint)
        after = None if trainer.eval_dataset is None else trainer.evaluate()
        with temporarily(config, push_to_hub=False):  # once, when all of it is there
            trainer.save_model(config.output_dir)
    except (Exception, KeyboardInterrupt) as error:
        if trainer.state.global_step:
            error.add_note(saved.describe(config, trainer.state.global_step))
        raise
    trainer.save_state()
    if config.push_to_hub:
        of_hub = script.dataset_name and not os.path.exists(script.dataset_name)
        trainer.push_to_hub(dataset_name=script.dataset_name if of_hub else None)
    if trainer.accelerator.is_main_process:
        if before.metrics is not None and after is not None:
            shown_after = _completions(trainer, script.show_completions)
            _say_what_happened((before.metrics, before.completions), (after, shown_after))
        _say_what_next(config, model_args)
    trainer.end()
    return 0


def _print_error(error: Exception) -> None:
    """The message alone, and for one from outside this package where it comes from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(frame.filename).parent == Path(__file__).parent
    where = "" if ours else f" ({type(error).__name__} in {frame.filename}, line {frame.lineno})"
    print(f"trl-dro train: error: {error}{where}", file=sys.stderr)


def _build(
    script: DROScriptArguments, config: DROConfig, model_args: ModelConfig, data: DatasetMixtureConfig
) -> tuple[str | None, "DROTrainer"]:
    """The checkpoint to resume from, and the trainer. What can be refused is refused before anything is loaded."""
    from transformers.utils.logging import disable_progress_bar
    from trl import get_peft_config, get_quantization_config

    from .callbacks import use_compact_progress
    from .checks import check_args
    from .model_card import recipe_as_yaml
    from .resuming import checkpoint_to_resume
    from .rewards import load_reward
    from .trainer import DROTrainer

    check_args(config, has_rollout_func=False)
    _check_machine(config)
    checkpoint = checkpoint_to_resume(config.output_dir, config.resume_from_checkpoint)
    # transformers warns of names that TRL uses at every generation; nobody here can act on it.
    warnings.filterwarnings("ignore", message=r"`\w*gradient_checkpointing\w*` is deprecated", category=FutureWarning)
    if config.disable_tqdm:
        disable_progress_bar()
    recipe = recipe_as_yaml(model_args, script, data, config)
    _load_model_as_asked(config, model_args)
    train_dataset, eval_dataset, processing_class, model = _prepare(script, config, model_args, data, checkpoint)
    reward_funcs: list[Any] = [load_reward(name) for name in reward_names(script)]
    if script.reward_model_name_or_path:
        reward_funcs.append(script.reward_model_name_or_path)
    trainer = DROTrainer(
        model=model,
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=processing_class,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.recipe = recipe
    use_compact_progress(trainer)
    if checkpoint is not None:
        trainer.check_resumable(checkpoint)
        if trainer.accelerator.is_main_process:
            print(f"Resuming from {checkpoint}.", flush=True)
    return checkpoint, trainer


def _check_machine(config: DROConfig) -> None:
    """Refuse what this machine or this launch cannot do, before anything is loaded."""
    if config.use_vllm and importlib.util.find_spec("vllm") is None:
        raise refusal("use_vllm", True, "vllm is not installed here", "use_vllm=False")
    planned = int(os.environ.get(EXPECTED_PROCESSES) or config.world_size)
    if planned != config.world_size:
        raise ValueError(
            f"num_processes={planned} were asked for, {config.world_size} came up. Without a GPU `accelerate launch "
            "--num_processes` starts one process only. Write `--accelerate_config cpu_ddp` instead."
        )


def _load_model_as_asked(config: DROConfig, model_args: ModelConfig) -> None:
    """Model options of the command go where the trainer reads them; `model_init_kwargs` wins."""
    asked = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    config.model_init_kwargs = {
        **{name: value for name, value in asked.items() if value is not None},
        **(config.model_init_kwargs or {}),  # type: ignore[dict-item]
    }


def _prepare(
    script: DROScriptArguments,
    config: DROConfig,
    model_args: ModelConfig,
    data: DatasetMixtureConfig,
    checkpoint: str | None,
) -> tuple["Dataset", "Dataset | None", "PreTrainedTokenizerBase | ProcessorMixin | None", str]:
    """Training and held-out rows, the tokenizer, and the model's name or path."""
    from datasets import load_dataset
    from transformers import AutoProcessor, AutoTokenizer
    from trl import get_dataset

    from .tasks import build_task

    name = str(model_args.model_name_or_path)
    if not script.task:
        if data.datasets:
            dataset = get_dataset(data)
        else:
            dataset = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
        off = asked_evaluation(config)[2]
        held_out = _split(dataset, "dataset_test_split", script, off) if config.evaluates else None
        return _split(dataset, "dataset_train_split", script, off), held_out, None, name

    tiny = name in TINY_MODELS
    processor = None
    if not tiny:
        processor = AutoProcessor.from_pretrained(
            name,
            revision=model_args.model_revision,
            padding_side="left",
            truncation_side="left",
            trust_remote_code=config.trust_remote_code,
        )
    train_dataset, held_out = build_task(
        script.task,
        train_size=script.task_train_size,
        eval_size=script.task_eval_size,
        seed=script.task_seed,
        prompt_template=prompt_template(script, model_args),
        task_kwargs=task_kwargs(script),
        conversational=getattr(processor, "chat_template", None) is not None,
    )
    eval_dataset = held_out if script.task_eval_size else None
    if not tiny:
        return train_dataset, eval_dataset, processor, name
    torch.set_num_threads(1)  # on a model this small, threads cost more than they bring
    path = str(Path(str(config.output_dir)) / name)
    processes = PartialState()
    # A resumed run takes its weights from the checkpoint.
    if processes.is_main_process and (checkpoint is None or not Path(path, "config.json").exists()):
        _build_tiny_model(path, train_dataset, held_out, script.tiny_warmup_steps, config.seed)
    processes.wait_for_everyone()
    return train_dataset, eval_dataset, AutoTokenizer.from_pretrained(path), path


def _split(dataset: Any, field: str, script: DROScriptArguments, off: str) -> Any:
    """A split by the name that a field gives; `off` is what to write if there is none to evaluate on."""
    name = getattr(script, field)
    if name not in dataset:
        nearest = nearest_first(name, list(dataset))
        others = [split for split in nearest if field != "dataset_test_split" or split != script.dataset_train_split]
        instead = f"{field}={others[0]!r}" if others else off
        raise refusal(field, name, f"the dataset has the splits {', '.join(nearest)}", instead)
    return dataset[name]


def _build_tiny_model(path: str, train_dataset: "Dataset", held_out: "Dataset", warmup_steps: int, seed: int) -> None:
    """Save the built-in model of that name, made for these rows and warmed up on the training rows.

    From there every process loads it, and the reference model too if there is one.
    """
    from .tasks import build_tiny_model, entry_from_json, warm_up

    name = Path(path).name
    answers = [entry_from_json(entry)["answer"] for entry in train_dataset["entry"]]
    held_out_prompts = held_out["prompt"] if len(held_out) else []
    texts = [*train_dataset["prompt"], *held_out_prompts, *answers]
    print(f"Building {name}, with {warmup_steps} supervised steps of warm-up.", flush=True)
    model, tokenizer = build_tiny_model(name, texts, seed=seed)
    warm_up(model, tokenizer, train_dataset["prompt"], answers, steps=warmup_steps, seed=seed)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _completions(trainer: "DROTrainer", count: int) -> dict[str, str]:
    """The latest completions, one of each of `count` prompts."""
    shown: dict[str, str] = {}
    for prompt, completion in reversed(trainer.last_completions()):
        if len(shown) < count:
            shown.setdefault(_text(prompt), _text(completion))
    return shown


def _text(message: Any) -> str:
    return message if isinstance(message, str) else str(message[-1]["content"])


def _say_what_happened(before: Any, after: Any) -> None:
    """Completions side by side, and the held-out rewards before and after."""
    from .callbacks import evaluated_rewards, format_reward

    (metrics_before, shown), (metrics_after, shown_after) = before, after
    if shown:
        table = Table("prompt", "before", "after", title="Held-out completions", title_justify="left")
        for prompt, completion in shown.items():
            table.add_row(escape(prompt), escape(completion), escape(shown_after.get(prompt, "")))
        Console().print(table)
    functions_after = evaluated_rewards(metrics_after)
    rewards = [(name, value, functions_after[name]) for name, value in evaluated_rewards(metrics_before).items()]
    for name, *values in (*rewards, ("reward", metrics_before["eval_reward"], metrics_after["eval_reward"])):
        reward_before, reward_after = map(format_reward, values)
        print(f"held-out {name}: {reward_before} before, {reward_after} after")


def _say_what_next(config: DROConfig, model_args: ModelConfig) -> None:
    loader = "AutoPeftModelForCausalLM" if model_args.use_peft else "AutoModelForCausalLM"
    print(f"\nSaved in {config.output_dir}. What to do next:")
    print(f"  load it          {loader}.from_pretrained({config.output_dir!r})")
    if model_args.model_name_or_path in TINY_MODELS:
        print(f"  a Hub model      on a GPU, the same command with {HUB_MODEL}")
    if config.dro_beta is not None:
        print(
            f"  another beta     the same command with --dro_beta {config.dro_beta * 4:g}, or {config.dro_beta / 4:g}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m trl_dro.train`. Returns the exit code: 1 for a bad configuration."""
    try:
        arguments = parse_loudly(argv)
    except (ValueError, ImportError) as error:
        print(f"trl-dro train: error: {error}", file=sys.stderr)
        return 1
    return run(*arguments)


if __name__ == "__main__":
    sys.exit(main())
