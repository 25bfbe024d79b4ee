"""From TRL's `GRPOConfig` to the fields of `DROConfig`."""

import dataclasses
import warnings
from typing import Any

from trl import GRPOConfig

from .config_rules import LOSS_TYPES, REPLACED, field_defaults, refusal
from .policy_loss import nearest_first


# loss_type -> loss_agg_mode of the same normalisation
_AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
}


def grpo_fields(target: type, cfg: GRPOConfig, *, dro_beta: float | None, **overrides: Any) -> dict[str, Any]:
    """The keyword arguments of the `DROConfig` that does what `cfg` does (see `DROConfig.from_grpo_config`)."""
    from .config import DROConfig

    if isinstance(cfg, DROConfig):
        raise ValueError("cfg is a DROConfig already. Write `dataclasses.replace(cfg, ...)` to change fields of it.")
    if not isinstance(cfg, GRPOConfig):
        raise ValueError(
            f"cfg is a {type(cfg).__name__}: it must be a trl.GRPOConfig. Write `DROConfig(...)` instead."
        )
    names = [f.name for f in dataclasses.fields(target) if f.init]
    fields = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.init}
    unknown = sorted(fields.keys() - set(names))
    if unknown:
        raise ValueError(
            f"{type(cfg).__name__} has fields that {target.__name__} lacks: {', '.join(unknown)}. Write a subclass of "
            "DROConfig with these fields and call its from_grpo_config."
        )
    for name in overrides:
        if name not in names:
            raise ValueError(f"{target.__name__} has no field {name!r}. Nearest: {nearest_first(name, names)[0]!r}.")

    if dro_beta is not None:
        fields["dro_beta"] = dro_beta
    replaced = dro_beta is not None or "policy_loss" in overrides
    if replaced:
        fields["loss_agg_mode"] = _AGGREGATION.get(cfg.loss_type, "token-mean")
    else:
        fields.update(_equivalent_objective(cfg))
        if isinstance(overrides.get("policy_loss_kwargs"), dict):
            overrides["policy_loss_kwargs"] = {**fields["policy_loss_kwargs"], **overrides["policy_loss_kwargs"]}
    _warn_of_changes(cfg, {**fields, **overrides}, replaced)

    defaults = field_defaults(GRPOConfig)
    fields.update({name: defaults[name] for name in REPLACED})
    corrections = ("rollout_is", "rollout_rs", "rollout_correction_preset")
    if overrides.get("anchor_policy") == "sampling" or any(overrides.get(name) for name in corrections):
        # In the source this is TRL's default rather than a wish.
        fields["vllm_importance_sampling_correction"] = None
    if "gradient_checkpointing" in overrides and "activation_checkpointing" not in overrides:
        fields["activation_checkpointing"] = None  # the old name of the same, which the source has filled in
    # A batch geometry that TRL derived is derived again, so that it follows what is overridden.
    fields["generation_batch_size"] = None
    if cfg.steps_per_generation == cfg.gradient_accumulation_steps or "generation_batch_size" in overrides:
        fields["steps_per_generation"] = None
    return {**fields, **overrides}


def _warn_of_changes(cfg: GRPOConfig, result: dict[str, Any], replaced: bool) -> None:
    """One warning for what is dropped, one for reward scaling, one for a normaliser that counts otherwise."""
    defaults = field_defaults(GRPOConfig)
    objective, mode = result.get("policy_loss", "dro"), result["loss_agg_mode"]
    dropped = [f"{name}={getattr(cfg, name)!r}" for name in REPLACED if getattr(cfg, name) != defaults[name]]
    if replaced and dropped:
        warnings.warn(
            f"policy_loss={objective!r} replaces these options of the source, which are dropped: "
            f"{', '.join(dropped)}. The result aggregates with loss_agg_mode={mode!r}.",
            stacklevel=4,
        )
    if objective == "dro" and result["scale_rewards"] == cfg.scale_rewards != "none":
        where = " from prompt to prompt" if cfg.scale_rewards == "group" else ""
        warnings.warn(
            f"scale_rewards={cfg.scale_rewards!r} is kept from the source. Dividing rewards by their standard "
            f"deviation changes what dro_beta means{where}. Write `scale_rewards='none'` for DRO's default.",
            stacklevel=4,
        )
    if not replaced and result["mask_truncated_completions"] and mode.startswith("seq-mean"):
        warnings.warn(
            f"mask_truncated_completions=True with loss_type={cfg.loss_type!r}: the mean is over the completions that "
            "are trained, where TRL divides by the masked ones too. Scale learning_rate if that matters.",
            stacklevel=4,
        )


