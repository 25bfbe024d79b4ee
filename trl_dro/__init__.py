"""Direct Reward Optimization (DRO) for Hugging Face TRL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0"

__all__ = [
    "DROConfig",
    "DROTrainer",
    "PolicyLossInputs",
    "PolicyLossOutput",
    "__version__",
    "aggregate_loss",
    "get_policy_loss",
    "list_policy_losses",
    "register_policy_loss",
]

# Where each name lives. Lazy, so that `import trl_dro.objectives` loads neither trl nor transformers.
_MODULES = {
    "DROConfig": "config",
    "DROTrainer": "trainer",
    "PolicyLossInputs": "policy_loss",
    "PolicyLossOutput": "policy_loss",
    "aggregate_loss": "aggregation",
    "get_policy_loss": "policy_loss",
    "list_policy_losses": "policy_loss",
    "register_policy_loss": "policy_loss",
}

if TYPE_CHECKING:
    from .aggregation import aggregate_loss
    from .config import DROConfig
    from .policy_loss import (
        PolicyLossInputs,
        PolicyLossOutput,
        get_policy_loss,
        list_policy_losses,
        register_policy_loss,
    )
    from .trainer import DROTrainer


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
