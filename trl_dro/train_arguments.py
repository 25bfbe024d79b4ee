"""The options of the training command, parsed and checked before a model or a dataset is loaded."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.trainer_utils import IntervalStrategy
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from .config import DROConfig
from .config_rules import field_defaults, refusal
from .parsing import DROParser
from .tasks import TINY_MODELS


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


Arguments = tuple[DROScriptArguments, DROConfig, ModelConfig, DatasetMixtureConfig]


def make_parser(prog: str | None = None, config_class: type[DROConfig] = DROConfig) -> DROParser:
    """The parser of the training command."""
    parser = DROParser((DROScriptArguments, config_class, ModelConfig, DatasetMixtureConfig), prog=prog)
    # transformers declares a path, but `true` is no path, in a file as on the command line.
    parser._hints["resume_from_checkpoint"] = str | bool | None
    for action in parser._actions:
        if action.dest == "resume_from_checkpoint":
            action.help = "A checkpoint; `true` for the newest whole one in output_dir; `auto` for it if there is one."
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
        check_task(script.task, task_kwargs(script), prompt_template(script, model))
    elif not script.reward_funcs and not script.reward_model_name_or_path:
        raise ValueError("reward_funcs is not set. Write `reward_funcs: [accuracy_reward]`, or a dotted path.")
    for name in script.reward_funcs or []:
        load_reward(name)
    _refuse_idle(script, config, model)
    if script.task:
        _check_task_size(script, config)
    elif config.evaluates and data.datasets and data.test_split_size is None:
        allowed = "`datasets` are mixed into one training split, nothing is held out"
        name, value, _ = asked_evaluation(config)
        raise refusal(name, value, allowed, "test_split_size=0.1")
    if script.dataset_streaming and not script.task and config.max_steps < 1:
        raise refusal("max_steps", config.max_steps, "of a stream nobody knows the length", "max_steps=1000")
    if config.anchor_policy == "sampling" and not config.use_vllm:
        allowed = "it needs an engine that reports log-probs, which is vLLM here"
        raise refusal("anchor_policy", "sampling", allowed, "use_vllm=True")
    if model.use_peft:
        check_sync_with_adapter(config)
    rewards = len(reward_names(script)) + bool(script.reward_model_name_or_path)
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
        name, value, _ = asked_evaluation(config)
        raise refusal(name, value, allowed, "task_eval_size=64")


def asked_evaluation(config: DROConfig) -> tuple[str, Any, str]:
    """The option that asks for an evaluation, its value, and how to write it off."""
    if config.eval_strategy != "no":
        return "eval_strategy", IntervalStrategy(config.eval_strategy).value, "eval_strategy='no'"
    name = "eval_on_start" if config.eval_on_start else "do_eval"
    return name, True, f"{name}=False"


def task_kwargs(script: DROScriptArguments) -> dict[str, Any]:
    return script.task_kwargs or {}  # type: ignore[return-value]  # the parser has read JSON already


def prompt_template(script: DROScriptArguments, model: ModelConfig) -> str:
    tiny = model.model_name_or_path in TINY_MODELS
    return (script.tiny_prompt_template if tiny else None) or script.task_prompt_template


def reward_names(script: DROScriptArguments) -> list[str]:
    return script.reward_funcs or (["reasoning_gym_reward"] if script.task else [])


def parse_loudly(argv: Sequence[str] | None = None, **kwargs: Any) -> Arguments:
    """`parse`, with the warnings about the configuration as plain lines instead of source locations."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = parse(argv, **kwargs)
    for warning in caught:
        if issubclass(warning.category, (UserWarning, FutureWarning)) and arguments[1].process_index == 0:
            print(f"warning: {warning.message}", file=sys.stderr)
    return arguments
