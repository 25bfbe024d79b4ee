"""What a run must keep when it is resumed, noted in each checkpoint's marker."""

import hashlib
from dataclasses import asdict, fields, is_dataclass
from typing import Any, cast

from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset
from trl import GRPOConfig

from .checks import has_prompts_at_hand
from .config import DROConfig
from .off_policy_rules import CORRECTION_FIELDS
from .policy_loss import canonical_name


# Inherited fields on which the order of prompts, what was made of them already, or the restored state depends.
_INHERITED_SETUP = (
    "beta",
    "use_bias_correction_kl",
    "temperature",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "seed",
    "shuffle_dataset",
    "scale_rewards",
    "reward_weights",
    "multi_objective_aggregation",
    "mask_truncated_completions",
    "sync_ref_model",
    "ref_model_sync_steps",
    "ref_model_mixup_alpha",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    # The checkpoint's optimizer brings its own, so that another value would be ignored in silence.
    "optim",
    "optim_args",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)

# Fields of this package that are compared as what they come to, or may change between a run and its continuation.
_RESOLVED = {"policy_loss", "policy_loss_kwargs", "dro_beta", "dro_level", "dro_huber_delta", "loss_scale_factor"}
_RESOLVED |= {*CORRECTION_FIELDS, "rollout_correction_preset", "dro_target_kl"}
_FREE = {"derived_fields", "reward_timeout", "vllm_importance_sampling_correction"}

# How many rows' prompts tell whether a dataset is the same.
_PROMPTS_COMPARED = 100


def engine_of(accelerator: Accelerator) -> str:
    """How parameters and optimizer states lie on the processes: "replicated", "FSDP2", "ZeRO-3" and the like."""
    state = accelerator.state
    if accelerator.distributed_type == DistributedType.FSDP:
        return f"FSDP{state.fsdp_plugin.fsdp_version}"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{state.deepspeed_plugin.zero_stage}"
    return "replicated"


def setup_of(args: DROConfig, train_dataset: Any, rewards: list[str], engine: str) -> dict[str, Any]:
    """What must be the same when a run is resumed.

    Args:
        args: the configuration.
        train_dataset: what the run trains on.
        rewards: names of the reward functions.
        engine: of [`engine_of`].

    Returns:
        Batches, objective, correction, optimizer, rewards and order of prompts, by the names that errors give.
    """
    inherited = {field.name for field in fields(GRPOConfig)}
    own = [field.name for field in fields(DROConfig) if field.name not in inherited | _FREE | _RESOLVED]
    scale = args.loss_scale_factor or args.max_completion_length
    correction = args.build_rollout_correction()
    return {
        "processes": args.world_size,
        "engine": engine,
        **_about_data(train_dataset),
        "rewards": rewards,
        **{name: getattr(args, name) for name in (*_INHERITED_SETUP, *own)},
        "policy_loss": canonical_name(args.policy_loss),
        "adapts_dro_beta": args.dro_target_kl is not None,
        **{f"policy_loss.{name}": value for name, value in _parameters(args).items()},
        "loss_scale_factor": scale if args.loss_agg_mode == "seq-mean-token-sum-norm" else None,
        "rollout_correction": None if correction is None else asdict(correction),
    }


def _parameters(args: DROConfig) -> dict[str, Any]:
    objective = args.build_policy_loss()
    if not is_dataclass(objective):  # one of the user's own
        return dict(cast(dict, args.policy_loss_kwargs or {}))
    return {field.name: getattr(objective, field.name) for field in fields(objective)}


def _about_data(dataset: Any) -> dict[str, Any]:
    """Number of rows, and a digest of some prompts, where the dataset is at hand."""
    if not isinstance(dataset, Dataset):
        return {"train_dataset_rows": None}
    about: dict[str, Any] = {"train_dataset_rows": len(dataset)}
    if has_prompts_at_hand(dataset):  # what is decoded, such as an image, is written otherwise each time
        step = max(1, len(dataset) // _PROMPTS_COMPARED)
        prompts = dataset.select_columns("prompt").with_format(None)
        text = repr([prompts[row]["prompt"] for row in range(0, len(dataset), step)])
        about["train_dataset_prompts"] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return about


def check_setup(saved: dict[str, Any], now: dict[str, Any], checkpoint: str) -> None:
    """Refuse to go on with another setup than that of the checkpoint.

    Raises:
        ValueError: something differs; the message lists what.
    """
    changed = {name: value for name, value in saved.items() if name in now and now[name] != value}
    if not changed:
        return
    differences = ", ".join(f"{name} was {value!r} and is {now[name]!r}" for name, value in changed.items())
    raise ValueError(
        f"resume_from_checkpoint={checkpoint!r} is refused: {differences}. A run goes on as it began. Write what it "
        f"was, or begin a new run from its weights: `model={checkpoint!r}` (command: model_name_or_path) and "
        "`resume_from_checkpoint=None`."
    )
