"""What the trainer does to models beside training them: dropout, position ids, the reference adapter."""

import functools
import inspect
import warnings
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .config import DROConfig
from .config_rules import refusal


if TYPE_CHECKING:
    from peft import PeftModel


# Settings of a model's own generation_config by which other tokens, or other numbers of them, are sampled, and their
# neutral values. transformers applies them wherever the trainer's are None.
_MODEL_SAMPLING: dict[str, Any] = {
    "min_p": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "guidance_scale": None,
    "watermarking_config": None,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "return_dict_in_generate": False,
}


def is_adapter_model(model: Any) -> bool:
    """Whether this is a model (not a name) wrapped by peft."""
    return not isinstance(model, str) and is_peft_model(model)


def adapter_kind(model: Any) -> str | None:
    """The kind of adapter that a model has, such as `lora`, None without one."""
    if not is_adapter_model(model):
        return None
    config = next(iter(model.peft_config.values()))
    return str(getattr(config.peft_type, "value", config.peft_type)).lower()


def check_sync_with_adapter(args: DROConfig) -> None:
    """Refuse to sync the reference model of an adapter.

    Raises:
        ValueError: `sync_ref_model` is set.
    """
    if args.sync_ref_model:
        allowed = "with an adapter the reference is the frozen base model, there is no copy to sync"
        raise refusal("sync_ref_model", True, allowed, "sync_ref_model=False")


def check_reference(model: Any, args: DROConfig, peft_config: Any) -> None:
    """Refuse what TRL refuses after loading everything, or with an error from inside the Hub client.

    Raises:
        ValueError: there is no model, or its reference cannot be had or synced.
    """
    if not isinstance(model, (str, nn.Module)):
        raise ValueError(
            f"model={model!r} is refused: it must be a name or path, or a model. Write `model='Qwen/Qwen3-0.6B'`."
        )
    adapter = peft_config is not None or is_adapter_model(model)
    if adapter:
        check_sync_with_adapter(args)
    if (
        args.needs_reference
        and not adapter
        and not isinstance(model, str)
        and not cast(Any, model).config.name_or_path
    ):
        name, value = ("beta", args.beta) if args.beta else ("anchor_policy", args.anchor_policy)
        allowed = "the reference model is loaded from where the policy came from, and this model was built in memory"
        instead = "model.save_pretrained(path); DROTrainer(model=path, ...)"
        raise refusal(name, value, allowed, instead)


def add_reference_adapter(model: "PeftModel") -> None:
    """Add a frozen copy of the active adapter, named `ref`: the reference of an adapter that is trained further.

    TRL does this for an adapter named `default`, and fails for any other name.

    Raises:
        ValueError: there is no single adapter to copy, or one that peft cannot hold twice.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    names = list(model.active_adapters)
    if len(names) != 1 or "ref" in model.peft_config:
        raise ValueError(
            f"The reference of an adapter is a copy of it named 'ref', but the adapters here are "
            f"{list(model.peft_config)} with {names} active. Write `model.set_adapter(...)` with the one to train, "
            "and rename one called 'ref'."
        )
    try:
        model.add_adapter("ref", model.peft_config[names[0]])
    except ValueError as error:
        raise ValueError(
            f"peft cannot hold a second copy of the adapter {names[0]!r} as its reference ({error}). Write `beta=0.0` "
            "and anchor_policy='old', or merge the adapter and pass a fresh `peft_config`."
        ) from error
    state = get_peft_model_state_dict(model, adapter_name=names[0], save_embedding_layers=False)
    set_peft_model_state_dict(model, state, adapter_name="ref")


def disable_functional_dropout(model: nn.Module) -> None:
    """Zero the dropout rates that modules hold as numbers, which TRL's `disable_dropout` (modules only) misses."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def without_model_sampling(model: Any) -> dict[str, None]:
    """The attributes to set on `model.generation_config` while the trainer samples by its own settings alone."""
    return {name: None for name in _MODEL_SAMPLING if getattr(model.generation_config, name, None) is not None}


def warn_of_model_sampling(model: Any, generation_config: Any) -> None:
    """Say which sampling settings of the model are left out.

    Args:
        model: the policy.
        generation_config: the trainer's settings, which come first.
    """
    left_out = {
        name: value
        for name in without_model_sampling(model)
        if (value := getattr(model.generation_config, name)) not in (_MODEL_SAMPLING[name], [])
        and getattr(generation_config, name, None) is None
    }
    if left_out:
        written = ", ".join(f"{name}={value!r}" for name, value in left_out.items())
        warnings.warn(
            f"The model's own generation_config sets {written}. It is left out in training, as with vLLM, so that "
            "completions are scored as they are sampled. Write in the DROConfig what is to apply.",
            stacklevel=3,
        )


