"""What a configuration allows but seldom means: a warning for each, with what to write instead."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from trl import GRPOConfig

from .config_rules import IDLE, NEEDS, field_defaults


if TYPE_CHECKING:
    from .config import DROConfig


# Settings under which tokens are sampled from another distribution than the policy's own.
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
}

# Options of vLLM in `generation_kwargs` that do the same, and what leaves the distribution alone.
_NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "suppress_tokens": (None, []),
    "min_tokens": (0,),
}

# Read only where TRL corrects for the mismatch of vLLM.
_OF_CORRECTION = (
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
)


def config_warnings(cfg: "DROConfig") -> Iterator[str]:
    """The warnings about a resolved configuration."""
    yield from _about_the_penalty(cfg)
    yield from _about_the_loss(cfg)
    yield from _about_biased_sampling(cfg)
    yield from _about_idle_options(cfg)


def _about_the_penalty(cfg: "DROConfig") -> Iterator[str]:
    plan = cfg.batch_plan()
    if cfg.is_dro and not plan.penalty_alive:
        used = plan.micro_steps_per_generation
        yield (
            f"DRO's penalty does nothing here: with anchor_policy='old', and each generated batch used up in one "
            f"optimizer step (gradient_accumulation_steps={cfg.gradient_accumulation_steps} is a multiple of "
            f"steps_per_generation * num_iterations = {used}), the log-ratio is always 0 and this is REINFORCE. "
            "Three ways out: (1) take several optimizer steps on each generated batch, num_iterations=4 or "
            f"steps_per_generation={4 * cfg.gradient_accumulation_steps}; (2) anchor_policy='reference'; "
            "(3) anchor_policy='sampling' with an engine that reports log-probs."
        )
    if cfg.dro_target_kl is not None and cfg.anchor_policy != "reference" and plan.windows_per_generation < 3:
        yield (
            f"dro_target_kl={cfg.dro_target_kl!r} with {plan.windows_per_generation:g} optimizer steps on each "
            "generated batch: the first one is at the anchor, and how far it goes does not depend on dro_beta, so "
            "there is hardly anything to adapt. Write `num_iterations=4` or more."
        )


def _about_the_loss(cfg: "DROConfig") -> Iterator[str]:
    recommended = getattr(cfg.build_policy_loss(), "recommended_loss_agg_mode", None)
    if recommended and cfg.loss_agg_mode == "token-mean":
        yield (
            f"policy_loss={cfg.policy_loss!r} is defined with loss_agg_mode={recommended!r}; 'token-mean' weights "
            f"each completion by its length. Write `loss_agg_mode={recommended!r}`."
        )
    if cfg.loss_agg_mode == "token-sum" and cfg.max_grad_norm > 0:
        yield (
            f"loss_agg_mode='token-sum' grows with the batch, so max_grad_norm={cfg.max_grad_norm} will clip nearly "
            "every step. Write `max_grad_norm=0.0` and scale the learning rate, or `loss_agg_mode='token-mean'`."
        )
    if cfg.neftune_noise_alpha:
        yield (
            f"neftune_noise_alpha={cfg.neftune_noise_alpha!r} adds new noise to the embeddings in each forward pass: "
            "completions are sampled and scored under different noise, so log-ratios are not 0 before the policy has "
            "moved, and the objective acts on them. Write `neftune_noise_alpha=None`."
        )


def _about_biased_sampling(cfg: "DROConfig") -> Iterator[str]:
    corrected = cfg.build_rollout_correction() is not None
    if cfg.anchor_policy != "sampling" and not corrected:
        return
    biased = [
        f"{name}={getattr(cfg, name)!r}"
        for name, neutral in _NEUTRAL_SAMPLING.items()
        if getattr(cfg, name) not in neutral
    ]
    options = cast(dict[str, Any], cfg.generation_kwargs or {})
    biased += [
        f"generation_kwargs[{name!r}]={options[name]!r}"
        for name, neutral in _NEUTRAL_OPTIONS.items()
        if name in options and options[name] not in neutral
    ]
    if biased:
        effect = "rollouts are corrected for it" if corrected else "anchor_policy='sampling' anchors to them"
        yield (
            f"{', '.join(biased)} changes the distribution that is sampled from, so the engine's log-probs are not "
            f"those of the policy, and {effect}. Leave them at their defaults"
            + ("." if corrected else ", or write `anchor_policy='old'`.")
        )


def _about_idle_options(cfg: "DROConfig") -> Iterator[str]:
    defaults = field_defaults(GRPOConfig)
    for name, reason in IDLE.items():
        if getattr(cfg, name) != defaults[name]:
            yield f"{name}={getattr(cfg, name)!r} has no effect: {reason}."
    for switch, names in NEEDS.items():
        idle = [name for name in names if getattr(cfg, name) != defaults[name]]
        if idle and not getattr(cfg, switch):
            written = ", ".join(f"{name}={getattr(cfg, name)!r}" for name in idle)
            yield f"{written} has no effect without {switch}=True."
    idle = [name for name in _OF_CORRECTION if getattr(cfg, name) != defaults[name]]
    if cfg.use_vllm and idle and not cfg.vllm_importance_sampling_correction:
        written = ", ".join(f"{name}={getattr(cfg, name)!r}" for name in idle)
        yield f"{written} has no effect: TRL's correction is off (vllm_importance_sampling_correction=False)."