def _equivalent_objective(cfg: GRPOConfig) -> dict[str, Any]:
    """`policy_loss`, its parameters and `loss_agg_mode` with the gradient of the source's loss."""
    loss_type = cfg.loss_type
    at_sequence = cfg.importance_sampling_level == "sequence"
    if loss_type not in _AGGREGATION:
        raise refusal(
            "loss_type",
            loss_type,
            "its weight depends on the whole sequence's importance weight with the engine's correction inside, which "
            "does not decompose into objective, correction and aggregation"
            if loss_type == "vespo"
            else f"known are {', '.join(_AGGREGATION)}",
            LOSS_TYPES.get(loss_type, "loss_type='dapo'"),
        )
    if loss_type == "bnpo" and (cfg.gradient_accumulation_steps > 1 or cfg.world_size > 1):
        allowed = "normalising by each micro-batch depends on how the batch is cut, here only whole windows normalise"
        raise refusal("loss_type", loss_type, allowed, "loss_type='dapo' (loss_agg_mode='token-mean')")
    low = cfg.epsilon
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    result: dict[str, Any] = {"loss_agg_mode": _AGGREGATION[loss_type]}
    if loss_type in ("cispo", "sapo"):
        if at_sequence:
            allowed = f"loss_type={loss_type!r} at sequence level has no equivalent here"
            raise refusal("importance_sampling_level", "sequence", allowed, "importance_sampling_level='token'")
        if loss_type == "cispo":
            kwargs: dict[str, Any] = {"ratio_max": high}
        else:
            kwargs = {"temperature_pos": cfg.sapo_temperature_pos, "temperature_neg": cfg.sapo_temperature_neg}
        return {**result, "policy_loss": loss_type, "policy_loss_kwargs": kwargs}
    kwargs = {"epsilon_low": low, "epsilon_high": high}
    if at_sequence:
        if cfg.beta != 0.0 and cfg.use_bias_correction_kl:
            allowed = "TRL weighs the KL by the ratio of the whole sequence there, here it is each token's own"
            raise refusal("use_bias_correction_kl", True, allowed, "use_bias_correction_kl=False")
        if cfg.top_entropy_quantile < 1.0:
            allowed = "TRL's sequence ratio sends gradient to every token, here only to the tokens that are kept"
            raise refusal("top_entropy_quantile", cfg.top_entropy_quantile, allowed, "top_entropy_quantile=1.0")
        mode = cfg.vllm_importance_sampling_mode
        if cfg.use_vllm and cfg.vllm_importance_sampling_correction and mode.startswith("token_"):
            allowed = "TRL spreads the weight of a token over its sequence there, here it stays with the token"
            instead = f"vllm_importance_sampling_mode={mode.replace('token', 'sequence')!r}"
            raise refusal("vllm_importance_sampling_mode", mode, allowed, instead)
        if cfg.delta is not None:
            raise refusal("delta", cfg.delta, "gspo has no second clip, it must be None", "delta=None")
        return {**result, "policy_loss": "gspo", "policy_loss_kwargs": kwargs}
    if cfg.delta is not None and cfg.delta < 1 + high:
        allowed = f"a second clip inside the first (1 + epsilon_high = {1 + high:g}) has no equivalent here"
        raise refusal("delta", cfg.delta, allowed, f"delta={max(2.0, 1 + high):g}")
    return {**result, "policy_loss": "ppo_clip", "policy_loss_kwargs": {**kwargs, "dual_clip": cfg.delta}}
