"""The rules that `DROConfig` checks field by field, and how its refusals are worded."""

import difflib
import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from numbers import Integral, Real
from typing import Any

from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import trainer_log_levels

from .advantages import BASELINES
from .aggregation import LOSS_AGG_MODES
from .masking import LARGEST
from .policy_loss import nearest_first
from .rollout_correction import LEVELS


ANCHOR_POLICIES = ("old", "sampling", "reference")
DRO_LEVELS = ("token", "sequence")


def short(value: Any, limit: int = 200) -> str:
    """How a value is shown in a message."""
    shown = repr(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}..."


def refusal(field: str, value: Any, allowed: str, instead: str) -> ValueError:
    """The error for a bad setting: what was given, what is allowed, and the line to write instead."""
    return ValueError(f"{field}={value!r} is refused: {allowed}. Write `{instead}` instead.")


def is_number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


class Number:
    """A numeric range, with its wording and an example; optional ones also take None."""

    def __init__(
        self, allowed: str, test: Callable[[Any], bool], example: float | None, *, whole: bool, optional: bool = False
    ):
        self.allowed = allowed + (" or None" if optional else "")
        self.test, self.example, self.whole, self.optional = test, example, whole, optional

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.optional
        return (_is_whole(value) if self.whole else is_number(value)) and self.test(value)


def _whole(minimum: int, example: int | None, *, optional: bool = False) -> Number:
    return Number(f"a whole number >= {minimum}", lambda v: v >= minimum, example, whole=True, optional=optional)


def _seed(example: int | None, *, optional: bool = False) -> Number:
    allowed = "a whole number from 0 to 2**32 - 1"
    return Number(allowed, lambda v: 0 <= v < 2**32, example, whole=True, optional=optional)


def _decay(example: float) -> Number:
    return Number("a number in [0, 1)", lambda v: 0 <= v < 1, example, whole=False)


def _above(bound: float, example: float, *, optional: bool = False) -> Number:
    return Number(f"a finite number > {bound:g}", lambda v: v > bound, example, whole=False, optional=optional)


def _at_least(bound: float, example: float | None, *, optional: bool = False) -> Number:
    return Number(f"a finite number >= {bound:g}", lambda v: v >= bound, example, whole=False, optional=optional)


def _within(low: float, high: float, example: float, *, open_low: bool = False, optional: bool = False) -> Number:
    return Number(
        f"a number in {'(' if open_low else '['}{low:g}, {high:g}]",
        lambda v: (low < v if open_low else low <= v) and v <= high,
        example,
        whole=False,
        optional=optional,
    )


NUMBERS: dict[str, Number] = {
    "per_device_train_batch_size": _whole(1, 8),
    "per_device_eval_batch_size": _whole(1, 8),
    "gradient_accumulation_steps": _whole(1, 1),
    "steps_per_generation": _whole(1, 4, optional=True),
    "generation_batch_size": _whole(1, 32, optional=True),
    "num_generations": _whole(2, 8),
    "num_generations_eval": _whole(1, 1, optional=True),
    "num_iterations": _whole(1, 1),
    "max_completion_length": _whole(1, 256, optional=True),
    "max_tool_calling_iterations": _whole(0, 4, optional=True),
    "num_completions_to_print": _whole(1, 4, optional=True),
    "max_steps": Number("-1 or a whole number >= 1", lambda v: v == -1 or v >= 1, 1000, whole=True),
    "num_train_epochs": _above(0, 3.0),
    "seed": _seed(42),
    "data_seed": _seed(None, optional=True),
    "learning_rate": _at_least(0, 1e-6),
    "warmup_steps": _at_least(0, 0),
    "weight_decay": _at_least(0, 0.0),
    "adam_beta1": _decay(0.9),
    "adam_beta2": _decay(0.999),
    "adam_epsilon": _above(0, 1e-8),
    "neftune_noise_alpha": _at_least(0, None, optional=True),
    "dataloader_num_workers": _whole(0, 0),
    "dataloader_prefetch_factor": _whole(1, 2, optional=True),
    "eval_delay": _at_least(0, 0),
    "max_grad_norm": _at_least(0, 1.0),
    "temperature": _above(0, 1.0),
    "top_p": _within(0, 1, 1.0, open_low=True),
    "top_k": _whole(0, 0),
    "min_p": _within(0, 1, 0.1, optional=True),
    "repetition_penalty": _above(0, 1.0),
    "beta": _at_least(0, 0.0),
    "loss_scale_factor": _above(0, 256, optional=True),
    "dro_target_kl": _above(0, 0.01, optional=True),
    "dro_huber_delta": _above(0, 2.0, optional=True),
    "rollout_is_threshold": _above(0, 2.0),
    "rollout_is_threshold_lower": _above(0, 0.5, optional=True),
    "advantage_baseline_temperature": _above(0, 0.1, optional=True),
    "reward_timeout": _above(0, 60.0, optional=True),
    "ref_model_mixup_alpha": _within(0, 1, 0.6),
    "ref_model_sync_steps": _whole(1, 512),
    "router_aux_loss_coef": _at_least(0, 0.001, optional=True),
    "top_entropy_quantile": _within(0, 1, 0.2),
    "entropy_coef": _at_least(0, 0.0),
    "entropy_coef_min": _at_least(0, 0.0),
    "entropy_coef_max": _at_least(0, 1.0),
    "entropy_coef_delta": _at_least(0, 0.005),
    "entropy_target": _at_least(0, 0.2),
    "off_policy_mask_threshold": _above(0, 0.5, optional=True),
    "vllm_importance_sampling_clip_max": _above(0, 3.0, optional=True),
    "vllm_importance_sampling_clip_min": _at_least(0, 0.5, optional=True),
    "vllm_gpu_memory_utilization": _within(0, 1, 0.3, open_low=True),
    "vllm_tensor_parallel_size": _whole(1, 1),
    "vllm_max_model_length": _whole(1, 2048, optional=True),
    "vllm_server_timeout": _above(0, 240.0),
}

CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_agg_mode": LOSS_AGG_MODES,
    "anchor_policy": ANCHOR_POLICIES,
    "dro_level": DRO_LEVELS,
    "rollout_is": (*LEVELS, None),
    "advantage_baseline": BASELINES,
    "scale_rewards": ("none", "group", "batch", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "cache_implementation": (*ALL_CACHE_IMPLEMENTATIONS, "paged", None),
    "log_level": tuple(trainer_log_levels),
    "log_level_replica": tuple(trainer_log_levels),
}

# Intervals that are read with a strategy of "steps" only.
INTERVALS: dict[str, str] = {
    "logging_steps": "logging_strategy",
    "eval_steps": "eval_strategy",
    "save_steps": "save_strategy",
}

# TRL's loss knobs, each with the knob that does its job here. Refused unless left at their default.
_CLIP = "policy_loss='ppo_clip', policy_loss_kwargs={'epsilon_low': 0.2, 'epsilon_high': 0.28}"
_SAPO = "policy_loss='sapo', policy_loss_kwargs={'temperature_pos': 1.0, 'temperature_neg': 1.05}"
REPLACED: dict[str, str] = {
    "loss_type": "policy_loss='ppo_clip', loss_agg_mode='token-mean'",
    "importance_sampling_level": "policy_loss='gspo', loss_agg_mode='seq-mean-token-mean'",
    "epsilon": _CLIP,
    "epsilon_high": _CLIP,
    "delta": "policy_loss='ppo_clip', policy_loss_kwargs={'dual_clip': 3.0}",
    "sapo_temperature_pos": _SAPO,
    "sapo_temperature_neg": _SAPO,
    "vespo_k_pos": "policy_loss='dro', dro_level='sequence'",
    "vespo_lambda_pos": "policy_loss='dro', dro_level='sequence'",
    "vespo_k_neg": "policy_loss='dro', dro_level='sequence'",
    "vespo_lambda_neg": "policy_loss='dro', dro_level='sequence'",
}

# What each `loss_type` is called here; `from_grpo_config` makes the same translation with its parameters.
LOSS_TYPES: dict[str, str] = {
    "grpo": "policy_loss='ppo_clip', loss_agg_mode='seq-mean-token-mean'",
    "dr_grpo": "policy_loss='ppo_clip', loss_agg_mode='seq-mean-token-sum-norm'",
    "dapo": "policy_loss='ppo_clip', loss_agg_mode='token-mean'",
    "bnpo": "policy_loss='ppo_clip', loss_agg_mode='token-mean'",
    "cispo": "policy_loss='cispo', policy_loss_kwargs={'ratio_max': 5.0}, loss_agg_mode='token-mean'",
    "sapo": "policy_loss='sapo', loss_agg_mode='seq-mean-token-mean'",
    "luspo": "policy_loss='gspo', loss_agg_mode='seq-mean-token-sum'",
    "vespo": "policy_loss='gspo', loss_agg_mode='seq-mean-token-mean'",
    "dro": "policy_loss='dro', dro_beta=0.5",
}

