"""The order of prompts, and completions that came back empty."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


class ResumableSampler(Sampler):
    """Shuffles epoch e as a run that was never interrupted would: TRL's sampler always begins with epoch 0."""

    def __init__(self, sampler: Any, epoch: Callable[[], int]):
        self.sampler, self.epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=self.sampler.generator)
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


def fill_empty(completion_ids: list[list[int]], logprobs: Any, eos: int) -> tuple[list[list[int]], Any]:
    """Give an empty completion the end-of-sequence token that the engine left out; TRL cannot index an empty one."""
    if all(len(ids) for ids in completion_ids):
        return completion_ids, logprobs
    if logprobs is not None:
        logprobs = [list(row) if len(ids) else [math.nan] for ids, row in zip(completion_ids, logprobs, strict=True)]
    return [list(ids) if len(ids) else [eos] for ids in completion_ids], logprobs


def without_empty_completions(rollout_func: Callable[..., dict[str, Any]] | None) -> Any:
    """The rollout function, with `fill_empty` applied to what it returns."""
    if rollout_func is None:
        return None

    def rollout(prompts: list, trainer: Any) -> dict[str, Any]:
        output = dict(rollout_func(prompts, trainer))
        ids = output.get("completion_ids", [])
        if not all(len(row) for row in ids):
            if output.get("env_mask") is not None:
                output["env_mask"] = [
                    mask if len(row) else [1] for row, mask in zip(ids, output["env_mask"], strict=True)
                ]
            filled = fill_empty(ids, output.get("logprobs"), trainer.eos_token_ids[0])
            output["completion_ids"], output["logprobs"] = filled
        return output

    return rollout
