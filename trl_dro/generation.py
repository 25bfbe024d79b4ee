"""Generation: what is sampled, by which policies it is scored, and what its rewards are compared with."""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor, nn
from trl.trainer.utils import nanstd

from .advantages import group_advantages, total_rewards
from .config_rules import refusal, short
from .evaluation import EvaluatingTrainer
from .failures import RewardFailures
from .masking import upcast
from .models import checked_batching, without_model_sampling
from .objectives import DRO
from .off_policy_rules import correcting_field
from .policy_loss import PolicyLoss
from .redaction import without_secrets
from .reward_checks import COMPLETION_COLUMN
from .rollout_correction import RolloutCorrection, mismatch_metrics
from .rollouts import ResumableSampler, check_completions, check_prompt_ids, fill_empty, shortened
from .steering import temporarily


class GeneratingTrainer(EvaluatingTrainer):
    """TRL's generation and scoring, checked, with rollout correction and group baselines."""

    policy_loss: PolicyLoss
    max_positions: int | None = None
    """Positions that the model can tell apart, None if they are not counted."""
    _unsteered: Mapping[str, Any] = {}

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        """TRL's sampler, which in a resumed run goes on with the epoch that was interrupted."""
        sampler = super()._get_train_sampler(dataset)
        return ResumableSampler(sampler, lambda: int(self.state.epoch or 0))

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Tensor:
        """With the dataset's column 'completion'. What reward models give, which no wrapper has seen, is checked."""
        # TRL passes every column but this one.
        inputs = [{**row, COMPLETION_COLUMN: row["completion"]} if "completion" in row else row for row in inputs]
        failures = RewardFailures(self.accelerator)
        with temporarily(self, reward_funcs=[failures.held(reward) for reward in self.reward_funcs]):
            rewards = super()._calculate_rewards(inputs, *args, **kwargs)
        failures.raise_together()
        self._rewards_per_func = rewards
        models = torch.tensor([isinstance(reward, nn.Module) for reward in self.reward_funcs], device=rewards.device)
        bad = rewards.isinf() | (rewards.isnan() & models)  # NaN of a function is a reward that does not apply
        if bad.any():
            row, function = bad.nonzero()[0].tolist()
            what = "infinite" if rewards[row, function].isinf() else "NaN"
            raise ValueError(
                f"reward {self.reward_func_names[function]!r} is {what} for row {row} at step "
                f"{self.state.global_step}: it must be finite."
            )
        return rewards

    def _generate_single_turn(self, prompt_ids: list, *args: Any, **kwargs: Any) -> tuple[list[list[int]], Any]:
        positions = None if self.use_vllm else self.max_positions  # vLLM knows its own
        check_prompt_ids(prompt_ids, "the prompt", positions)
        training = self.model.training
        # With continuous batching TRL casts the weights to half precision for good, and leaves evaluation mode.
        batching = self.use_transformers_continuous_batching
        precision = {"bf16": False, "fp16": False} if batching else {}
        model = self.accelerator.unwrap_model(self.model_wrapped)
        with (
            temporarily(self.args, **precision),
            temporarily(model, **(checked_batching(model) if batching else {})),
            temporarily(self.model.generation_config, **without_model_sampling(self.model)),
            temporarily(
                getattr(self, "generation_config", None),
                **shortened(prompt_ids, positions, self.max_completion_length),
            ),
        ):
            try:
                completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            except Exception as error:
                # Of the connection, from several layers down, or TRL's for an answer that is an error.
                failed = isinstance(error, OSError) or str(error).startswith("Request failed: ")
                if failed and self.use_vllm and self.vllm_mode == "server":
                    raise ConnectionError(self._server_failed(error)) from error
                raise
        self.model.train(training)
        logprobs = check_completions("the generation engine", len(prompt_ids), completion_ids, logprobs)
        return fill_empty(completion_ids, logprobs, self.eos_token_ids[0])

    def _check_server(self) -> None:
        """Warn of a server that reports log-probs of another distribution than it samples from; TRL looks at them only
        for its own correction."""
        read = self.args.anchor_policy == "sampling" or self.args.build_rollout_correction() is not None
        if not (read and self.use_vllm and self.vllm_mode == "server" and self.accelerator.is_main_process):
            return
        mode = self.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            warnings.warn(
                f"The vLLM server runs with `--logprobs-mode {mode}`: it reports log-probs from before temperature, "
                "top-p and the like, which are not those that it samples with. Restart it with `--logprobs-mode "
                "processed_logprobs`.",
                stacklevel=3,
            )

    def _server_failed(self, error: Exception) -> str:
        args = self.args
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        if isinstance(error, OSError):
            what = f"does not answer at step {self.state.global_step} ({type(error).__name__})"
        else:
            what = f"answers with an error at step {self.state.global_step} ({short(without_secrets(str(error)))})"
        return (
            f"The vLLM server at {without_secrets(url)} {what}. See its log for why, start it again, and go on from "
            "the newest checkpoint with `resume_from_checkpoint=True` (command: `--resume_from_checkpoint true`)."
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        correction = self.args.build_rollout_correction()
        scored: dict[str, Any] = {}
        # TRL scores the old policy when generation and optimizer steps are misaligned: make it see them so where
        # correction needs it, and aligned where nothing reads it.
        if self._mode == "eval" or not self.args.needs_old_policy:
            scored["gradient_accumulation_steps"] = self.args.batch_plan().micro_steps_per_generation
        elif correction is not None:
            scored["steps_per_generation"] = self.args.gradient_accumulation_steps + 1
        self._unsteered = {name: getattr(self.args, name) for name in scored}
        with temporarily(self.args, **scored), temporarily(self, beta=self.beta or float(self.args.needs_reference)):
            output = super()._generate_and_score_completions(inputs)
        if "sampling_per_token_logps" not in output:
            allowed = "the rollout came without log-probs ('logprobs' is None)"
            if self.args.anchor_policy == "sampling":
                raise refusal("anchor_policy", "sampling", allowed, "anchor_policy='old'")
            if correction is not None and self._mode == "train":
                field = correcting_field(self.args)
                raise refusal(field, getattr(self.args, field), allowed, f"{field}=None")
        if self.args.advantage_baseline != "mean":
            self._compare_with_baseline(output)
        if "sampling_per_token_logps" in output:
            self._count_unscored(output)
            if "old_per_token_logps" in output:
                self._correct_rollouts(output, correction)
        return output

    @contextmanager
    def as_configured(self) -> Iterator[None]:
        """While a rollout function runs, show it the configuration as it was written."""
        with temporarily(self.args, **self._unsteered), temporarily(self, beta=self.args.beta):
            yield

    def _count_unscored(self, output: dict[str, Any]) -> None:
        """Note the share of the tokens, over all ranks, that the engine reported no log-prob for."""
        mask = trained_mask(output).bool()
        unscored = mask & ~output["sampling_per_token_logps"].isfinite()
        missing, all_tokens = self.accelerator.reduce(torch.stack([unscored.sum(), mask.sum()]), reduction="sum")
        share = (missing / all_tokens.clamp(min=1)).item()
        self._metrics[self._mode]["rollout_corr/unscored_fraction"].append(share)

    def _correct_rollouts(self, output: dict[str, Any], correction: RolloutCorrection | None) -> None:
        """Measure the engine's mismatch over the rows of all ranks; add weights and rejections to the output."""
        mask = trained_mask(output)
        rows, tokens = mask.shape
        old = upcast(output["old_per_token_logps"])
        local = torch.stack([old, output["sampling_per_token_logps"].to(old), mask.to(old)], dim=-1)
        everywhere = self.accelerator.gather(self.accelerator.pad_across_processes(local, dim=1))
        old, sampling, trained = everywhere.unbind(dim=-1)
        metrics = mismatch_metrics(old, sampling, trained)
        if correction is not None:
            weights, kept, of_correction = correction(old - sampling, trained)
            metrics |= of_correction
            first = self.accelerator.process_index * rows
            here = (slice(first, first + rows), slice(tokens))
            if correction.rejections:
                output["rollout_rs_mask"] = kept[here].to(mask.dtype)
            if weights is not None:
                output["rollout_is_weights"] = weights[here]
        values = torch.stack([value.to(old) for value in metrics.values()]).tolist()
        for name, value in zip(metrics, values, strict=True):
            self._metrics[self._mode][f"rollout_corr/{name}"].append(value)

    def _compare_with_baseline(self, output: dict[str, Any]) -> None:
        """Replace TRL's advantages, in the output and in the table of completions."""
        rewards = total_rewards(self._rewards_per_func, self.reward_weights)
        evaluates = self._mode == "eval"
        group = cast(int, self.num_generations_eval if evaluates else self.num_generations)
        temperature = None
        if self.args.advantage_baseline == "soft":
            temperature = self.args.advantage_baseline_temperature or self._sequence_beta(output)
        advantages = group_advantages(rewards, group, baseline=self.args.advantage_baseline, temperature=temperature)
        if self.scale_rewards != "none":  # as in TRL
            together = rewards.view(-1, group) if self.scale_rewards == "group" else rewards.view(1, -1)
            spread = nanstd(together, dim=1).nan_to_num(0.0).repeat_interleave(together.shape[1])
            advantages = advantages / (spread + 1e-4)
        rows = len(output["advantages"])
        first = self.accelerator.process_index * rows
        output["advantages"] = advantages[first : first + rows]
        logged = cast(deque, self._logs["advantages"])
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages.tolist())

    def _sequence_beta(self, output: dict[str, Any]) -> float | Tensor:
        """The dro_beta that a sequence level would have: at token level divided by the mean length of all ranks."""
        objective = cast(DRO, self.policy_loss)
        if objective.level == "sequence":
            return objective.beta
        mask = trained_mask(output).bool()
        counts = self.accelerator.reduce(torch.stack([mask.sum(), mask.any(dim=1).sum()]), reduction="sum")
        return objective.beta * counts[1].clamp(min=1) / counts[0].clamp(min=1)


def trained_mask(inputs: dict[str, Any]) -> Tensor:
    """1 on tokens that are trained: completion, not padding, not tool output, not a truncated or rejected row."""
    mask = inputs["completion_mask"]
    for name in ("tool_mask", "rollout_rs_mask"):
        if name in inputs:
            mask = mask * inputs[name]
    return mask
