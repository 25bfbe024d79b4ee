"""The contract of a policy objective, and the registry of objectives.

An objective is a frozen dataclass whose fields are its parameters and whose `__call__` maps [`PolicyLossInputs`] to
[`PolicyLossOutput`]. It is a pure function of tensors: it sees no model, config or process group, and never reads a
value back to the host. Aggregation, rollout correction and the reduction of metrics happen outside.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import SequenceMatcher
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from .masking import masked_mean, safe_exp, upcast, zero_masked


@dataclass(frozen=True, eq=False)
class PolicyLossInputs:
    """What an objective sees of a micro-batch.

    Construction normalises the tensors once, so that no objective has to think about it:

    - `mask` becomes boolean; half precision becomes float32 (float32 and float64 are kept), and all floats share the
      dtype of `per_token_logps`;
    - `old_per_token_logps` and `advantages` are detached, `advantages` has shape (B, T);
    - **masked positions hold zeros** in all three, whatever they held before, and get no gradient. A NaN at a padding
      token therefore reaches neither the value nor the gradient of any objective.

    Args:
        per_token_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the completion tokens under the policy: the only tensor with a gradient.
        old_per_token_logps (`torch.Tensor` of shape `(B, T)`):
            The same tokens under the anchor policy.
        advantages (`torch.Tensor` of shape `(B, 1)` or `(B, T)`):
            One advantage per sequence, or one per token.
        mask (`torch.Tensor` of shape `(B, T)`):
            Nonzero on the tokens that are trained.

    Raises:
        ValueError: a shape does not fit.
    """

    per_token_logps: torch.Tensor
    old_per_token_logps: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    def __post_init__(self) -> None:
        shape = self.per_token_logps.shape
        if len(shape) != 2:
            raise ValueError(f"per_token_logps must have shape (B, T), one row per completion; got {tuple(shape)}.")
        for name in ("old_per_token_logps", "mask"):
            got = getattr(self, name).shape
            if got != shape:
                raise ValueError(f"{name} must have the shape of per_token_logps, {tuple(shape)}; got {tuple(got)}.")
        if self.advantages.ndim == 1:
            raise ValueError(
                f"advantages must have shape (B, 1) or (B, T); got {tuple(self.advantages.shape)}. "
                "For one advantage per sequence write advantages.unsqueeze(1)."
            )
        if self.advantages.shape not in (shape, (shape[0], 1)):
            raise ValueError(
                f"advantages must have shape {(shape[0], 1)} (one per sequence) or {tuple(shape)} (one per token); "
                f"got {tuple(self.advantages.shape)}."
            )

        mask = self.mask.bool()
        logps = upcast(self.per_token_logps)
        # The dataclass is frozen for its users; this is still construction.
        object.__setattr__(self, "mask", mask)
        object.__setattr__(self, "per_token_logps", zero_masked(logps, mask))
        for name in ("old_per_token_logps", "advantages"):
            object.__setattr__(self, name, zero_masked(getattr(self, name).detach().to(logps.dtype), mask))

    @property
    def log_ratio(self) -> torch.Tensor:
        """l = log pi - log pi_anchor, shape (B, T), not clamped."""
        return self.per_token_logps - self.old_per_token_logps

    @property
    def ratio(self) -> torch.Tensor:
        """r = exp(l), shape (B, T), with l clamped to +-20."""
        return safe_exp(self.log_ratio)


@dataclass(frozen=True, eq=False)
class PolicyLossOutput:
    """What an objective returns.

    A metric is reduced by the suffix of its name: `_min` and `_max` over the trained sequences, anything else as a
    mean, over the trained tokens for shape (B, T) and over the sequences with at least one trained token for (B, 1).

    Args:
        per_token_loss (`torch.Tensor` of shape `(B, T)`):
            The loss of each token before any reduction, finite at masked positions.
        metrics (`dict[str, torch.Tensor]`, *optional*):
            Tensors of shape (B, T) or (B, 1); booleans count as 0 and 1. They are detached here.

    Raises:
        ValueError: a shape does not fit.
    """

    per_token_loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.per_token_loss.shape
        if len(shape) != 2:
            raise ValueError(
                f"per_token_loss must have shape (B, T); got {tuple(shape)}. Return the loss of each token: "
                "reducing it to a scalar is the work of loss_agg_mode."
            )
        for name, value in self.metrics.items():
            if value.shape not in (shape, (shape[0], 1)):
                raise ValueError(
                    f"metric {name!r} must have shape {tuple(shape)} (per token) or {(shape[0], 1)} (per sequence); "
                    f"got {tuple(value.shape)}."
                )
        object.__setattr__(self, "metrics", {name: upcast(value.detach()) for name, value in self.metrics.items()})


class PolicyLoss(Protocol):
    """A policy objective: parameters held by the instance, tensors in, per-token loss out.

    A class may also define these class variables; the values here are what is assumed otherwise:

    - `decomposes_over_rows = True`: the loss of a row does not depend on the other rows of its micro-batch.
    - `correction_pooling = "token"`: how rollout correction weights multiply the loss, see
      [`apply_correction_weights`].
    - `recommended_loss_agg_mode = None`: the aggregation that the objective was published with, if it needs one.
    """

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput: ...


class PolicyLossParameter(NamedTuple):
    """One row of the parameter table of an objective; `default` is `"required"` where there is none."""

    name: str
    type: str
    default: Any


def apply_correction_weights(
    objective: PolicyLoss, per_token_loss: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Multiplies the per-token loss by rollout correction weights, pooled as the objective asks.

    `correction_pooling = "token"` takes the weights as they are. `"geometric"` gives every token of a sequence
    `exp(mean(log w))` over its trained tokens; a weight of zero on any of them zeroes the sequence.

    Args:
        objective: the objective that made the loss.
        per_token_loss: shape (B, T).
        weights: shape (B, T) or (B, 1); detached here, and free to hold anything at masked positions.
        mask: shape (B, T).

    Returns:
        The weighted loss, shape (B, T), zero at masked positions.

    Raises:
        ValueError: the weights' shape does not fit, or the objective asks for an unknown pooling.
    """
    if weights.shape not in (mask.shape, (mask.shape[0], 1)):
        raise ValueError(
            f"correction weights must have shape {tuple(mask.shape)} or {(mask.shape[0], 1)}; "
            f"got {tuple(weights.shape)}."
        )
    mask = mask.bool()
    weights = zero_masked(weights.detach().to(per_token_loss.dtype), mask)
    pooling = getattr(objective, "correction_pooling", "token")
    if pooling == "geometric":
        weights = masked_mean(weights.log(), mask, dim=1, keepdim=True).exp()
    elif pooling != "token":
        raise ValueError(
            f"{type(objective).__name__}: correction_pooling={pooling!r} is unknown; use 'token' or 'geometric'."
        )
    return zero_masked(per_token_loss * weights, mask)


