"""What the trainer does to models beside training them: dropout, position ids, the reference adapter."""

import inspect
from typing import TYPE_CHECKING, Any, cast

from accelerate.utils import is_peft_model
from torch import Tensor, nn

from .config import DROConfig
from .config_rules import refusal


if TYPE_CHECKING:
    from peft import PeftModel


def is_adapter_model(model: Any) -> bool:
    """Whether this is a model (not a name) wrapped by peft."""
    return not isinstance(model, str) and is_peft_model(model)


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
        ValueError: the reference model cannot be had, or cannot be synced.
    """
    adapter = peft_config is not None or is_adapter_model(model)
    if adapter:
        check_sync_with_adapter(args)
    if args.needs_reference and not adapter and not isinstance(model, str) and not model.config.name_or_path:
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


def count_positions_from_the_mask(model: nn.Module) -> None:
    """Make a model with absolute positions score a row as it generated it, whatever padding is on its left.

    `generate` counts positions from the first real token. TRL scores without position ids, so a model with a table of
    absolute positions (GPT-2 and its like) would count from the first column instead. Models with rotary or relative
    positions do not care where counting starts, and stay as they are.
    """
    base: Any = cast(Any, model).get_base_model() if is_peft_model(model) else model
    # A multimodal model makes its own, with more than one axis.
    multimodal = base.config.get_text_config() is not base.config
    rotary = any(hasattr(base.config, name) for name in ("rope_parameters", "rope_theta", "rotary_dim", "alibi"))
    if multimodal or rotary or "position_ids" not in inspect.signature(type(base).forward).parameters:
        return

    def add_position_ids(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        mask: Tensor | None = kwargs.get("attention_mask")
        if kwargs.get("fused_lm_head") and mask is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        return args, kwargs

    base.register_forward_pre_hook(add_position_ids, with_kwargs=True)
