"""Rules about generation: one engine, and completions that are scored as they are sampled."""

import warnings
from typing import TYPE_CHECKING, Any, cast

from transformers import GenerationConfig
from trl import GRPOConfig

from .config_rules import check_keys, check_numbers, field_defaults, refusal


if TYPE_CHECKING:
    from .config import DROConfig


# Sampling settings that have a field of their own. Given in `generation_kwargs`, TRL samples with them while scoring
# and reporting with the field, so they are moved to the field.
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# Settings of the engine that the trainer makes itself or cannot work with: why, and what to write.
_OWN = "the trainer sets it"
OWN_GENERATION: dict[str, tuple[str, str]] = {
    "do_sample": (_OWN, "temperature=1.0"),
    "num_return_sequences": (_OWN, "num_generations=8"),
    "n": (_OWN, "num_generations=8"),
    "max_new_tokens": (_OWN, "max_completion_length=256"),
    "max_tokens": (_OWN, "max_completion_length=256"),
    "max_length": (_OWN, "max_completion_length=256"),
    "disable_compile": (_OWN, "generation_kwargs=None"),
    "return_dict_in_generate": ("the trainer takes the tokens alone", "generation_kwargs=None"),
    "eos_token_id": (
        "the trainer looks for the end tokens of the tokenizer and of the model only, and would train on the padding "
        "that follows others",
        "model.generation_config.eos_token_id = [...]",
    ),
    "stop_strings": (
        "only vLLM stops at text, transformers at tokens",
        "model.generation_config.eos_token_id = [...]",
    ),
    "token_healing": ("it rewrites the prompt that completions are scored with", "generation_kwargs=None"),
}

# Their values that change nothing, which are let through.
HARMLESS_GENERATION: dict[str, Any] = {
    "do_sample": True,
    "return_dict_in_generate": False,
    "stop_strings": None,
    "token_healing": False,
}


def check_generation_names(given: dict[str, Any]) -> None:
    """Refuse in `generation_kwargs` what transformers would store and never read."""
    check_keys("generation_kwargs", given, set(vars(GenerationConfig())), "transformers' GenerationConfig")


def _check_generation_kwargs(cfg: "DROConfig") -> None:
    """Refuse what would not be read or cannot work, and move what has a field of its own to it."""
    moved: dict[str, Any] = {}
    given = cast(dict[str, Any], cfg.generation_kwargs or {})  # JSON is read already
    for name, (reason, instead) in OWN_GENERATION.items():
        if name in given and not (name in HARMLESS_GENERATION and given[name] == HARMLESS_GENERATION[name]):
            raise refusal(f"generation_kwargs[{name!r}]", given[name], reason, instead)
    of_model = cast(dict[str, Any], cfg.model_init_kwargs or {})
    own_code = cfg.trust_remote_code or of_model.get("trust_remote_code")
    if not cfg.use_vllm and not own_code:  # such a model may read options of its own
        check_generation_names(given)
    for name in SAMPLING_FIELDS:
        if name not in given:
            continue
        value, current = given[name], getattr(cfg, name)
        if current not in (value, field_defaults(GRPOConfig)[name]):
            allowed = f"{name}={current!r} is set too"
            raise refusal(f"generation_kwargs[{name!r}]", value, allowed, f"{name}={value!r}")
        moved[name] = value
    if moved:
        cfg.generation_kwargs = {k: v for k, v in given.items() if k not in moved} or None
        for name, value in moved.items():
            setattr(cfg, name, value)
        check_numbers(cfg)
        written = ", ".join(f"{name}={value!r}" for name, value in moved.items())
        warnings.warn(
            f"Moved from generation_kwargs to the field of the same name, so that completions are scored as they "
            f"are sampled: {written}. Write it there.",
            stacklevel=5,
        )


def check_sampling(cfg: "DROConfig") -> None:
    """Check the options of generation, and move those of `generation_kwargs` that have a field of their own to it.

    Raises:
        ValueError: an option would not be read, cannot work, or contradicts another one.
    """
    _check_generation_kwargs(cfg)
    if not cfg.use_vllm and cfg.max_completion_length is None:
        allowed = "only vLLM generates to the end of the context, transformers would stop after 20 tokens"
        raise refusal("max_completion_length", None, allowed, "max_completion_length=256")
    low, high = cfg.vllm_importance_sampling_clip_min, cfg.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        allowed = f"it must be below vllm_importance_sampling_clip_max={high!r}"
        raise refusal("vllm_importance_sampling_clip_min", low, allowed, "vllm_importance_sampling_clip_min=None")
    truncating = cfg.vllm_importance_sampling_mode.endswith("_truncate")
    if cfg.vllm_importance_sampling_correction is not False and truncating and low is None and high is None:
        mode = cfg.vllm_importance_sampling_mode
        allowed = f"vllm_importance_sampling_mode={mode!r} needs a bound (clip_min, clip_max or both)"
        raise refusal("vllm_importance_sampling_clip_max", None, allowed, "vllm_importance_sampling_clip_max=3.0")
    if cfg.use_vllm and cfg.use_transformers_continuous_batching:
        allowed = "use_vllm=True generates already, and only one engine can"
        raise refusal("use_transformers_continuous_batching", True, allowed, "use_vllm=False")
    if cfg.log_completions_hub_repo is not None and not cfg.log_completions:
        allowed = "it needs log_completions=True (or leave it None)"
        raise refusal("log_completions_hub_repo", cfg.log_completions_hub_repo, allowed, "log_completions=True")