_CLASSES: dict[str, type] = {}  # canonical names and aliases
_CANONICAL: dict[str, str] = {}  # the same keys

_NOT_AN_OBJECTIVE = {
    "bypass_mode": (
        "it is not a loss but a way to wire one up. Pick the objective by its own name and write "
        '`anchor_policy="sampling"` to use the log-probs of the inference engine as the anchor, or keep the default '
        'anchor with rollout correction, `rollout_is="token"` or `rollout_correction_preset`.'
    ),
    "vespo": (
        "its weight is a function of a sequence's whole importance weight, in which the mismatch of the inference "
        "engine is already contained, so it cannot be separated into an objective, a rollout correction and an "
        "aggregation that are chosen independently. The nearest objectives that work on whole sequences are "
        '"gspo" and "dro" with level="sequence". Write policy_loss="gspo", loss_agg_mode="seq-mean-token-mean".'
    ),
    "bnpo": (
        'it is an aggregation, not an objective. Write `loss_agg_mode="token-mean"` with any objective. The two are '
        "equal where a window is one micro-batch on one process; token-mean does not depend on the cut."
    ),
}

T = TypeVar("T", bound=type)


def nearest_first(word: str, words: Iterable[str]) -> list[str]:
    """The words, those that `word` begins and then the most similar first; for error messages."""
    word = word.lower()

    def distance(known: str) -> tuple[bool, float, str]:
        return not known.lower().startswith(word), -SequenceMatcher(None, word, known.lower()).ratio(), known

    return sorted(words, key=distance)


def register_policy_loss(*names: str) -> Callable[[T], T]:
    """Class decorator that makes an objective available by name.

    Args:
        *names: the canonical name, then any aliases.

    Raises:
        ValueError: no name is given, a name is taken or not a plain string, or the class is not an objective.

    Example:

        @register_policy_loss("my_loss")
        @dataclass(frozen=True, kw_only=True)
        class MyLoss:
            scale: float = 1.0

            def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
                return PolicyLossOutput(-self.scale * inputs.advantages * inputs.ratio)
    """
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError('register_policy_loss needs at least one name: write @register_policy_loss("my_loss").')
    for name in names:
        if "." in name:
            raise ValueError(f"policy loss name {name!r} must not contain a dot: dotted names are import paths.")

    def register(cls: T) -> T:
        _check_objective_class(cls, f"{cls!r}")
        _load_catalogue()  # so that the names of the catalogue are taken whoever is imported first
        for name in names:
            if name in _CLASSES:
                owner = _CLASSES[name]
                raise ValueError(
                    f"policy loss name {name!r} is taken by {owner.__module__}.{owner.__qualname__}; choose another."
                )
        for name in names:
            _CLASSES[name] = cls
            _CANONICAL[name] = names[0]
        return cls

    return register


def list_policy_losses() -> list[str]:
    """Canonical names of all registered objectives, sorted."""
    _load_catalogue()
    return sorted(set(_CANONICAL.values()))