# Options that TRL reads only together with another one. Set alone they do nothing, which draws a warning.
NEEDS: dict[str, tuple[str, ...]] = {
    "use_vllm": (
        "vllm_mode",
        "vllm_model_impl",
        "vllm_enable_sleep_mode",
        "vllm_structured_outputs_regex",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_group_port",
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
        "vllm_tensor_parallel_size",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_cap",
    ),
    "use_transformers_continuous_batching": ("transformers_continuous_batching_config",),
    "sync_ref_model": ("ref_model_mixup_alpha", "ref_model_sync_steps"),
    "use_adaptive_entropy": ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    "log_completions": ("num_completions_to_print", "log_unique_prompts"),
}

# Options of the training loop that online RL never gets to: set, they do nothing, which draws a warning.
IDLE: dict[str, str] = {
    "label_names": "completions have no labels",
    "length_column_name": "prompts are not sampled by length",
    "include_for_metrics": "there is no compute_metrics",
    "batch_eval_metrics": "there is no compute_metrics",
    "average_tokens_across_devices": "losses are always normalised over all devices",
}

# Settings of accelerate's dataloader that would break the trainer's batches, each with the reason and what to write.
ACCELERATOR: dict[str, tuple[str, str]] = {
    "split_batches": (
        "each process would generate a share of the batch that was planned for it, it must be False",
        "accelerator_config={'split_batches': False}",
    ),
    "dispatch_batches": (
        "the main process cannot send prompts to the others, it must be None or False",
        "accelerator_config={'dispatch_batches': None}",
    ),
}

# Dict fields, with an example of what to write.
DICT_FIELDS: dict[str, str] = {
    "policy_loss_kwargs": '{"beta": 0.5}',
    "derived_fields": "None",
    "generation_kwargs": '{"suppress_tokens": [0]}',
    "model_init_kwargs": '{"dtype": "bfloat16"}',
    "chat_template_kwargs": '{"enable_thinking": false}',
    "transformers_continuous_batching_config": '{"num_blocks": 64}',
}

MISSING_BETA = (
    "dro_beta is not set, and it has no default because it depends on the size of your advantages.\n"
    "DRO pushes a token with the force A - dro_beta * l, where A is its advantage and l = log pi - log pi_anchor how "
    "far it has moved: it comes to rest at l* = A / dro_beta. With 0/1 rewards and scale_rewards='none', |A| is about "
    "0.5, so\n"
    "    dro_beta=2.5   rests at l* = 0.2  (about where PPO's clip of 0.2 stops)\n"
    "    dro_beta=0.5   rests at l* = 1    (probability x2.7: a good first value)\n"
    "    dro_beta=0.05  rests at l* = 10   (the value of published examples: hardly any trust region)\n"
    "At dro_level='sequence' l is summed over the completion: divide by its mean length. "
    "Write `dro_beta=0.5`, then look at the metric dro/past_optimum, or run `trl-dro check`."
)


def field_defaults(config_class: type) -> dict[str, Any]:
    """The default of every field that has one."""
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(config_class)
        if field.default is not MISSING or field.default_factory is not MISSING
    }


def check_dro_beta(value: Any) -> None:
    """Refuse a given dro_beta that is no positive number; whether one is needed is for the objective to say."""
    if value is not None and not (is_number(value) and 0 < value <= LARGEST):
        allowed = (
            "it must be a finite number > 0, a token of advantage A comes to rest where its log-ratio is A / dro_beta"
        )
        raise refusal("dro_beta", value, allowed, "dro_beta=0.5")


def derive(config: Any, name: str, value: Any) -> None:
    """Set a field that was not given, and note that it was not."""
    setattr(config, name, value)
    config.derived_fields[name] = value


def forget_derived(config: Any) -> None:
    """Unset what was derived for the configuration that this one was copied from, so that it is derived anew."""
    defaults = field_defaults(type(config))
    for name, value in (config.derived_fields or {}).items():
        if name in defaults and getattr(config, name) == value:  # else the copy was given another value
            setattr(config, name, defaults[name])
    config.derived_fields = {}


def check_numbers(config: Any) -> None:
    """Refuse numbers out of their range; numbers of other libraries (numpy's) become Python's."""
    for name, rule in NUMBERS.items():
        value = getattr(config, name)
        if not rule.accepts(value):
            raise refusal(name, value, f"it must be {rule.allowed}", f"{name}={rule.example}")
        if value is not None and abs(value) > LARGEST:
            allowed = f"beyond {LARGEST:g} the arithmetic of 32 bits ends"
            raise refusal(name, value, allowed, f"{name}={rule.example}")
        if value is not None and not isinstance(value, (int, float)):
            setattr(config, name, int(value) if rule.whole else float(value))