def count_positions_from_the_mask(model: nn.Module) -> int | None:
    """Make a model with absolute positions score a row as it generated it, whatever padding is on its left.

    `generate` counts positions from the first real token. TRL scores without position ids, so a model with a table of
    absolute positions (GPT-2 and its like) would count from the first column instead. Models with rotary or relative
    positions do not care where counting starts, and stay as they are.

    Returns:
        How many positions the table has; None for a model without one.
    """
    base: Any = cast(Any, model).get_base_model() if is_peft_model(model) else model
    # A multimodal model makes its own, with more than one axis.
    multimodal = base.config.get_text_config() is not base.config
    rotary = any(hasattr(base.config, name) for name in ("rope_parameters", "rope_theta", "rotary_dim", "alibi"))
    if multimodal or rotary or "position_ids" not in inspect.signature(type(base).forward).parameters:
        return None

    def add_position_ids(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        mask: Tensor | None = kwargs.get("attention_mask")
        if kwargs.get("fused_lm_head") and mask is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        return args, kwargs

    base.register_forward_pre_hook(add_position_ids, with_kwargs=True)
    return getattr(base.config, "max_position_embeddings", None)


def checked_batching(model: Any) -> dict[str, Any]:
    """Attributes of the model under which continuous batching works, or says why it does not.

    Its cache has the precision of the weights, which the keys and values that autocast makes do not fit: the model
    runs without. And where it fails, in a thread of its own, transformers leaves a line in the log and no completions.
    """
    generate_batch = model.generate_batch

    def checked(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate_batch(inputs, *args, **kwargs)
        errors = [output.error for output in outputs.values() if output.error is not None]
        if errors or len(outputs) < len(inputs):
            said = errors[0] if errors else "its thread ended"
            raise RuntimeError(
                f"transformers' continuous batching failed for {len(inputs) - len(outputs) + len(errors)} of "
                f"{len(inputs)} prompts: {said}. The log has the traceback. Write "
                "`use_transformers_continuous_batching=False` to generate without it."
            )
        return outputs

    return {"generate_batch": checked, "forward": MethodType(type(model).forward, model)}


def gather_trained_head(model: Any) -> None:
    """Gather an LM head that is trained beside an adapter (`modules_to_save`), under FSDP2, so that its gradient is
    reduced.

    TRL reads the head's weight without calling the head. FSDP2 then hands out the shards, and of what TRL makes whole
    of them each process would keep its own gradient. Gathered before, the head's gradient goes the usual way.
    """
    if not (isinstance(model, FSDPModule) and is_peft_model(model) and torch.is_grad_enabled()):
        return
    head = cast(Any, model).get_output_embeddings()
    sharded = isinstance(head, FSDPModule) and isinstance(getattr(head, "weight", None), DTensor)
    if sharded and head.weight.requires_grad:
        head.unshard()


def names_not_loaded(model: nn.Module, load_result: Any) -> list[str]:
    """Names that a state dict had and the model has not, or the other way round.

    Args:
        model: what the state dict was loaded into.
        load_result: what `load_state_dict` returned.

    Returns:
        Without the names of tied weights, which are in the file under one of their names.
    """
    held = model.state_dict()
    loaded = {tensor.data_ptr() for name, tensor in held.items() if name not in load_result.missing_keys}
    missing = [name for name in load_result.missing_keys if name in held and held[name].data_ptr() not in loaded]
    return missing + list(load_result.unexpected_keys)


def load_converted(model: Any, directory: str) -> None:
    """Load weights that `save_pretrained` wrote under other names than the model has in memory.

    transformers saves some models (mixtures of experts, most with pictures) in the layout of the Hub and converts when
    it loads them by `from_pretrained`. Its trainer does not convert: it keeps the weights that are in memory.

    Args:
        model: a transformers model.
        directory: what `save_pretrained` wrote.

    Raises:
        ValueError: some weights are not in the directory.
    """
    dtype = functools.reduce(torch.promote_types, {parameter.dtype for parameter in model.parameters()})
    saved, found = type(model).from_pretrained(directory, dtype=dtype, output_loading_info=True)
    lacking = [*found["missing_keys"], *found["mismatched_keys"]]
    if lacking:
        raise ValueError(
            f"The weights in {directory} are not those of this {type(model).__name__}: {lacking[:3]} and others are "
            f"not there ({len(lacking)} in all). Write `model={directory!r}` to train what is there."
        )
    model.load_state_dict(saved.state_dict())
