"""Windows and generation blocks: what is generated when, and what normalises each optimizer step."""

import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from .generation import GeneratingTrainer, trained_mask
from .windows import block_and_slot, trained_counts


class WindowedTrainer(GeneratingTrainer):
    """TRL's buffer of rollouts, planned by windows: each optimizer step knows its counts before its first loss."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Generated blocks still in use, by index: their micro-batches, counts (slots, 2) over all ranks, and birth.
        self._blocks: dict[int, tuple[list[dict[str, Any]], Tensor, int]] = {}
        self._window_start = 0
        self._window_batches: list[Any] = []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; rollouts left over from an earlier call are dropped."""
        self._blocks, self._window_batches, self._buffered_inputs = {}, [], None
        self._step += -self._step % self.args.batch_plan().micro_steps_per_generation
        self._start_metrics("train")
        result = super().train(*args, **kwargs)
        if self.state.global_step == 0 and not self._window_batches:  # not stopped by a callback
            raise ValueError(
                "train_dataset ended before its first optimizer step: one takes "
                f"{self.args.batch_plan().rows_per_window} completions. Write a smaller per_device_train_batch_size "
                "or gradient_accumulation_steps, or give more rows."
            )
        return result

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """Note the prompts of the coming window: one that spans several generated batches makes them all at once."""
        batch_samples, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
        if 0 < len(batch_samples) < num_batches:
            # Only a stream of unknown length ends like this. No optimizer step would follow, and the gradients would
            # leak into the next window.
            warnings.warn(
                f"The stream ended {num_batches - len(batch_samples)} micro-batches short of an optimizer step: the "
                f"last {len(batch_samples)} are dropped.",
                stacklevel=2,
            )
            batch_samples = []
        self._window_start = self._step
        self._window_batches = batch_samples
        return batch_samples, num_items_in_batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if self._mode == "eval":
            inputs = super()._prepare_inputs(generation_batch)
            num_tokens, num_sequences = self._count([inputs])[0]
            return _in_window(inputs, num_tokens, num_sequences, self.state.global_step)
        if not 0 <= self._step - self._window_start < len(self._window_batches):
            # Called outside `train`: this micro-step is a window of its own, and starts its block anew as in TRL.
            block, slot = self._locate(self._step)
            if slot == 0:
                self._blocks.pop(block, None)
            self._window_start, self._window_batches = self._step, [generation_batch]
        if self._step == self._window_start:
            for offset, prompts in enumerate(self._window_batches):
                self._generate_block(self._step + offset, prompts)
        block, slot = self._locate(self._step)
        micro_batches, _, born = self._blocks[block]
        counts = torch.stack([self._counts_at(step) for step in self._window_steps()]).sum(dim=0)
        return _in_window(micro_batches[slot], counts[0], counts[1], born)

    def _locate(self, step: int) -> tuple[int, int]:
        return block_and_slot(step, cast(int, self.args.steps_per_generation), self.num_iterations)

    def _window_steps(self) -> range:
        return range(self._window_start, self._window_start + len(self._window_batches))

    def _counts_at(self, step: int) -> Tensor:
        block, slot = self._locate(step)
        return self._blocks[block][1][slot]

    def _generate_block(self, step: int, prompts: Any) -> None:
        """Generate the block of micro-step `step` unless it is there, and forget the blocks before the window."""
        block, _ = self._locate(step)
        if block in self._blocks:
            return
        oldest, _ = self._locate(self._window_start)
        self._blocks = {index: held for index, held in self._blocks.items() if index >= oldest}
        self._buffered_inputs = None  # makes TRL generate, whatever its step counter says
        super()._prepare_inputs(prompts)
        micro_batches = cast(list[dict[str, Any]], self._buffered_inputs)
        self._blocks[block] = (micro_batches, self._count(micro_batches), self.state.global_step)

    def _count(self, micro_batches: list[dict[str, Any]]) -> Tensor:
        """Trained tokens and sequences of each micro-batch, over all ranks: (len(micro_batches), 2)."""
        counts = trained_counts([trained_mask(inputs) for inputs in micro_batches])
        return self.accelerator.reduce(counts, reduction="sum")


def _in_window(inputs: dict[str, Any], num_tokens: Tensor, num_sequences: Tensor, born: int) -> dict[str, Any]:
    return {
        **inputs,
        "window_num_tokens": num_tokens,
        "window_num_sequences": num_sequences,
        "window_born": born,
    }
