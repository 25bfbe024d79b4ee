"""`DROConfig`: TRL's `GRPOConfig` with DRO's knobs, checked whole before a model is loaded."""

import argparse
import copy
import json
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, cast, get_type_hints

from transformers.trainer_pt_utils import AcceleratorConfig
from trl import GRPOConfig

from .batch_rules import resolve_batch_geometry
from .config_rules import (
    DICT_FIELDS,
    LOSS_TYPES,
    MISSING_BETA,
    REPLACED,
    check_accelerator,
    check_accelerator_names,
    check_booleans,
    check_choices,
    check_dro_beta,
    check_intervals,
    check_numbers,
    check_pad_to_multiple_of,
    check_report_to,
    check_reward_weights,
    check_scheduler_names,
    derive,
    field_defaults,
    forget_derived,
    number_from_text,
    refusal,
)
from .config_warnings import config_warnings
from .generation_rules import check_sampling
from .off_policy_rules import (
    build_correction,
    check_adaptive_beta,
    check_baseline,
    corrects_rollouts,
    resolve_correction,
)
from .policy_loss import PolicyLoss, canonical_name, get_policy_loss, resolve_policy_loss
from .redaction import is_secret_name, without_secrets
from .rollout_correction import RolloutCorrection
from .windows import BatchPlan