def check_booleans(config: Any, names: dict[str, bool]) -> None:
    """Refuse what is no bool where one is meant: a non-empty text counts as true, "false" among them.

    Args:
        names: the fields, and whether None is allowed.
    """
    for name, optional in names.items():
        value = getattr(config, name)
        if not isinstance(value, bool) and not (optional and value is None):
            instead = f"{name}={str(value).lower() in ('true', '1', 'yes')}"
            raise refusal(name, value, f"it must be True or False{' or None' if optional else ''}", instead)


def number_from_text(value: Any) -> Any:
    """The number that a text spells (YAML reads `1e-1` as text), or the value as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def check_choices(config: Any) -> None:
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            names = [choice for choice in choices if isinstance(choice, str)]
            nearest = nearest_first(str(value), names)[0]
            allowed = "it must be one of " + ", ".join(repr(choice) for choice in choices)
            raise refusal(name, value, allowed, f"{name}={nearest!r}")


def check_reward_weights(weights: Any) -> None:
    if weights is None:
        return
    if not isinstance(weights, (list, tuple)) or not weights or not all(is_number(weight) for weight in weights):
        allowed = "it must be a non-empty list of finite numbers, one for each reward function, or None"
        raise refusal("reward_weights", weights, allowed, "reward_weights=[1.0, 0.5]")


def check_keys(field: str, given: dict[str, Any], known: Collection[str], owner: str) -> None:
    """Refuse a key that its reader does not know, with the nearest one that it does."""
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.7)
            rest = {name: item for name, item in given.items() if name != key} or None
            instead = f"{field}={{{near[0]!r}: {value!r}}}" if near else f"{field}={rest}"
            raise refusal(f"{field}[{key!r}]", value, f"{owner} has no option of this name", instead)


def check_scheduler_names(config: Any) -> None:
    """Refuse in `lr_scheduler_kwargs` what the scheduler does not take."""
    scheduler: Any = TYPE_TO_SCHEDULER_FUNCTION[config.lr_scheduler_type]
    parameters = inspect.signature(scheduler).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        known = parameters.keys() - {"optimizer", "num_warmup_steps", "num_training_steps"}
        check_keys("lr_scheduler_kwargs", config.lr_scheduler_kwargs or {}, known, config.lr_scheduler_type.value)


def check_intervals(config: Any) -> None:
    """Refuse an interval at which its strategy "steps" would never act."""
    for name, strategy in INTERVALS.items():
        value = getattr(config, name)
        optional = name == "eval_steps"  # None is logging_steps
        good = (is_number(value) and value > 0) or (optional and value is None)
        if getattr(config, strategy) == "steps" and not good:
            allowed = f"with {strategy}='steps' it must be a finite number > 0{' or None' if optional else ''}"
            raise refusal(name, value, f"{allowed} (never: {strategy}='no')", f"{name}=10")


def check_pad_to_multiple_of(value: Any) -> None:
    """Refuse what is neither a whole number >= 1, as number or text, nor one of TRL's words."""
    text = str(value).lower()
    if text not in ("auto", "none", "null") and not (text.isdecimal() and int(text) >= 1):
        allowed = "it must be a whole number >= 1, 'auto' or None"
        raise refusal("pad_to_multiple_of", value, allowed, "pad_to_multiple_of=8")


def check_report_to(value: Any) -> None:
    """Refuse a tracker that transformers does not know."""
    names = value if isinstance(value, (list, tuple)) else [value]
    known = [*INTEGRATION_TO_CALLBACK, *(("all", "none") if len(names) == 1 else ())]
    for name in names:
        if name not in known:
            nearest = nearest_first(str(name), known)
            allowed = "it must be one of " + ", ".join(map(repr, nearest)) + ", or a list of them"
            raise refusal("report_to", value, allowed, f"report_to={nearest[0]!r}")


def check_accelerator_names(given: Any) -> None:
    """Refuse in `accelerator_config` what accelerate does not know."""
    if isinstance(given, dict):
        check_keys("accelerator_config", given, {field.name for field in fields(AcceleratorConfig)}, "accelerate")


def check_accelerator(resolved: AcceleratorConfig) -> None:
    """Refuse settings of accelerate's dataloader that would break the trainer's batches."""
    for name, (reason, instead) in ACCELERATOR.items():
        if getattr(resolved, name):
            raise refusal(f"accelerator_config[{name!r}]", getattr(resolved, name), reason, instead)
    steps = (resolved.gradient_accumulation_kwargs or {}).get("num_steps")
    if steps not in (None, 1):
        field = "accelerator_config['gradient_accumulation_kwargs']['num_steps']"
        reason = "it would change gradient_accumulation_steps after the batches were planned, it must be left out"
        raise refusal(field, steps, reason, f"gradient_accumulation_steps={steps}")
