"""The training script: `trl-dro train --config X.yaml`, or `accelerate launch -m trl_dro.train --config X.yaml`."""

import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers.trainer_utils import IntervalStrategy, get_last_checkpoint
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from .config import DROConfig
from .config_rules import field_defaults, refusal
from .parsing import DROParser
from .policy_loss import nearest_first
from .tasks import TINY_MODELS


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from .trainer import DROTrainer


@dataclass
class DROScriptArguments(ScriptArguments):
    """
    Where prompts and rewards come from. Data are a `task` generated here, or a dataset as in TRL's scripts.

    Args:
        reward_funcs (`list[str]`, *optional*):
            Reward functions: names of TRL's or of `trl_dro.rewards`, or dotted paths. With a `task`, its verifier by
            default.
        reward_model_name_or_path (`str`, *optional*):
            A reward model, in addition.
        task (`str`, *optional*):
            A generator of reasoning-gym, such as `spell_backward`.
        task_kwargs (`dict` or `str`, *optional*):
            Settings of the generator.
        task_train_size, task_eval_size, task_seed (`int`):
            Number of training and held-out rows, and the seed they are drawn with.
        task_prompt_template (`str`, *optional*, defaults to `"{question}"`):
            Format string over the fields of an entry.
        tiny_prompt_template (`str`, *optional*):
            The same for a built-in tiny model, whose prompts must be short. Defaults to `task_prompt_template`.
        tiny_warmup_steps (`int`, *optional*, defaults to `400`):
            Supervised steps of a built-in tiny model before RL, on the training rows' answers with their characters
            shuffled.
        show_completions (`int`, *optional*, defaults to `0`):
            Number of held-out prompts whose completions are printed before and after training.
    """

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: TRL's names, reasoning_gym_{reward,solved,final_number}, or dotted paths."
        },
    )
    reward_model_name_or_path: str | None = field(default=None, metadata={"help": "A reward model, in addition."})
    task: str | None = field(default=None, metadata={"help": "Generator of reasoning-gym, such as `spell_backward`."})
    task_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Settings of the task's generator, as JSON on the command line."}
    )
    task_train_size: int = field(default=2000, metadata={"help": "Number of training rows to generate."})
    task_eval_size: int = field(default=0, metadata={"help": "Number of held-out rows to generate."})
    task_seed: int = field(default=0, metadata={"help": "Seed of the generated rows."})
    task_prompt_template: str = field(
        default="{question}", metadata={"help": "Format string over an entry's fields, such as `{metadata[word]}=`."}
    )
    tiny_prompt_template: str | None = field(
        default=None, metadata={"help": "The same for a built-in tiny model. Defaults to `task_prompt_template`."}
    )
    tiny_warmup_steps: int = field(
        default=400, metadata={"help": "Supervised steps of a built-in tiny model before RL."}
    )
    show_completions: int = field(
        default=0, metadata={"help": "Held-out prompts whose completions are printed before and after training."}
    )

    def __post_init__(self) -> None:
        for name, least in (
            ("task_train_size", 1),
            ("task_eval_size", 0),
            ("tiny_warmup_steps", 0),
            ("show_completions", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise refusal(name, value, f"it must be a whole number >= {least}", f"{name}={least}")


# Set by `trl-dro train` for the processes it launches.
EXPECTED_PROCESSES = "TRL_DRO_EXPECTED_PROCESSES"

# Turns the quickstart into a run of a pretrained chat model on the same task, on one GPU.
HUB_MODEL = (
    "--model_name_or_path Qwen/Qwen3-0.6B --use_cpu false --bf16 true --learning_rate 2e-6 --max_grad_norm 1.0 "
    "--per_device_train_batch_size 16 --gradient_accumulation_steps 16 --max_completion_length 32 "
    "--chat_template_kwargs '{\"enable_thinking\": false}' --output_dir runs/qwen3"
)

Arguments = tuple[DROScriptArguments, DROConfig, ModelConfig, DatasetMixtureConfig]


def make_parser(prog: str | None = None, config_class: type[DROConfig] = DROConfig) -> DROParser:
    """The parser of the training command."""
    parser = DROParser((DROScriptArguments, config_class, ModelConfig, DatasetMixtureConfig), prog=prog)
    # transformers declares a path, but `true` is no path, in a file as on the command line.
    parser._hints["resume_from_checkpoint"] = str | bool | None
    return parser


def parse(
    argv: Sequence[str] | None = None, prog: str | None = None, config_class: type[DROConfig] = DROConfig
) -> Arguments:
    """Parse and check a training configuration, without loading a model or a dataset.

    Args:
        argv: the command line, `sys.argv[1:]` if left out.
        prog: the command's name, for messages.
        config_class: `DROConfig`, or a subclass that stands for it.

    Raises:
        ValueError: the configuration is bad; the message says what to write instead.
        SystemExit: with code 2, the command line is bad.
    """
    parser = make_parser(prog, config_class)
    arguments: Arguments = parser.parse_args_and_config(None if argv is None else list(argv))  # type: ignore[assignment]
    _check_data(*arguments)
    return arguments


def _check_data(script: DROScriptArguments, config: DROConfig, model: ModelConfig, data: DatasetMixtureConfig) -> None:
    from .models import check_sync_with_adapter
    from .rewards import load_reward
    from .tasks import check_task

    sources = {"task": script.task, "dataset_name": script.dataset_name, "datasets": data.datasets}
    given = [name for name, value in sources.items() if value]
    if len(given) != 1:
        raise ValueError(
            f"Data come from exactly one of task, dataset_name and datasets; {' and '.join(given) or 'none'} "
            "is given. Write one, such as `task: spell_backward`."
        )
    if not model.model_name_or_path:
        raise ValueError("model_name_or_path is not set. Write a Hub id, a path, or `tiny-qwen3`.")
    if model.model_name_or_path in TINY_MODELS and not script.task:
        raise ValueError(
            f"model_name_or_path={model.model_name_or_path!r} is built for a task, but {given[0]} is given. Write "
            "`task: spell_backward`, or the name of another model."
        )
    if script.task:
        check_task(script.task, _task_kwargs(script), _prompt_template(script, model))
    elif not script.reward_funcs and not script.reward_model_name_or_path:
        raise ValueError("reward_funcs is not set. Write `reward_funcs: [accuracy_reward]`, or a dotted path.")
    for name in script.reward_funcs or []:
        load_reward(name)
    _refuse_idle(script, config, model)
    if script.task:
        _check_task_size(script, config)
    elif config.evaluates and data.datasets and data.test_split_size is None:
        allowed = "`datasets` are mixed into one training split, nothing is held out"
        name, value, _ = _asked_evaluation(config)
        raise refusal(name, value, allowed, "test_split_size=0.1")
    if script.dataset_streaming and not script.task and config.max_steps < 1:
        raise refusal("max_steps", config.max_steps, "of a stream nobody knows the length", "max_steps=1000")
    if config.anchor_policy == "sampling" and not config.use_vllm:
        allowed = "it needs an engine that reports log-probs, which is vLLM here"
        raise refusal("anchor_policy", "sampling", allowed, "use_vllm=True")
    if model.use_peft:
        check_sync_with_adapter(config)
    rewards = len(_reward_names(script)) + bool(script.reward_model_name_or_path)
    if config.reward_weights is not None and len(config.reward_weights) != rewards:
        raise ValueError(
            f"reward_weights={config.reward_weights!r} is refused: there are {rewards} rewards, each needs a weight. "
            f"Write `reward_weights={[1.0] * rewards}` instead."
        )


# Options that are read only with another one.
_OF_TASK = ("task_kwargs", "task_train_size", "task_eval_size", "task_seed", "task_prompt_template")
_OF_PEFT = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "lora_task_type",
    "use_rslora",
    "use_dora",
)


def _refuse_idle(script: DROScriptArguments, config: DROConfig, model: ModelConfig) -> None:
    """Refuse what nothing would read, and the switches of transformers' example scripts that this command lacks."""
    defaults = {**field_defaults(DROScriptArguments), **field_defaults(ModelConfig)}
    for names, owner, switched, switch in (
        (_OF_TASK, script, bool(script.task), "task='spell_backward'"),
        (_OF_PEFT, model, model.use_peft, "use_peft=True"),
    ):
        for name in names:
            if not switched and getattr(owner, name) != defaults[name]:
                allowed = f"without {switch.split('=')[0]} nothing reads it"
                raise refusal(name, getattr(owner, name), allowed, switch)
    if config.do_predict:
        raise refusal("do_predict", True, "this command trains and evaluates only", "do_predict=False")


def _check_task_size(script: DROScriptArguments, config: DROConfig) -> None:
    """Refuse a task of too few rows. Of a dataset this is known only once it is loaded; the trainer refuses it."""
    from .checks import check_datasets

    try:
        check_datasets(config, range(script.task_train_size), None, has_environment=False)
    except ValueError as error:
        raise ValueError(f"task_train_size={script.task_train_size} is refused: {error}") from error
    if script.task_eval_size:
        config.check_evaluation_batch()
    elif config.evaluates:
        allowed = "there are no held-out rows, task_eval_size is 0"
        name, value, _ = _asked_evaluation(config)
        raise refusal(name, value, allowed, "task_eval_size=64")


def _asked_evaluation(config: DROConfig) -> tuple[str, Any, str]:
    """The option that asks for an evaluation, its value, and how to write it off."""
    if config.eval_strategy != "no":
        return "eval_strategy", IntervalStrategy(config.eval_strategy).value, "eval_strategy='no'"
    name = "eval_on_start" if config.eval_on_start else "do_eval"
    return name, True, f"{name}=False"


def check_output_dir(config: DROConfig) -> None:
    """Refuse an output directory that cannot be written, and leave none behind that was not there.

    Not for a process of several: it would remove what the others are about to use.

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


def _task_kwargs(script: DROScriptArguments) -> dict[str, Any]:
    return script.task_kwargs or {}  # type: ignore[return-value]  # the parser has read JSON already


def _prompt_template(script: DROScriptArguments, model: ModelConfig) -> str:
    tiny = model.model_name_or_path in TINY_MODELS
    return (script.tiny_prompt_template if tiny else None) or script.task_prompt_template


def _reward_names(script: DROScriptArguments) -> list[str]:
    return script.reward_funcs or (["reasoning_gym_reward"] if script.task else [])


def run(script: DROScriptArguments, config: DROConfig, model_args: ModelConfig, data: DatasetMixtureConfig) -> int:
    """Build everything, train, evaluate before and after, save.

    Returns:
        An exit code: 1, with one line on stderr, for what is found wrong while everything is built. Later errors
        are raised, as it takes a traceback to see where they come from.
    """
    from .callbacks import SavedSoFarCallback

    try:
        checkpoint, trainer = _build(script, config, model_args, data)
    except (ValueError, ImportError, OSError) as error:
        _print_error(error)
        return 1
    saved = SavedSoFarCallback(checkpoint)
    trainer.add_callback(saved)
    try:
        # A resumed run has not loaded its weights yet.
        before = None if checkpoint else _evaluate(trainer, script.show_completions)
        trainer.train(resume_from_checkpoint=checkpoint)
        after = _evaluate(trainer, script.show_completions)
        if before is not None:
            # `train` starts a new history; the score to compare with belongs in it.
            trainer.state.log_history.insert(0, {**before[0], "step": 0})
        trainer.save_model(config.output_dir)
    except (Exception, KeyboardInterrupt) as error:
        if trainer.state.global_step:
            error.add_note(saved.describe(config, trainer.state.global_step))
        raise
    trainer.save_state()
    if config.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    if trainer.accelerator.is_main_process:
        if before is not None and after is not None:
            _say_what_happened(before, after)
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
    from .rewards import load_reward
    from .trainer import DROTrainer

    check_args(config, has_rollout_func=False)
    _check_machine(config)
    checkpoint = _checkpoint_to_resume(config)
    # transformers warns of names that TRL uses at every generation; nobody here can act on it.
    warnings.filterwarnings("ignore", message=r"`\w*gradient_checkpointing\w*` is deprecated", category=FutureWarning)
    if config.disable_tqdm:
        disable_progress_bar()
    _load_model_as_asked(config, model_args)
    train_dataset, eval_dataset, processing_class, model = _prepare(script, config, model_args, data)
    reward_funcs: list[Any] = [load_reward(name) for name in _reward_names(script)]
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
    use_compact_progress(trainer)
    return checkpoint, trainer


def _checkpoint_to_resume(config: DROConfig) -> str | None:
    """The directory that `resume_from_checkpoint` means: a path, or the newest one in `output_dir` for `true`."""
    asked = config.resume_from_checkpoint
    if asked is None or str(asked).lower() == "false":
        return None
    if str(asked).lower() == "true":
        newest = get_last_checkpoint(config.output_dir)
        if newest is None:
            allowed = f"there is no checkpoint in output_dir={config.output_dir!r}"
            raise refusal("resume_from_checkpoint", asked, allowed, "resume_from_checkpoint=None")
        return newest
    if not os.path.isdir(asked):
        allowed = "there is no such directory"
        raise refusal("resume_from_checkpoint", asked, allowed, "resume_from_checkpoint='true'")
    return asked


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
    script: DROScriptArguments, config: DROConfig, model_args: ModelConfig, data: DatasetMixtureConfig
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
        off = _asked_evaluation(config)[2]
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
        prompt_template=_prompt_template(script, model_args),
        task_kwargs=_task_kwargs(script),
        conversational=getattr(processor, "chat_template", None) is not None,
    )
    eval_dataset = held_out if script.task_eval_size else None
    if not tiny:
        return train_dataset, eval_dataset, processor, name
    path = _tiny_model(name, train_dataset, held_out, script.tiny_warmup_steps, config)
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


def _tiny_model(name: str, train_dataset: "Dataset", held_out: "Dataset", warmup_steps: int, config: DROConfig) -> str:
    """Where the built-in model was saved, made for these rows and warmed up on the training rows.

    From there every process loads it, and the reference model too if there is one.
    """
    from .tasks import build_tiny_model, entry_from_json, warm_up

    torch.set_num_threads(1)  # on a model this small, threads cost more than they bring
    path = str(Path(str(config.output_dir)) / name)
    processes = PartialState()
    if processes.is_main_process:
        answers = [entry_from_json(entry)["answer"] for entry in train_dataset["entry"]]
        held_out_prompts = held_out["prompt"] if len(held_out) else []
        texts = [*train_dataset["prompt"], *held_out_prompts, *answers]
        print(f"Building {name}, with {warmup_steps} supervised steps of warm-up.", flush=True)
        model, tokenizer = build_tiny_model(name, texts, seed=config.seed)
        warm_up(model, tokenizer, train_dataset["prompt"], answers, steps=warmup_steps, seed=config.seed)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    processes.wait_for_everyone()
    return path


def _evaluate(trainer: "DROTrainer", show: int) -> tuple[dict[str, float], dict[str, str]] | None:
    """Metrics on the held-out rows, and the completions of `show` of their prompts; None without held-out rows."""
    if trainer.eval_dataset is None:
        return None
    metrics = trainer.evaluate()
    shown: dict[str, str] = {}
    for prompt, completion in reversed(trainer.last_completions()):
        if len(shown) < show:
            shown.setdefault(_text(prompt), _text(completion))
    return metrics, shown


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


def parse_loudly(argv: Sequence[str] | None = None, **kwargs: Any) -> Arguments:
    """`parse`, with the warnings about the configuration as plain lines instead of source locations."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = parse(argv, **kwargs)
    for warning in caught:
        if issubclass(warning.category, (UserWarning, FutureWarning)) and arguments[1].process_index == 0:
            print(f"warning: {warning.message}", file=sys.stderr)
    return arguments


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