@dataclass
class DROConfig(GRPOConfig):
    r"""
    Configuration of [`DROTrainer`]: every option of [`~trl.GRPOConfig`], and the ones below.

    Bad or contradictory settings raise `ValueError` on construction, those of inherited options too. TRL's loss knobs
    (`loss_type`, `epsilon`, `epsilon_high`, `delta`, `importance_sampling_level`, `sapo_*`, `vespo_*`) are refused in
    favour of `policy_loss` and `loss_agg_mode`; [`DROConfig.from_grpo_config`] translates them. So are options that
    TRL would ignore or that would break its batches: unknown names in `generation_kwargs`, end tokens there,
    `max_completion_length=None` without vLLM, `split_batches` and `dispatch_batches`.

    Parameters:
        policy_loss (`str`, *optional*, defaults to `"dro"`):
            Policy objective: a registered name (`trl-dro losses` lists them) or the dotted path of a class of your
            own that follows [`~trl_dro.policy_loss.PolicyLoss`].
        policy_loss_kwargs (`dict` or `str`, *optional*):
            Parameters of the objective, as a dict or as JSON.
        dro_beta (`float`, *optional*):
            Strength of DRO's quadratic penalty, required with `policy_loss="dro"`: a token of advantage `A` comes to
            rest where its log-ratio to the anchor is `A / dro_beta`. (`beta` remains TRL's coefficient of the
            reference KL.)
        dro_level (`str`, *optional*, defaults to `"token"`):
            Whether the penalty acts on each token's log-ratio (`"token"`) or on its sum over the completion
            (`"sequence"`).
        loss_agg_mode (`str`, *optional*, defaults to `"token-mean"`):
            How per-token losses become one number; see [`~trl_dro.aggregate_loss`].
        loss_scale_factor (`float`, *optional*):
            Divisor of `loss_agg_mode="seq-mean-token-sum-norm"`. Defaults to `max_completion_length`.
        anchor_policy (`str`, *optional*, defaults to `"old"`):
            Which policy the log-ratio is taken to: `"old"` (at generation time, scored by the trainer), `"sampling"`
            (log-probs reported by the inference engine), `"reference"` (the frozen reference model; `dro` only).
        dro_target_kl (`float`, *optional*):
            Distance to the anchor that `dro_beta` is adapted to, from its given value on: the k2 estimate of the KL,
            `l^2 / 2` per token, at sequence level that of the summed log-ratio. See [`~trl_dro.beta_control`].
        dro_huber_delta (`float`, *optional*):
            Log-ratio beyond which the penalty is linear instead of quadratic, so that its pull stays at
            `dro_beta * dro_huber_delta`. Advantages larger than that have no point of rest.
        rollout_is (`str`, *optional*):
            Importance weights for tokens that the inference engine sampled with other log-probs than the trainer's
            (verl's rollout correction): `"token"` or `"sequence"`. Needs an engine that reports log-probs.
        rollout_is_threshold (`float`, *optional*, defaults to 2.0):
            Larger weights are cut to it.
        rollout_is_threshold_lower (`float`, *optional*):
            Given, weights outside of both bounds become 0 instead.
        rollout_is_batch_normalize (`bool`, *optional*, defaults to `False`):
            Whether to divide the weights by their mean over the generated batch of all processes.
        rollout_rs (`list[str]`, *optional*):
            Statistics by which tokens or completions are left out, see
            [`~trl_dro.rollout_correction.rejection_mask`].
        rollout_rs_threshold (`list[float]`, *optional*):
            Largest value allowed, one for each statistic.
        rollout_rs_threshold_lower (`list[float]`, *optional*):
            Smallest ratio engine / trainer allowed, one for each k1 statistic.
        rollout_correction_preset (`str`, *optional*):
            One of verl's presets, such as `"decoupled_token_is"`, in place of the `rollout_*` options.
        advantage_baseline (`str`, *optional*, defaults to `"mean"`):
            What rewards are compared with: the mean of the group (`"mean"`, TRL's), of its other completions
            (`"leave-one-out"`), or its soft value (`"soft"`), see [`~trl_dro.advantages.group_advantages`].
        advantage_baseline_temperature (`float`, *optional*):
            Temperature of `"soft"`, in units of reward. Defaults to what `dro_beta` is at sequence level: `dro_beta`
            divided, at token level, by the mean length of the completions.
        reward_timeout (`float`, *optional*):
            Seconds that a call of a reward function may take; one that takes longer ends the run, on all processes.
            The function then runs in a thread of its own, where `signal` does not work. Unset, there is no limit.
        scale_rewards (`str` or `bool`, *optional*, defaults to `"none"`):
            As in TRL, whose default is `"group"`. Dividing by each group's standard deviation would give every prompt
            an effective `dro_beta` of its own.
        vllm_importance_sampling_correction (`bool`, *optional*):
            As in TRL; unset, it is off with `anchor_policy="sampling"` and where rollouts are corrected by the options
            above, and on otherwise.
        derived_fields (`dict`, *optional*):
            Not to be given: the fields that were not given, with the values found for them. `dataclasses.replace` and
            `DROConfig(**config.to_dict())` find them anew.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "policy_loss_kwargs", "derived_fields"]

    policy_loss: str = field(
        default="dro",
        metadata={"help": "Policy objective: a registered name (see `trl-dro losses`) or a dotted path to a class."},
    )
    policy_loss_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Parameters of the policy objective, as JSON on the command line."}
    )
    dro_beta: float | None = field(
        default=None,
        metadata={
            "help": "Strength of DRO's quadratic penalty: a token of advantage A comes to rest at a log-ratio of "
            "A / dro_beta. Required with `policy_loss='dro'`."
        },
    )
    dro_level: str = field(
        default="token",
        metadata={"help": "Whether DRO's penalty acts on each `token` or on the summed log-ratio of a `sequence`."},
    )
    loss_agg_mode: str = field(
        default="token-mean",
        metadata={
            "help": "How per-token losses are aggregated: `token-mean`, `token-sum`, `seq-mean-token-sum`, "
            "`seq-mean-token-mean` or `seq-mean-token-sum-norm`."
        },
    )
    loss_scale_factor: float | None = field(
        default=None,
        metadata={
            "help": "Divisor of `loss_agg_mode='seq-mean-token-sum-norm'`. Defaults to `max_completion_length`."
        },
    )
    anchor_policy: str = field(
        default="old",
        metadata={
            "help": "Policy that the log-ratio is taken to: `old` (at generation time, scored by the trainer), "
            "`sampling` (as reported by the inference engine) or `reference` (the reference model)."
        },
    )

    dro_target_kl: float | None = field(
        default=None,
        metadata={
            "help": "Distance to the anchor, as k2 estimate of the KL, that dro_beta is adapted to while training."
        },
    )
    dro_huber_delta: float | None = field(
        default=None,
        metadata={"help": "Log-ratio beyond which DRO's penalty grows linearly instead of quadratically."},
    )
    rollout_is: str | None = field(
        default=None,
        metadata={
            "help": "Importance weights for the mismatch between the engine's and the trainer's log-probs: `token` or "
            "`sequence`."
        },
    )
    rollout_is_threshold: float = field(default=2.0, metadata={"help": "Largest importance weight of `rollout_is`."})
    rollout_is_threshold_lower: float | None = field(
        default=None,
        metadata={"help": "Given, importance weights outside of both thresholds are zeroed instead of truncated."},
    )
    rollout_is_batch_normalize: bool = field(
        default=False, metadata={"help": "Whether to normalise the importance weights to mean 1 over the batch."}
    )
    rollout_rs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Statistics of the mismatch that reject tokens or completions, such as `token_k1` or "
            "`seq_mean_k3`."
        },
    )
    rollout_rs_threshold: list[float] | None = field(
        default=None, metadata={"help": "Largest value allowed, one for each statistic of `rollout_rs`."}
    )
    rollout_rs_threshold_lower: list[float] | None = field(
        default=None,
        metadata={"help": "Smallest ratio engine / trainer allowed, one for each k1 statistic of `rollout_rs`."},
    )
    rollout_correction_preset: str | None = field(
        default=None, metadata={"help": "verl's rollout correction preset, such as `decoupled_token_is`."}
    )
    advantage_baseline: str = field(
        default="mean",
        metadata={"help": "What rewards are compared with in their group: `mean`, `leave-one-out` or `soft`."},
    )
    advantage_baseline_temperature: float | None = field(
        default=None,
        metadata={"help": "Temperature of `advantage_baseline='soft'`. Defaults to dro_beta at sequence level."},
    )

    reward_timeout: float | None = field(
        default=None, metadata={"help": "Seconds that a call of a reward function may take before the run is ended."}
    )

    # Defaults that differ from GRPOConfig's
    scale_rewards: str = field(
        default="none",
        metadata={
            "help": "Reward scaling: `none` (default), `group` or `batch`. `group` gives every prompt its own "
            "effective dro_beta."
        },
    )
    vllm_importance_sampling_correction: bool | None = field(  # type: ignore[assignment]  # None until resolved
        default=None,
        metadata={
            "help": "Whether to correct for the mismatch between vLLM's and the trainer's log-probs. Unset, it is off "
            "with `anchor_policy='sampling'` and on otherwise."
        },
    )

    derived_fields: dict[str, Any] | str | None = field(default=None, metadata={"help": argparse.SUPPRESS})

    def __post_init__(self) -> None:
        if self.hub_token == "<HUB_TOKEN>":  # what `to_dict` writes in its place
            self.hub_token = None
        self._parse_json_fields()
        forget_derived(self)
        check_booleans(self, _boolean_fields())
        self._refuse_replaced_knobs()
        check_dro_beta(self.dro_beta)
        self.dro_beta = None if self.dro_beta is None else float(self.dro_beta)
        check_numbers(self)
        check_choices(self)
        check_intervals(self)
        check_pad_to_multiple_of(self.pad_to_multiple_of)
        check_report_to(self.report_to)
        check_accelerator_names(self.accelerator_config)
        check_reward_weights(self.reward_weights)
        self.build_policy_loss()
        resolve_correction(self)
        check_baseline(self)
        self._check_objective()
        check_sampling(self)
        self._check_reference()
        self._check_entropy()
        self._check_unsupported()
        resolve_batch_geometry(self, self.announced_world_size)
        if self.vllm_importance_sampling_correction is None:
            correct = not (self.anchor_policy == "sampling" or corrects_rollouts(self))
            derive(self, "vllm_importance_sampling_correction", correct)
        if self.activation_checkpointing and not self.gradient_checkpointing:
            allowed = "activation_checkpointing=True, its new name, says otherwise"
            raise refusal("gradient_checkpointing", False, allowed, "activation_checkpointing=False")
        # transformers calls these two deprecated aliases, yet TRL sets one by default: every config would warn.
        if self.activation_checkpointing is None:
            derive(self, "activation_checkpointing", self.gradient_checkpointing)
        if self.activation_checkpointing_kwargs is None:
            derive(self, "activation_checkpointing_kwargs", self.gradient_checkpointing_kwargs)
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            derive(self, "metric_for_best_model", "reward")  # transformers' default, the loss, says nothing in RL
        derived = [name for name in ("steps_per_generation", "generation_batch_size") if getattr(self, name) is None]
        super().__post_init__()
        check_adaptive_beta(self)
        check_accelerator(cast(AcceleratorConfig, self.accelerator_config))
        check_scheduler_names(self)
        for name in derived:
            derive(self, name, getattr(self, name))
        for message in config_warnings(self):
            warnings.warn(message, stacklevel=3)

    # Secrets. transformers pickles the configuration next to every model that it saves or pushes.

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: without tokens and keys. Who loads it uses the token of the machine it is loaded on."""
        secrets = {name for name, value in vars(self).items() if isinstance(value, str) and is_secret_name(name)}
        return {name: None if name in secrets else without_secrets(value) for name, value in vars(self).items()}

    def __copy__(self) -> "DROConfig":
        return self.__deepcopy__({}, lambda value, _: value)

    def __deepcopy__(self, memo: dict[int, Any], copied: Any = copy.deepcopy) -> "DROConfig":
        """With all secrets, unlike a pickle."""
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        vars(result).update({name: copied(value, memo) for name, value in vars(self).items()})
        return result

    def __repr__(self) -> str:
        shown = {field.name: without_secrets(getattr(self, field.name), field.name) for field in fields(self)}
        return f"{type(self).__name__}(\n{''.join(f'{name}={value!r},{chr(10)}' for name, value in shown.items())})"

    __str__ = __repr__

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, which hides `hub_token` only: trackers log it, and some write it into `output_dir`."""
        return without_secrets(super().to_dict())

    @classmethod
    def from_grpo_config(cls, cfg: GRPOConfig, *, dro_beta: float | None = None, **overrides: Any) -> "DROConfig":
        """
        Translate a TRL configuration.

        Args:
            cfg ([`~trl.GRPOConfig`]):
                Source. Its rewards are scaled as before (`scale_rewards` is kept).
            dro_beta (`float`, *optional*):
                Given, the result trains with `dro` and the source's clipping options are dropped, with one warning
                that lists them. Omitted, the result trains with the objective and aggregation equivalent to the
                source's `loss_type`.
            **overrides:
                Fields of the result to set otherwise.

        Raises:
            ValueError: the source's loss has no equivalent here; the message says why and what comes nearest.
        """
        from .migration import grpo_fields

        return cls(**grpo_fields(cls, cfg, dro_beta=dro_beta, **overrides))

    def build_policy_loss(self) -> PolicyLoss:
        """The configured objective. Raises `ValueError` for an unknown name and for missing or bad parameters."""
        params = {name: number_from_text(value) for name, value in _as_dict(self.policy_loss_kwargs).items()}
        if self.is_dro:
            for name, value, given in (
                ("beta", self.dro_beta, self.dro_beta is not None),
                ("level", self.dro_level, self.dro_level != "token"),
                ("huber_delta", self.dro_huber_delta, self.dro_huber_delta is not None),
            ):
                if given and name in params:
                    both = f"dro_{name}={value!r} and policy_loss_kwargs={{{name!r}: {params[name]!r}}}"
                    raise ValueError(f"{name} is given twice: {both}. Write `dro_{name}={value!r}` only.")
                if given:
                    params[name] = value
            known = {field.name for field in fields(resolve_policy_loss("dro"))}
            if params.get("beta") is None and params.keys() <= known:  # another name has a better message
                raise ValueError(MISSING_BETA)
        try:
            return get_policy_loss(self.policy_loss, **params)
        except ValueError as error:
            if self.policy_loss_kwargs:
                raise ValueError(f"policy_loss_kwargs={self.policy_loss_kwargs!r}: {error}") from error
            raise

    def build_rollout_correction(self) -> RolloutCorrection | None:
        """The configured correction of rollouts, None without one."""
        return build_correction(self)

    def batch_plan(self) -> BatchPlan:
        """The resolved batch geometry."""
        return BatchPlan(
            world_size=self.world_size,
            per_device_train_batch_size=self.per_device_train_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            steps_per_generation=cast(int, self.steps_per_generation),
            num_iterations=self.num_iterations,
            num_generations=cast(int, self.num_generations),
            anchor_policy=self.anchor_policy,
        )

    @property
    def announced_world_size(self) -> int:
        """Processes that the launcher starts; `world_size` is known only once their group is up."""
        return int(os.environ.get("WORLD_SIZE") or 1)

    @property
    def is_dro(self) -> bool:
        return canonical_name(self.policy_loss) == "dro"

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is asked for, in training or around it."""
        return self.eval_strategy != "no" or self.do_eval or self.eval_on_start

    @property
    def needs_reference(self) -> bool:
        """Whether the reference model is scored: for TRL's KL term, or as the anchor."""
        return self.beta != 0.0 or self.anchor_policy == "reference"

    @property
    def needs_old_policy(self) -> bool:
        """Whether the policy that generated is scored by the trainer, where it has moved since."""
        if self.anchor_policy == "sampling":
            return False
        corrected = self.build_rollout_correction() is not None or self.off_policy_mask_threshold is not None
        bias_corrected = self.beta != 0.0 and self.use_bias_correction_kl
        return self.anchor_policy == "old" or corrected or bias_corrected

    def _parse_json_fields(self) -> None:
        for name, example in DICT_FIELDS.items():
            value = getattr(self, name)
            if isinstance(value, str):
                with suppress(json.JSONDecodeError):
                    value = json.loads(value)
                setattr(self, name, value)
            if value is not None and not isinstance(value, dict):
                raise refusal(name, value, "it must be a dict, JSON of one, or None", f"{name}={example}")
        for key in _as_dict(self.policy_loss_kwargs):
            if not isinstance(key, str):
                allowed = f"{key!r} is no name of a parameter"
                raise refusal(
                    "policy_loss_kwargs", self.policy_loss_kwargs, allowed, 'policy_loss_kwargs={"beta": 0.5}'
                )
        if isinstance(self.reward_weights, (list, tuple)):
            self.reward_weights = [number_from_text(weight) for weight in self.reward_weights]

    def _refuse_replaced_knobs(self) -> None:
        defaults = field_defaults(GRPOConfig)
        for name, instead in REPLACED.items():
            value = getattr(self, name)
            if value != defaults[name]:
                if name == "loss_type":
                    instead = LOSS_TYPES.get(str(value), instead)
                allowed = (
                    f"this knob of TRL's losses must keep its default {defaults[name]!r}, the objective replaces it"
                )
                raise refusal(name, value, allowed, instead)

    def _check_objective(self) -> None:
        if not self.is_dro:
            for name in ("dro_beta", "dro_level", "dro_target_kl", "dro_huber_delta"):
                default = field_defaults(DROConfig)[name]
                if getattr(self, name) != default:
                    allowed = f"it belongs to policy_loss='dro', not {self.policy_loss!r}"
                    raise refusal(name, getattr(self, name), allowed, f"{name}={default!r}")
            if self.anchor_policy == "reference":
                allowed = (
                    f"only policy_loss='dro' can be anchored to the reference model, {self.policy_loss!r} needs the "
                    "policy that sampled (allowed: 'old', 'sampling')"
                )
                raise refusal("anchor_policy", "reference", allowed, "anchor_policy='old'")
        if self.loss_agg_mode == "seq-mean-token-sum-norm":
            if self.loss_scale_factor is None and self.max_completion_length is None:
                allowed = "loss_agg_mode='seq-mean-token-sum-norm' divides by it, or by max_completion_length"
                raise refusal("loss_scale_factor", None, allowed, "loss_scale_factor=512")
        elif self.loss_scale_factor is not None:
            allowed = f"loss_agg_mode={self.loss_agg_mode!r} does not use it"
            raise refusal(
                "loss_scale_factor", self.loss_scale_factor, allowed, "loss_agg_mode='seq-mean-token-sum-norm'"
            )
        if self.anchor_policy == "sampling" and self.vllm_importance_sampling_correction:
            allowed = "with anchor_policy='sampling' it would count the engine's mismatch twice (allowed: False, None)"
            raise refusal(
                "vllm_importance_sampling_correction", True, allowed, "vllm_importance_sampling_correction=False"
            )

    def _check_reference(self) -> None:
        if self.sync_ref_model and not self.needs_reference:
            allowed = "with beta=0.0 and anchor_policy other than 'reference' there is no reference model to sync"
            raise refusal("sync_ref_model", True, allowed, "sync_ref_model=False")

    def _check_entropy(self) -> None:
        if self.entropy_coef_min > self.entropy_coef_max:
            allowed = f"it must not exceed entropy_coef_max={self.entropy_coef_max!r}"
            raise refusal("entropy_coef_min", self.entropy_coef_min, allowed, "entropy_coef_min=0.0")

    def _check_unsupported(self) -> None:
        if self.label_smoothing_factor != 0.0:
            allowed = "there are no labels to smooth in online RL, it must be 0.0"
            raise refusal("label_smoothing_factor", self.label_smoothing_factor, allowed, "label_smoothing_factor=0.0")
        if self.auto_find_batch_size:
            allowed = "shrinking the batch would break the groups of num_generations completions, it must be False"
            raise refusal("auto_find_batch_size", True, allowed, "per_device_train_batch_size=1")
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if getattr(self, name):
                allowed = "an evaluation outside of training would leave the weights in half precision for good"
                raise refusal(
                    name, True, allowed, f"{name[:4]}=True` (under which evaluation runs too) and `{name}=False"
                )
        if self.train_sampling_strategy != "random":
            allowed = "prompts are drawn in groups by TRL's sampler, which ignores it; it must be 'random'"
            instead = (
                "shuffle_dataset=False" if self.train_sampling_strategy == "sequential" else "shuffle_dataset=True"
            )
            raise refusal("train_sampling_strategy", self.train_sampling_strategy, allowed, instead)
        if self.data_seed not in (None, self.seed):
            allowed = f"TRL's sampler draws prompts with seed={self.seed}, it must be None"
            raise refusal("data_seed", self.data_seed, allowed, f"seed={self.data_seed}")
        for name in ("tp_size", "cp_size", "sp_size"):
            size = getattr(self.parallelism_config, name, 1) or 1
            if size > 1:
                allowed = "only data parallelism (DDP, FSDP, DeepSpeed) is supported, it must be 1"
                raise refusal(f"parallelism_config.{name}", size, allowed, f"ParallelismConfig({name}=1)")

    def check_evaluation_batch(self, processes: int | None = None) -> None:
        """Refuse an evaluation batch that would split the completions of a prompt.

        Args:
            processes: how many evaluate; the world size if left out.

        Raises:
            ValueError: `per_device_eval_batch_size` times the processes does not hold whole groups.
        """
        processes = self.world_size if processes is None else processes
        group = self.num_generations_eval or cast(int, self.num_generations)
        if (self.per_device_eval_batch_size * processes) % group:
            allowed = (
                f"times {processes} processes it must be a multiple of the {group} completions for each evaluation "
                "prompt (num_generations_eval, or num_generations)"
            )
            instead = f"per_device_eval_batch_size={group}"
            raise refusal("per_device_eval_batch_size", self.per_device_eval_batch_size, allowed, instead)


@cache
def _boolean_fields() -> dict[str, bool]:
    """Fields that hold a bool, and whether they may be None."""
    hints = get_type_hints(DROConfig)
    kinds = {field.name: hints[field.name] for field in fields(DROConfig) if field.init}
    return {name: kind != bool for name, kind in kinds.items() if kind in (bool, bool | None)}  # noqa: E721


def _as_dict(value: Any) -> dict[str, Any]:
    """A dict field after `_parse_json_fields`: a dict, or None for nothing."""
    return value or {}
