"""Errors of reward functions on one process of several: told to all, so that none waits for one that has ended."""

import atexit
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from trl.trainer.utils import is_async_callable


# Time for the process that failed to print its traceback, before the launcher sees another one end and ends it too.
_SECONDS_TO_REPORT = 5.0

# Time for gloo's threads to let go of the last collective's tensors.
_SECONDS_TO_FINISH = 0.2


@cache
def let_gloo_finish() -> None:
    """Keep a process that ends right after a collective from aborting.

    Gloo's threads free the tensors of a finished collective, for which they need the interpreter. One that asks for it
    while it shuts down is ended by Python in the middle of C++ code, which ends the process with SIGABRT ("terminate
    called without an active exception"), and the launcher with an error.
    """
    atexit.register(time.sleep, _SECONDS_TO_FINISH)


class RewardFailures:
    """What reward functions raise in one call for rewards, held until all processes meet.

    Args:
        accelerator: of the trainer.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.error: Exception | None = None

    def held(self, reward_func: Any) -> Any:
        """The reward function, which gives zeros where it fails. A model, and that of a single process, as it is."""
        if self.accelerator.num_processes == 1 or isinstance(reward_func, nn.Module):
            return reward_func
        return _holding_async(reward_func, self) if is_async_callable(reward_func) else _holding(reward_func, self)

    def hold(self, error: Exception, rows: int) -> list[float]:
        self.error = self.error or error
        return [0.0] * rows

    def raise_together(self) -> None:
        """End all processes if any failed: the first of those with its error, the others quietly.

        Raises:
            Exception: what the reward function raised, on the first process where one did.
            SystemExit: on the others.
        """
        if self.accelerator.num_processes == 1:
            return
        failed = [rank for rank, ended in enumerate(gather_object([self.error is not None])) if ended]
        if not failed:
            return
        if self.error is not None and self.accelerator.process_index == failed[0]:
            self.error.add_note(f"On process {failed[0]} of {self.accelerator.num_processes}; it ends them all.")
            raise self.error
        time.sleep(_SECONDS_TO_REPORT)
        sys.exit(1)


def _holding(reward_func: Callable[..., Any], failures: RewardFailures) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        try:
            return reward_func(**kwargs)
        except Exception as error:
            return failures.hold(error, len(kwargs["completions"]))

    return call


def _holding_async(reward_func: Callable[..., Any], failures: RewardFailures) -> Callable[..., Any]:
    async def call(**kwargs: Any) -> Any:
        try:
            return await reward_func(**kwargs)
        except Exception as error:
            return failures.hold(error, len(kwargs["completions"]))

    return call
