"""Correction of rollouts whose log-probs at the inference engine differ from the trainer's.

The engine samples in its own kernels and precision, perhaps with weights some steps old, so a token's log-prob there
(`sampling_per_token_logps`) is not the trainer's (`old_per_token_logps`). With

    log_ratio = old_per_token_logps - sampling_per_token_logps

importance weights re-weight what was sampled, rejection leaves out what is too far off, and metrics say how far off it
is. Definitions and names are verl's (https://github.com/volcengine/verl, `docs/algo/rollout_corr.md`); truncation is
that of https://fengyao.notion.site/off-policy-rl, rejection that of https://richardli.xyz/rl-collapse.

Everything here is a pure function of tensors. Statistics are over the rows it is given: give it the rows of all ranks.
A log-prob that is NaN or infinite is one the engine could not report: its token counts as unchanged, ratio 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .masking import LARGEST, MAX_LOG_RATIO, k3_estimate, masked_mean, masked_sum, safe_exp, upcast, zero_masked


LEVELS = ("token", "sequence")

# Divergences k1, k2, k3 of a token, or their sum, mean or maximum over a sequence. (The maximum of k1 is not among
# verl's statistics.)
STATISTICS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)

# verl's presets with their default thresholds, in the names of `DROConfig`.
_TOKEN = {"rollout_is": "token"}
_SEQUENCE = {"rollout_is": "sequence"}
_GEOMETRIC = {
    "rollout_rs": ["seq_mean_k1"],
    "rollout_rs_threshold": [1.001],
    "rollout_rs_threshold_lower": [0.999],
}
_K3 = {"rollout_rs": ["seq_mean_k3"], "rollout_rs_threshold": [0.01]}
PRESETS: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_seq_is_rs": {
        **_SEQUENCE,
        "rollout_rs": ["seq_sum_k1"],
        "rollout_rs_threshold": [2.0],
        "rollout_rs_threshold_lower": [0.5],
    },
    "decoupled_geo_rs": _GEOMETRIC,
    "decoupled_geo_rs_seq_tis": {**_SEQUENCE, **_GEOMETRIC},
    "decoupled_geo_rs_token_tis": {**_TOKEN, **_GEOMETRIC},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": {**_SEQUENCE, **_K3},
    "decoupled_k3_rs_token_tis": {**_TOKEN, **_K3},
    "bypass_ppo_clip": {"anchor_policy": "sampling"},
}

_FOLLOWS_POLICY = (
    "it corrects the policy that is being trained against the engine, anew at each step, so that what counts in a "
    "window would change under way"
)
# verl's other presets: why they are not here, and what comes nearest.
REFUSED_PRESETS: dict[str, tuple[str, str]] = {
    "bypass_ppo_clip_geo_rs": (_FOLLOWS_POLICY, "rollout_correction_preset='decoupled_geo_rs'"),
    "bypass_ppo_clip_k3_rs": (_FOLLOWS_POLICY, "rollout_correction_preset='decoupled_k3_rs'"),
    "bypass_pg_is": (_FOLLOWS_POLICY, "rollout_correction_preset='decoupled_seq_is'"),
    "bypass_pg_geo_rs": (_FOLLOWS_POLICY, "rollout_correction_preset='decoupled_geo_rs'"),
    "bypass_pg_geo_rs_seq_tis": (_FOLLOWS_POLICY, "rollout_correction_preset='decoupled_geo_rs_seq_tis'"),
    "bypass_pg_geo_rs_token_tis": (_FOLLOWS_POLICY, "rollout_correction_preset='decoupled_geo_rs_token_tis'"),
}


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """One statistic with its bounds, see [`rejection_mask`]."""

    statistic: str
    threshold: float
    threshold_lower: float | None = None

    def __post_init__(self) -> None:
        _check_choice("statistic", self.statistic, STATISTICS)
        _check_bounds(self.threshold, self.threshold_lower)
        if self.statistic.endswith("k1") and self.threshold_lower is None:
            raise ValueError(
                f"{self.statistic} is bounded on both sides, as a ratio: threshold_lower is missing. Write "
                f"threshold_lower={1 / self.threshold:g}."
            )
        if not self.statistic.endswith("k1") and self.threshold_lower is not None:
            raise ValueError(
                f"{self.statistic} is never negative and has no lower bound: threshold_lower={self.threshold_lower!r} "
                "is not allowed. Write threshold_lower=None."
            )


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """Importance weights and rejections that are applied together, each measured on all trained tokens.

    Args:
        level: of the importance weights, `"token"` or `"sequence"`; None for no weights.
        threshold: see [`importance_weights`].
        threshold_lower: see [`importance_weights`].
        batch_normalize: see [`importance_weights`].
        rejections: a token is left out when one of them rejects it.
    """

    level: str | None = None
    threshold: float = 2.0
    threshold_lower: float | None = None
    batch_normalize: bool = False
    rejections: tuple[Rejection, ...] = ()

    def __post_init__(self) -> None:
        if self.level is not None:
            _check_choice("level", self.level, LEVELS)
        _check_bounds(self.threshold, self.threshold_lower)

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor | None, Tensor, dict[str, Tensor]]:
        """Correct a batch.

        Args:
            log_ratio: (B, T).
            mask: (B, T), true on trained tokens.

        Returns:
            The weights (B, T), or None where there are none; the mask (B, T) of the tokens that are still trained; the
            metrics of both.
        """
        weights: Tensor | None = None
        metrics: dict[str, Tensor] = {}
        if self.level is not None:
            weights, metrics = importance_weights(
                log_ratio,
                mask,
                level=self.level,
                threshold=self.threshold,
                threshold_lower=self.threshold_lower,
                batch_normalize=self.batch_normalize,
            )
        kept = mask.bool()
        for rejection in self.rejections:
            accepted, of_one = rejection_mask(log_ratio, mask, **vars(rejection))
            kept = kept & accepted.bool()
            metrics |= of_one
        if self.rejections:
            metrics |= _rejected_shares("rollout_rs", kept, mask.bool())
        return weights, torch.where(kept, mask, torch.zeros_like(mask)), metrics


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    level: str,
    threshold: float,
    threshold_lower: float | None = None,
    batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance weights exp(log_ratio), bounded.

    Args:
        log_ratio: (B, T), trainer minus engine.
        mask: (B, T), true on trained tokens.
        level: `"token"`: each token's own ratio (biased, of low variance); `"sequence"`: the product over the
            sequence on each of its tokens (unbiased, of high variance).
        threshold: larger weights are cut to it.
        threshold_lower: given, weights outside [threshold_lower, threshold] become 0 instead.
        batch_normalize: divide the weights by their mean over the batch.

    Returns:
        Weights (B, T), detached, 0 at masked positions, and their metrics, from before they are normalised.

    Raises:
        ValueError: a parameter is not allowed.
    """
    _check_choice("level", level, LEVELS)
    _check_bounds(threshold, threshold_lower)
    threshold = float(threshold)
    mask = mask.bool()
    log_ratio = _known(log_ratio, mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(mask)
    ratio = zero_masked(safe_exp(log_ratio), mask)
    if threshold_lower is None:
        weights = ratio.clamp(max=threshold)
    else:
        weights = torch.where((ratio >= threshold_lower) & (ratio <= threshold), ratio, 0.0)
    metrics = _weight_metrics(ratio, weights, mask, level, threshold, threshold_lower)
    if batch_normalize:
        mean = masked_mean(weights, mask) if level == "token" else _over_sequences(weights, mask)
        mean = torch.where(mean > 1e-8, mean, torch.ones_like(mean))
        weights = weights / mean
        metrics["rollout_is_batch_norm_factor"] = mean
    return weights, metrics


def rejection_mask(
    log_ratio: Tensor, mask: Tensor, *, statistic: str, threshold: float, threshold_lower: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mask without what the engine and the trainer disagree on too much.

    With k1 = -log_ratio, k2 = log_ratio^2 / 2, k3 = exp(log_ratio) - 1 - log_ratio, each an estimate of
    KL(engine || trainer) on tokens of the engine. `token_*` rejects tokens, `seq_*` whole sequences.

    Args:
        log_ratio: (B, T), trainer minus engine.
        mask: (B, T), true on trained tokens.
        statistic: one of `STATISTICS`.
        threshold: the largest value allowed; of k1, of exp(k1), which is the ratio engine / trainer (1 / weight).
        threshold_lower: of k1 only, and there required: the smallest such ratio allowed.

    Returns:
        Mask (B, T) of the dtype given, and metrics of the statistic.

    Raises:
        ValueError: a parameter is not allowed.
    """
    Rejection(statistic=statistic, threshold=threshold, threshold_lower=threshold_lower)
    threshold = float(threshold)
    trained = mask.bool()
    log_ratio = _known(log_ratio, trained).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    span, kind = statistic.rsplit("_", 1)
    values = {"k1": -log_ratio, "k2": log_ratio.square() / 2, "k3": k3_estimate(log_ratio)}[kind]
    if span == "seq_sum":
        values = masked_sum(values, trained, dim=1, keepdim=True)
    elif span == "seq_mean":
        values = masked_mean(values, trained, dim=1, keepdim=True)
    elif span == "seq_max":
        values = _row_maxima(zero_masked(values, trained)).unsqueeze(1)  # k2 and k3 are at least 0
    high = math.log(threshold) if threshold_lower is not None else threshold
    low = math.log(threshold_lower) if threshold_lower is not None else None
    values = values.expand_as(trained)
    accepted = trained & (values <= high) & (values >= (-math.inf if low is None else low))
    metrics = _statistic_metrics(f"rollout_rs_{statistic}", values, trained, span == "token", high, low)
    metrics |= _rejected_shares(f"rollout_rs_{statistic}", accepted, trained)
    metrics |= _rejected_shares("rollout_rs", accepted, trained)
    return torch.where(accepted, mask, torch.zeros_like(mask)), metrics


def mismatch_metrics(old_per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far the engine's log-probs are from the trainer's.

    Args:
        old_per_token_logps: (B, T), scored by the trainer.
        sampling_per_token_logps: (B, T), reported by the engine.
        mask: (B, T), true on trained tokens.

    Returns:
        Scalars: perplexities of both (means over sequences), the k1 (`kl`) and k3 estimates of KL(engine || trainer),
        differences and ratio of the perplexities, and the chi-square divergences E[ratio^2] - 1 of tokens and
        sequences.
    """
    mask = mask.bool()
    old = zero_masked(upcast(old_per_token_logps), mask)
    log_ratio = _known(old - sampling_per_token_logps, mask)
    sampling = old - log_ratio
    sequences = mask.any(dim=1)
    old_mean, sampling_mean = (masked_mean(logps, mask, dim=1) for logps in (old, sampling))
    gap = sampling_mean - old_mean
    squared = safe_exp(log_ratio).square()
    squared_sequences = safe_exp(log_ratio.sum(dim=1)).square()
    return {
        "training_ppl": masked_mean(safe_exp(-old_mean), sequences),
        "training_log_ppl": masked_mean(-old_mean, sequences),
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(k3_estimate(log_ratio), mask),
        "rollout_ppl": masked_mean(safe_exp(-sampling_mean), sequences),
        "rollout_log_ppl": masked_mean(-sampling_mean, sequences),
        "log_ppl_diff": masked_mean(gap, sequences),
        "log_ppl_abs_diff": masked_mean(gap.abs(), sequences),
        "log_ppl_diff_max": _largest(gap, sequences),
        "log_ppl_diff_min": -_largest(-gap, sequences),
        "ppl_ratio": masked_mean(safe_exp(gap), sequences),
        "chi2_token": masked_mean(squared - 1.0, mask),
        "chi2_seq": masked_mean(squared_sequences - 1.0, sequences),
    }


def _known(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The log-ratio, 0 where it is masked or the engine reported no log-prob."""
    return zero_masked(upcast(log_ratio.detach()), mask & log_ratio.isfinite())


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """The largest value where the mask is true, 0 where it is nowhere."""
    largest = torch.where(mask, values, -math.inf).max() if values.numel() else values.new_full((), -math.inf)
    return torch.where(largest > -math.inf, largest, 0.0)


def _row_maxima(values: Tensor) -> Tensor:
    """The largest of each row of values >= 0, 0 where rows are empty."""
    return torch.nn.functional.pad(values, (0, 1)).amax(dim=1)


def _over_sequences(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over sequences of their means over tokens."""
    return masked_mean(masked_mean(values, mask, dim=1), mask.any(dim=1))


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """Standard deviation with n - 1, 0 for fewer than two values."""
    squares = (values - masked_mean(values, mask)).square()
    return (masked_sum(squares, mask) / (mask.sum() - 1).clamp(min=1)).sqrt()


def _clamped_spread(values: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """verl's standard deviation over tokens: of the clamped values, with n."""
    values = values.clamp(low, high)
    variance = masked_mean(values.square(), mask) - masked_mean(values, mask).square()
    return variance.clamp(min=0.0).sqrt()


def _of_sequences(prefix: str, values: Tensor, mask: Tensor, target: float) -> dict[str, Tensor]:
    """Metrics of one value (B,) for each sequence, which is `target` where engine and trainer agree."""
    return {
        f"{prefix}_seq_mean": masked_mean(values, mask),
        f"{prefix}_seq_std": _spread(values, mask),
        f"{prefix}_seq_max": _largest(values, mask),
        f"{prefix}_seq_min": -_largest(-values, mask),
        f"{prefix}_seq_max_deviation": _largest((values - target).abs(), mask),
    }


def _shares_beyond(prefix: str, values: Tensor, mask: Tensor, high: float, low: float | None) -> dict[str, Tensor]:
    """Shares of sequences above and below the bounds."""
    shares = {f"{prefix}_seq_fraction_high": masked_mean((values > high).float(), mask)}
    if low is not None:
        shares[f"{prefix}_seq_fraction_low"] = masked_mean((values < low).float(), mask)
    return shares


def _weight_metrics(
    ratio: Tensor, weights: Tensor, mask: Tensor, level: str, high: float, low: float | None
) -> dict[str, Tensor]:
    """Of the bounded weights; the shares out of bounds, and the extremes of sequences, of the ratios before."""
    each, where = (ratio, mask) if level == "token" else (_row_maxima(ratio), mask.any(dim=1))
    of_extremes = weights if level == "token" else ratio
    below = 1.0 / high if low is None else low
    metrics = {
        "rollout_is_mean": masked_mean(weights, mask),
        "rollout_is_max": _largest(of_extremes, mask),
        "rollout_is_min": -_largest(-of_extremes, mask),
        "rollout_is_std": _clamped_spread(weights, mask, 0.0, high),
        "rollout_is_ratio_fraction_high": masked_mean((each > high).float(), where),
        "rollout_is_ratio_fraction_low": masked_mean((each < below).float(), where),
        "rollout_is_eff_sample_size": masked_mean(weights, mask).square()
        / masked_mean(weights.square(), mask).clamp(min=1e-8),
    }
    if low is not None:
        metrics["rollout_is_oob_ratio"] = masked_mean(((each > high) | (each < low)).float(), where)
    sequences = mask.any(dim=1)
    bounded, unbounded = (masked_mean(values, mask, dim=1) for values in (weights, ratio))
    shares = _shares_beyond("rollout_is", unbounded, sequences, high, below)
    return metrics | _of_sequences("rollout_is", bounded, sequences, target=1.0) | shares


def _statistic_metrics(
    prefix: str, values: Tensor, mask: Tensor, of_tokens: bool, high: float, low: float | None
) -> dict[str, Tensor]:
    sequences = mask.any(dim=1)
    per_sequence = masked_mean(values, mask, dim=1)
    each, where = (values, mask) if of_tokens else (per_sequence, sequences)
    below = (each < low).float() if low is not None else torch.zeros_like(each)
    metrics = {
        f"{prefix}_mean": masked_mean(values, mask),
        f"{prefix}_max": _largest(each, where),
        f"{prefix}_min": -_largest(-each, where),
        f"{prefix}_fraction_high": masked_mean((each > high).float(), where),
        f"{prefix}_fraction_low": masked_mean(below, where),
        f"{prefix}_std": _clamped_spread(values, mask, 0.0 if low is None else low, high),
    }
    shares = _shares_beyond(prefix, per_sequence, sequences, high, low)
    return metrics | _of_sequences(prefix, per_sequence, sequences, target=0.0) | shares


def _rejected_shares(prefix: str, kept: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Shares of the trained tokens, and of the sequences that lose a token."""
    rejected = mask & ~kept
    return {
        f"{prefix}_masked_fraction": masked_mean(rejected.float(), mask),
        f"{prefix}_seq_masked_fraction": masked_mean(rejected.any(dim=1).float(), mask.any(dim=1)),
    }


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not allowed: write one of {', '.join(map(repr, choices))}.")


def _check_bounds(threshold: Any, threshold_lower: Any) -> None:
    """Refuse bounds that are not 0 < lower < upper < inf."""
    for name, value in (("threshold", threshold), ("threshold_lower", threshold_lower)):
        if value is None and name == "threshold_lower":
            continue
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not 0 < value <= LARGEST:
            raise ValueError(
                f"{name}={value!r} is not allowed: it must be a number > 0 (at most {LARGEST:g}), such as {name}=2.0."
            )
    if threshold_lower is not None and threshold_lower >= threshold:
        raise ValueError(
            f"threshold_lower={threshold_lower!r} is not allowed: it must be below threshold={threshold}."
        )


def preset_fields(name: str) -> Mapping[str, Any]:
    """The fields of `DROConfig` that one of verl's presets stands for.

    Raises:
        ValueError: there is no such preset, or it cannot be carried out here; the message says why.
    """
    if name in REFUSED_PRESETS:
        reason, instead = REFUSED_PRESETS[name]
        raise ValueError(f"{reason}. Nearest is `{instead}`.")
    _check_choice("rollout_correction_preset", name, tuple(PRESETS))
    return PRESETS[name]
