"""Adaptive dro_beta: the penalty that keeps the policy at a chosen distance from its anchor."""

import math
from typing import TYPE_CHECKING, Any, cast

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments


if TYPE_CHECKING:
    from .config import DROConfig


# The penalty hardly acts below, and nothing moves above; a start outside of it widens the range.
BETA_RANGE = (1e-3, 1e3)

# How much the logarithm of beta follows that of the distance, over the time that the distance is averaged for. Where
# the penalty decides how far tokens go, the distance falls with the square of beta: 0.25 then settles without a swing.
_GAIN = 0.25

# The distance, in powers of e from the target, beyond which beta does not move faster.
_LARGEST_ERROR = 3.0


class AdaptiveBeta(TrainerCallback, ExportableState):
    """
    Multiplicative controller of `dro_beta`, one update for each optimizer step.

        log beta  +=  gain / steps * clip(log(kl / target_kl), +-3)

    kl being the k2 estimate of KL(anchor || policy), l^2 / 2 averaged over the trained tokens (at
    `dro_level="sequence"` S^2 / 2 over the sequences) of all ranks, and over the last steps: on the first step after a
    generation it is 0, so it is averaged for as long as a generated batch is used, and at least 10 steps. Related:
    the adaptive KL coefficient of https://arxiv.org/abs/1909.08593.

    A step without any advantage tells nothing of beta, whatever the distance: it is left out.

    Its state is in `trainer_state.json` of every checkpoint, and taken up again from there.

    Args:
        beta (`float`):
            First value, > 0.
        target_kl (`float`):
            Wanted distance, > 0, in nats (at sequence level nats squared).
        steps (`int`):
            Optimizer steps for which a generated batch is used.
    """

    def __init__(self, beta: float, target_kl: float, steps: int):
        self.beta = beta
        self._aim(target_kl, steps)
        self.lowest, self.highest = min(BETA_RANGE[0], beta), max(BETA_RANGE[1], beta)
        # A mean whose weights decay with the horizon, and their sum: the first steps count in full.
        self.kl_sum = 0.0
        self.weight_sum = 0.0

    def _aim(self, target_kl: float, steps: int) -> None:
        self.target_kl = target_kl
        self.steps = steps
        self.horizon = max(10, steps)

    @property
    def kl(self) -> float:
        """The averaged distance."""
        return self.kl_sum / self.weight_sum if self.weight_sum else 0.0

    def update(self, kl: float) -> float:
        """Take up the distance measured at one optimizer step.

        Args:
            kl: the same on all ranks; NaN or infinite ones are left out.

        Returns:
            The beta of the next step.
        """
        if math.isfinite(kl):
            decay = 1.0 - 1.0 / self.horizon
            self.kl_sum = decay * self.kl_sum + kl
            self.weight_sum = decay * self.weight_sum + 1.0
        # A batch that is used more than once tells its distance only after its first step.
        if self.weight_sum > 1.0:
            error = math.log(max(self.kl, 1e-30) / self.target_kl)
            error = max(-_LARGEST_ERROR, min(error, _LARGEST_ERROR))
            beta = self.beta * math.exp(_GAIN / self.horizon * error)
            self.beta = max(self.lowest, min(beta, self.highest))
        return self.beta

    def state(self) -> dict[str, Any]:
        return {
            "args": {"beta": self.beta, "target_kl": self.target_kl, "steps": self.steps},
            "attributes": {
                "kl_sum": self.kl_sum,
                "weight_sum": self.weight_sum,
                "lowest": self.lowest,
                "highest": self.highest,
            },
        }

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """In a resumed run, go on from where the checkpoint was, towards the target of this run."""
        config = cast("DROConfig", args)  # transformers may have put a callback with the saved target in place
        self._aim(cast(float, config.dro_target_kl), math.ceil(config.batch_plan().windows_per_generation))
        saved = cast(dict, state.stateful_callbacks or {}).get(type(self).__name__)
        if saved:
            self.beta = saved["args"]["beta"]
            for name, value in saved["attributes"].items():
                setattr(self, name, value)