def resolve_policy_loss(name_or_path: str) -> type:
    """The class behind a registered name, an alias, or a dotted path such as `"my_package.losses.MyLoss"`.

    Raises:
        ValueError: nothing usable is found under that name.
    """
    _load_catalogue()
    if not isinstance(name_or_path, str):
        raise ValueError(
            f"policy_loss={name_or_path!r} is refused: it must be a string, a registered name or a dotted path. Write "
            "`policy_loss='dro'` instead."
        )
    if name_or_path in _CLASSES:
        return _CLASSES[name_or_path]
    if name_or_path in _NOT_AN_OBJECTIVE:
        raise ValueError(f"policy_loss={name_or_path!r} is not available: {_NOT_AN_OBJECTIVE[name_or_path]}")
    if "." in name_or_path:
        return _import_class(name_or_path)
    known = nearest_first(name_or_path, _CLASSES)
    raise ValueError(
        f"policy_loss={name_or_path!r} is unknown. Registered, nearest first: {', '.join(known)}. Write "
        f"`policy_loss={known[0]!r}`; a class of your own goes by its dotted path, such as 'my_package.losses.MyLoss'."
    )


def canonical_name(name_or_path: str) -> str:
    """The canonical name of an objective; a dotted path to an unregistered class is its own name.

    Raises:
        ValueError: as [`resolve_policy_loss`].
    """
    cls = resolve_policy_loss(name_or_path)
    if name_or_path in _CANONICAL:
        return _CANONICAL[name_or_path]
    return next((_CANONICAL[name] for name, known in _CLASSES.items() if known is cls), name_or_path)


def policy_loss_aliases(name: str) -> list[str]:
    """The other names of a registered objective, sorted."""
    canonical = canonical_name(name)
    return sorted(alias for alias, known in _CANONICAL.items() if known == canonical != alias)


def policy_loss_parameters(cls: type) -> list[PolicyLossParameter]:
    """The parameters of an objective as (name, type, default or "required")."""
    rows = []
    for parameter in _parameters(cls):
        default = "required" if parameter.default is parameter.empty else parameter.default
        kind = "Any" if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation)
        rows.append(PolicyLossParameter(parameter.name, kind, _metadata(cls, parameter.name).get("default", default)))
    return rows


def get_policy_loss(name: str, /, **params: Any) -> PolicyLoss:
    """Makes an objective.

    Args:
        name: a registered name, an alias, or a dotted path to a class.
        **params: the parameters of that objective.

    Raises:
        ValueError: the name or a parameter is unknown, a parameter is missing, or a value is not allowed.
    """
    cls = resolve_policy_loss(name)
    known = {parameter.name: parameter for parameter in _parameters(cls)}
    for param in params:
        if param not in known:
            near = nearest_first(param, known)
            has = (
                f"it has, nearest first: {', '.join(near)}. Write `{near[0]}`" if near else "it has none. Leave it out"
            )
            raise ValueError(f"policy_loss={name!r} has no parameter {param!r}; {has}.")
    for param, parameter in known.items():
        if parameter.default is parameter.empty and param not in params:
            help_text = _metadata(cls, param).get("help", "it has no default")
            raise ValueError(f"policy_loss={name!r} needs a value for {param!r}: {help_text}.")
    return cls(**params)


def _parameters(cls: type) -> list[inspect.Parameter]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter for parameter in inspect.signature(cls).parameters.values() if parameter.kind not in variadic]


def _metadata(cls: type, parameter: str) -> Mapping[str, Any]:
    """`help` for an error message and the `default` to show, where a dataclass gives them in `field(metadata=...)`."""
    found = [f.metadata for f in fields(cls) if f.name == parameter] if is_dataclass(cls) else []
    return found[0] if found else {}


def _load_catalogue() -> None:
    import_module("trl_dro.objectives")


def _check_objective_class(cls: object, origin: str) -> None:
    # A class always *is* callable; what matters is whether its instances are.
    if not isinstance(cls, type) or not any("__call__" in vars(base) for base in cls.__mro__):
        raise ValueError(
            f"{origin} is not a policy loss: it must be a class with a method "
            "__call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput."
        )


def _import_class(path: str) -> type:
    module_path, _, class_name = path.rpartition(".")
    # As TRL does for reward functions, but last, so that nothing installed is shadowed.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_path)
    except Exception as error:
        raise ValueError(
            f"policy_loss={path!r}: importing {module_path!r} failed with {type(error).__name__}: {error}. "
            f"Write 'package.module.Class' for a module that Python can import from {os.getcwd()!r}, or a registered "
            f"name: {', '.join(list_policy_losses())}."
        ) from error
    if not hasattr(module, class_name):
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        found = ", ".join(nearest_first(class_name, classes)) or "none"
        raise ValueError(f"policy_loss={path!r}: {module_path!r} has no {class_name!r}. Its classes: {found}.")
    cls = getattr(module, class_name)
    _check_objective_class(cls, f"policy_loss={path!r}")
    return cls
