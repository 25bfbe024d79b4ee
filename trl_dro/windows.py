"""Which micro-batches make one optimizer step, and the exact counts that normalise it.

A *window* is the set of micro-batches, on all ranks, whose gradients make one optimizer step. A *generation block* is
the run of micro-steps that train on one generated batch: `steps_per_generation` micro-batches, passed over
`num_iterations` times. Everything here is arithmetic on integers and masks; nothing communicates.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batch geometry of a run, resolved from its configuration.

    Rows are completions. `rows_per_window` is what one optimizer step sees, over all processes and micro-batches;
    `rows_per_generation` what one call of the generation engine makes.
    """

    world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    num_generations: int
    anchor_policy: str = "old"

    @property
    def rows_per_micro_step(self) -> int:
        return self.per_device_train_batch_size * self.world_size

    @property
    def rows_per_window(self) -> int:
        return self.rows_per_micro_step * self.gradient_accumulation_steps

    @property
    def rows_per_generation(self) -> int:
        return self.rows_per_micro_step * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        return self.rows_per_generation // self.num_generations

    @property
    def micro_steps_per_generation(self) -> int:
        """Micro-steps for which one generated batch is used."""
        return self.steps_per_generation * self.num_iterations

    @property
    def windows_per_generation(self) -> float:
        """Optimizer steps taken on each generated batch; below 1 when a window spans several of them."""
        return self.micro_steps_per_generation / self.gradient_accumulation_steps

    @property
    def max_staleness(self) -> int:
        """Most optimizer steps between the policy that sampled a token and the one being updated on it."""
        window, block = self.gradient_accumulation_steps, self.micro_steps_per_generation
        blocks_per_period = math.lcm(window, block) // block
        return max(
            ((index + 1) * block - 1) // window - (index * block) // window for index in range(blocks_per_period)
        )

    @property
    def penalty_alive(self) -> bool:
        """Whether the log-ratio to the anchor can differ from 0 (dropout and engine mismatch apart).

        With the anchor `old` and every generated batch used up inside one window, the policy that is updated is the
        policy that sampled.
        """
        aligned = self.gradient_accumulation_steps % self.micro_steps_per_generation == 0
        return self.anchor_policy != "old" or not aligned


def block_and_slot(step: int, steps_per_generation: int, num_iterations: int) -> tuple[int, int]:
    """The generation block that micro-step `step` trains on, and its micro-batch in that block."""
    return step // (steps_per_generation * num_iterations), step % steps_per_generation


def trained_counts(masks: list[Tensor]) -> Tensor:
    """Trained tokens and sequences with at least one of them, for each micro-batch.

    Args:
        masks: one (B, T) mask for each micro-batch; B and T may differ between them.

    Returns:
        (len(masks), 2) float tensor of [tokens, sequences], local to this process. Counts add up over processes and
        over the micro-batches of a window, which is what makes a window's normaliser exact under any cut.
    """
    return torch.stack([torch.stack([mask.bool().sum(), mask.bool().any(dim=-1).sum()]) for mask in masks]).to(
        torch.float32
    )
