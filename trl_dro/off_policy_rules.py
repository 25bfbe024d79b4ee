"""Rules of the configuration about what is corrected, compared and adapted: rollouts, baselines, dro_beta."""

from typing import Any

from .config_rules import derive, field_defaults, is_number, number_from_text, refusal
from .masking import LARGEST
from .policy_loss import canonical_name, nearest_first
from .rollout_correction import PRESETS, STATISTICS, Rejection, RolloutCorrection, preset_fields


CORRECTION_FIELDS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_threshold_lower",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "rollout_rs_threshold_lower",
)


def resolve_correction(config: Any) -> None:
    """Turn a preset into its fields, lists given as text or a number into lists, and check them.

    Raises:
        ValueError: a field is bad, or nothing would read it.
    """
    _normalise_lists(config)
    _apply_preset(config)
    _refuse_idle_fields(config)
    correction = build_correction(config)
    if correction is None:
        return
    if config.anchor_policy == "sampling":
        name = correcting_field(config)
        allowed = "with anchor_policy='sampling' it would count the engine's mismatch twice, it must be None"
        raise refusal(name, getattr(config, name), allowed, "anchor_policy='old'")
    if correction.level is not None and config.vllm_importance_sampling_correction:
        allowed = f"rollout_is={config.rollout_is!r} corrects the same mismatch (allowed: False, None)"
        raise refusal(
            "vllm_importance_sampling_correction", True, allowed, "vllm_importance_sampling_correction=False"
        )


def correcting_field(config: Any) -> str:
    """The field by which a correction was asked for."""
    names = ("rollout_correction_preset", "rollout_is", "rollout_rs")
    return next(name for name in names if getattr(config, name) is not None)


def corrects_rollouts(config: Any) -> bool:
    """Whether verl's correction is asked for, be it to switch it off, which takes the place of TRL's."""
    return any(getattr(config, name) is not None for name in ("rollout_correction_preset", "rollout_is", "rollout_rs"))


def build_correction(config: Any) -> RolloutCorrection | None:
    """The correction that the fields describe, None without one.

    Raises:
        ValueError: a field is bad.
    """
    if config.rollout_is is None and not config.rollout_rs:
        return None
    low, high = config.rollout_is_threshold_lower, config.rollout_is_threshold
    if low is not None and low >= high:
        allowed = f"it must be below rollout_is_threshold={high!r}"
        raise refusal("rollout_is_threshold_lower", low, allowed, f"rollout_is_threshold_lower={1 / (1 + high):.2g}")
    return RolloutCorrection(
        level=config.rollout_is,
        threshold=high,
        threshold_lower=low,
        batch_normalize=config.rollout_is_batch_normalize,
        rejections=tuple(_rejections(config)),
    )


def _normalise_lists(config: Any) -> None:
    given = config.rollout_rs
    if isinstance(given, str):
        given = [given]
    if isinstance(given, (list, tuple)) and all(isinstance(name, str) for name in given):  # `token_k1,token_k2` too
        config.rollout_rs = [part.strip() for name in given for part in name.split(",") if part.strip()]
    for name in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
        value = getattr(config, name)
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        values = [number_from_text(item) for item in values]  # YAML reads `1e-2` as text
        if value is not None and (isinstance(value, (list, tuple)) or is_number(values[0])):
            setattr(config, name, [float(item) if is_number(item) else item for item in values])
    for name, example in (
        ("rollout_rs", "rollout_rs=['seq_mean_k3']"),
        ("rollout_rs_threshold", "rollout_rs_threshold=[0.01]"),
        ("rollout_rs_threshold_lower", "rollout_rs_threshold_lower=[0.5]"),
    ):
        value = getattr(config, name)
        if value is not None and not (isinstance(value, list) and value):
            raise refusal(name, value, "it must be a list with at least one entry, or None", example)


def _apply_preset(config: Any) -> None:
    preset = config.rollout_correction_preset
    if preset is None:
        return
    if not isinstance(preset, str):
        allowed = "it must be the name of a preset or None"
        raise refusal("rollout_correction_preset", preset, allowed, "rollout_correction_preset='decoupled_token_is'")
    try:
        fields = preset_fields(preset)
    except ValueError as error:
        nearest = nearest_first(str(preset), list(PRESETS))[0]
        instead = f"rollout_correction_preset={nearest!r}"
        raise refusal("rollout_correction_preset", preset, str(error).rstrip("."), instead) from error
    if preset == "bypass_ppo_clip" and canonical_name(config.policy_loss) != "ppo_clip":
        allowed = "it is anchor_policy='sampling' with policy_loss='ppo_clip'"
        instead = "rollout_correction_preset=None` and `anchor_policy='sampling'"
        raise refusal("rollout_correction_preset", preset, allowed, instead)
    defaults = field_defaults(type(config))
    for name in (*CORRECTION_FIELDS, *(("anchor_policy",) if "anchor_policy" in fields else ())):
        given, of_preset = getattr(config, name), fields.get(name, defaults[name])
        if given not in (defaults[name], of_preset):
            written = {**fields, name: given}
            instead = ", ".join(f"{key}={value!r}" for key, value in written.items())
            allowed = f"rollout_correction_preset={preset!r} sets it to {of_preset!r}; write out what the preset sets"
            raise refusal(name, given, allowed, instead)
        if given != of_preset:
            derive(config, name, list(of_preset) if isinstance(of_preset, list) else of_preset)


def _refuse_idle_fields(config: Any) -> None:
    """Refuse thresholds of what is not switched on."""
    defaults = field_defaults(type(config))
    for switch, example in (("rollout_is", "'token'"), ("rollout_rs", "['seq_mean_k3']")):
        if getattr(config, switch) is not None:
            continue
        for name in CORRECTION_FIELDS:
            if name.startswith(f"{switch}_") and getattr(config, name) != defaults[name]:
                allowed = f"without {switch} nothing reads it"
                raise refusal(name, getattr(config, name), allowed, f"{switch}={example}")


def _rejections(config: Any) -> list[Rejection]:
    statistics = config.rollout_rs or []
    for name in statistics:
        if name not in STATISTICS:
            nearest = nearest_first(str(name), STATISTICS)
            allowed = f"its statistics are {', '.join(map(repr, nearest))}"
            raise refusal("rollout_rs", statistics, allowed, f"rollout_rs=[{nearest[0]!r}]")
    if len(set(statistics)) < len(statistics):
        unique = list(dict.fromkeys(statistics))
        raise refusal("rollout_rs", statistics, "a statistic stands twice", f"rollout_rs={unique}")
    if not statistics:
        return []
    upper = _bounds(config, "rollout_rs_threshold", statistics)
    lower = _lower_bounds(config, statistics)
    for name, low, high in zip(statistics, lower, upper, strict=True):
        if low is not None and low >= high:
            pairs = [(lo, hi) for lo, hi in zip(lower, upper, strict=True) if lo is not None]
            fitting = [lo if lo < hi else round(1 / (1 + hi), 4) for lo, hi in pairs]
            allowed = f"of {name} it must be below the upper bound {high!r}"
            raise refusal("rollout_rs_threshold_lower", low, allowed, f"rollout_rs_threshold_lower={fitting}")
    return [
        Rejection(statistic=name, threshold=high, threshold_lower=low)
        for name, high, low in zip(statistics, upper, lower, strict=True)
    ]


def _bounds(config: Any, field: str, wanted: list[str]) -> list[float]:
    """One number > 0 for each of the wanted statistics."""
    values = getattr(config, field) or []
    if len(values) != len(wanted) or not all(is_number(value) and 0 < value <= LARGEST for value in values):
        example = [0.5 if field.endswith("_lower") else 2.0 if name.endswith("k1") else 0.01 for name in wanted]
        allowed = f"it must have one finite number > 0 for each of {', '.join(wanted)}"
        raise refusal(field, getattr(config, field), allowed, f"{field}={example}")
    return values


def _lower_bounds(config: Any, statistics: list[str]) -> list[float | None]:
    """The lower bounds of the k1 statistics, which are ratios, and None for the others."""
    field, given = "rollout_rs_threshold_lower", config.rollout_rs_threshold_lower
    ratios = [name for name in statistics if name.endswith("k1")]
    if given is not None and len(given) == len(statistics):  # with None for the others
        for name, value in zip(statistics, given, strict=True):
            if value is not None and name not in ratios:
                allowed = f"{name} is never negative and has no lower bound"
                raise refusal(field, given, allowed, f"{field}={[0.5] * len(ratios) or None}")
        given = [value for name, value in zip(statistics, given, strict=True) if name in ratios]
    elif given is not None and not ratios:
        raise refusal(field, given, "only k1 statistics have a lower bound", f"{field}=None")
    if not ratios:
        return [None] * len(statistics)
    numbers = given or []
    if len(numbers) != len(ratios) or not all(is_number(value) and 0 < value <= LARGEST for value in numbers):
        smallest = "the smallest ratio engine / trainer"
        allowed = f"it must have one finite number > 0, {smallest}, for each of {', '.join(ratios)}"
        raise refusal(field, config.rollout_rs_threshold_lower, allowed, f"{field}={[0.5] * len(ratios)}")
    remaining = iter(numbers)
    return [next(remaining) if name in ratios else None for name in statistics]


def check_baseline(config: Any) -> None:
    """Refuse a baseline that could not act, and a temperature that nothing reads.

    Raises:
        ValueError: see above.
    """
    baseline, temperature = config.advantage_baseline, config.advantage_baseline_temperature
    if baseline != "mean" and config.multi_objective_aggregation == "normalize_then_sum":
        allowed = "multi_objective_aggregation='normalize_then_sum' centres the rewards again, it must be 'mean'"
        raise refusal("advantage_baseline", baseline, allowed, "multi_objective_aggregation='sum_then_normalize'")
    if baseline != "soft" and temperature is not None:
        allowed = f"advantage_baseline={baseline!r} does not use it"
        raise refusal("advantage_baseline_temperature", temperature, allowed, "advantage_baseline='soft'")
    if baseline == "soft" and temperature is None and not config.is_dro:
        allowed = f"policy_loss={config.policy_loss!r} has no dro_beta to take it from"
        raise refusal("advantage_baseline_temperature", None, allowed, "advantage_baseline_temperature=0.1")


def check_adaptive_beta(config: Any) -> None:
    """Refuse a target for a distance that is always zero.

    Raises:
        ValueError: see above.
    """
    if config.dro_target_kl is not None and not config.batch_plan().penalty_alive:
        allowed = "each generated batch is used up in one optimizer step, so the policy is never away from its anchor"
        raise refusal("dro_target_kl", config.dro_target_kl, allowed, "num_iterations=4")
