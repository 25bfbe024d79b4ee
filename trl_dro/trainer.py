"""`DROTrainer`: TRL's online trainer with a registered objective, exact windows and one metric reduce."""

import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import trl.trainer.utils
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from huggingface_hub import ModelCard
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOTrainer

from . import model_card
from .aggregation import aggregate_loss
from .beta_control import AdaptiveBeta
from .checks import check_args, check_data, check_tokenizer, checked_rows
from .config import DROConfig
from .generation import trained_mask
from .masking import masked_mean
from .metrics import add_log_ratio_metrics
from .models import (
    adapter_kind,
    add_reference_adapter,
    check_reference,
    count_positions_from_the_mask,
    disable_functional_dropout,
    gather_trained_head,
    is_adapter_model,
    warn_of_model_sampling,
)
from .objectives import DRO
from .policy_loss import PolicyLossInputs, PolicyLossOutput, apply_correction_weights, canonical_name
from .resuming import ResumableTrainer
from .reward_checks import checked_reward, checked_rewards, reward_names
from .rollouts import checked_rollouts
from .steering import temporarily


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig


# Inputs of multimodal models, by the names TRL's scoring method takes them.
_MODEL_INPUTS = [
    name
    for name in inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    if name
    not in (
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    )
]


class DROTrainer(ResumableTrainer):
    """
    Trainer for Direct Reward Optimization and the other registered policy objectives.

    Takes the arguments of [`~trl.GRPOTrainer`], with a [`DROConfig`] as `args`, and trains on the same datasets,
    reward functions, tools, adapters and generation engines. `compute_loss` is the objective of `args.policy_loss`,
    normalised over the whole window of an optimizer step by `args.loss_agg_mode`.

    DRO follows Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language Models
    Alignment" (https://arxiv.org/abs/2405.19107), in the online, group-baseline form of Kimi k1.5
    (https://arxiv.org/abs/2501.12599).

    Example:

    ```python
    from trl_dro import DROConfig, DROTrainer

    trainer = DROTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=reward,
        train_dataset=dataset,
        args=DROConfig(output_dir="out", dro_beta=0.5, num_iterations=4),
    )
    trainer.train()
    ```

    Raises:
        ValueError: `args` is missing or not a [`DROConfig`], or asks for log-probs that no engine here reports.
    """

    _tag_names = ["trl", "dro", "trl-dro"]
    _name = "Direct Reward Optimization (DRO)"
    _paper = {
        "title": "Offline Regularised Reinforcement Learning for Large Language Models Alignment",
        "id": "2405.19107",
        "citation": textwrap.dedent("""\
            @article{richemond2024offline,
                title        = {{Offline Regularised Reinforcement Learning for Large Language Models Alignment}},
                author       = {Pierre Harvey Richemond and Yunhao Tang and Daniel Guo and others},
                year         = 2024,
                eprint       = {arXiv:2405.19107},
            }"""),
    }

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: Any = None,
        args: DROConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "PeftConfig | None" = None,
        tools: list[Callable] | None = None,
        rollout_func: Callable[..., dict[str, Any]] | None = None,
        environment_factory: Any = None,
    ):
        args = check_args(args, has_rollout_func=rollout_func is not None)
        check_reference(model, args, peft_config)
        given: dict[str, Any] = {
            "has_environment": environment_factory is not None,
            "has_rollout_func": rollout_func is not None,
        }
        generates = rollout_func is None and not args.use_vllm
        check_tokenizer(processing_class, generates=generates)
        check_data(args, train_dataset, eval_dataset, **given)
        rewards = checked_rewards(
            reward_funcs, args, reward_processing_classes, has_environment=environment_factory is not None
        )
        checked = len(rewards)  # TRL adds the rewards of environments
        self.policy_loss = args.build_policy_loss()
        # The run as a configuration file of `trl-dro train`, for its model card.
        self.recipe: str | None = None
        if not args.is_dro:
            name = canonical_name(args.policy_loss)
            self._name, self._paper = f"`{name}`", {}
            self._tag_names = ["trl", "trl-dro", *([] if "." in name else [name])]
        # TRL builds, places and syncs a reference model only for a KL coefficient.
        reference = args.beta or float(args.needs_reference)
        if reference and peft_config is None and is_adapter_model(model):
            add_reference_adapter(cast("PeftModel", model))
            reference = 0.0
        # transformers' checkpoint on SIGTERM may come in the middle of a window; `ResumableTrainer` has its own.
        with temporarily(args, beta=reference, enable_jit_checkpoint=False):
            super().__init__(
                model=model,
                reward_funcs=rewards,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=checked_rollouts(rollout_func),
                environment_factory=environment_factory,
            )
        check_tokenizer(self.processing_class, generates=generates)
        multimodal = isinstance(self.processing_class, ProcessorMixin)
        self.data_collator = cast(Any, partial(checked_rows, multimodal=multimodal, **given))
        self.reward_func_names[:] = reward_names(self.reward_func_names, self.reward_funcs)
        for index in range(checked, len(self.reward_funcs)):
            of_environment = cast(Callable, self.reward_funcs[index])
            self.reward_funcs[index] = checked_reward(
                of_environment, self.reward_func_names[index], args.reward_timeout
            )
        if generates:
            warn_of_model_sampling(self.model, self.generation_config)
        self._check_server()
        self.beta = args.beta
        if args.disable_dropout:
            disable_functional_dropout(self.model)
        self.max_positions = count_positions_from_the_mask(self.accelerator.unwrap_model(self.model))
        if self.ref_model is not None:
            count_positions_from_the_mask(self.accelerator.unwrap_model(self.ref_model))
        if args.dro_target_kl is not None:
            steps = math.ceil(args.batch_plan().windows_per_generation)
            self.add_callback(AdaptiveBeta(cast(DRO, self.policy_loss).beta, args.dro_target_kl, steps))

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """With the dro_beta of the coming window."""
        batch_samples, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
        adaptive = self._adaptive_beta
        if adaptive is not None:
            self.policy_loss = dataclasses.replace(cast(DRO, self.policy_loss), beta=adaptive.beta)
        return batch_samples, num_items_in_batch

    # Loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """
        The loss of one micro-batch: its share of the window's loss.

        Args:
            model: the (wrapped) policy.
            inputs: one micro-batch as TRL prepares it, with the window's counts `window_num_tokens` and
                `window_num_sequences`; without them the micro-batch is a window of its own.
            return_outputs: must be False.
            num_items_in_batch: ignored, the window's counts take its place.

        Returns:
            Scalar. Its gradients, summed over the micro-batches of a window and averaged over ranks, are the exact
            gradient of the window's loss.
        """
        if return_outputs:
            raise ValueError("return_outputs=True is refused: DROTrainer returns only the loss. Write `False`.")
        mask = trained_mask(inputs)
        per_token_logps, entropies, aux_loss = self._score(model, inputs)
        old, sampling = self._behaviour_logps(inputs, per_token_logps.detach())
        anchor = inputs["ref_per_token_logps"] if self.args.anchor_policy == "reference" else old
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        losses = PolicyLossInputs(per_token_logps, anchor, advantages, mask)
        output = self.policy_loss(losses)
        if not isinstance(output, PolicyLossOutput):
            raise TypeError(
                f"policy_loss={self.args.policy_loss!r} returned a {type(output).__name__}, it must return "
                "PolicyLossOutput(per_token_loss, metrics)."
            )
        per_token_loss, kept = self._filtered(
            output.per_token_loss, PolicyLossInputs(per_token_logps, sampling, advantages, mask), entropies
        )
        for name in ("importance_sampling_ratio", "rollout_is_weights"):
            if name in inputs:
                per_token_loss = apply_correction_weights(self.policy_loss, per_token_loss, inputs[name], losses.mask)

        loss = policy_loss = self._aggregate(per_token_loss, mask, inputs)
        accumulator = self._accumulators[self._mode]
        if self.beta != 0.0:
            against_old = PolicyLossInputs(per_token_logps, old, advantages, mask)
            per_token_kl = self._reference_kl(against_old, inputs["ref_per_token_logps"])
            loss = loss + self.beta * self._aggregate(per_token_kl, mask, inputs)
            accumulator.add_mean("kl", per_token_kl, losses.mask)
        loss = loss + self._per_micro_batch_terms(entropies, kept, aux_loss)

        accumulator.add_to_window("policy_loss", policy_loss)
        accumulator.add_mean("entropy", entropies, losses.mask)
        self._add_policy_metrics(losses, output, inputs)
        if self._mode == "eval":
            self._close_window()
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        # Where there is no Triton, TRL projects prompts and padding to the vocabulary too, for compilers that dislike
        # changing shapes. A CPU does not compile: it would only lose most of its time on them.
        gather_trained_head(args[0] if args else kwargs["model"])
        narrowed = {"_use_triton": lambda device: True} if self.accelerator.device.type == "cpu" else {}
        with temporarily(trl.trainer.utils, **narrowed):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _score(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs (B, T) and entropies (B, T) of the completion tokens, and the router loss of an MoE model."""
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs.get(name) for name in _MODEL_INPUTS},
        )

    def _behaviour_logps(self, inputs: dict[str, Any], current: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs (B, T) of the policy that generated: as the trainer scored them, and as the engine reported them.

        Where one of the two is not there the other stands in for it; where neither is, the policy has not moved since.
        """
        old = inputs.get("old_per_token_logps", current)
        sampling = inputs.get("sampling_per_token_logps", old)
        # A token that the engine could not score is no evidence of a distance, as in TRL.
        sampling = torch.where(sampling.isfinite(), sampling, current)
        return (sampling if self.args.anchor_policy == "sampling" else old), sampling

    def _filtered(
        self, per_token_loss: Tensor, against_sampling: PolicyLossInputs, entropies: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss without what TRL's masks take out, and the tokens kept by the entropy mask, both (B, T)."""
        kept = against_sampling.mask
        if self.args.off_policy_mask_threshold is not None:
            low_kl = self.get_off_policy_mask(
                against_sampling.advantages,
                against_sampling.per_token_logps,
                against_sampling.old_per_token_logps,
                kept,
                self.args.off_policy_mask_threshold,
            )
            per_token_loss = torch.where(low_kl.bool(), per_token_loss, 0.0)
        if self.top_entropy_quantile < 1.0:
            kept = self.get_high_entropy_mask(entropies, kept, 1 - self.top_entropy_quantile)
            per_token_loss = torch.where(kept, per_token_loss, 0.0)
        return per_token_loss, kept

    def _aggregate(self, per_token_loss: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        if "window_num_tokens" in inputs:
            num_tokens, num_sequences = inputs["window_num_tokens"], inputs["window_num_sequences"]
        else:
            num_tokens, num_sequences = self._count([inputs])[0]
        scale_factor = self.args.loss_scale_factor or self.args.max_completion_length
        return aggregate_loss(
            per_token_loss,
            mask,
            self.args.loss_agg_mode,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            scale_factor=scale_factor,
            num_processes=self.accelerator.num_processes,
        )

    def _reference_kl(self, against_old: PolicyLossInputs, ref_per_token_logps: Tensor) -> Tensor:
        """TRL's KL term: the k3 estimate of KL(policy || reference), weighted by the ratio if bias-corrected."""
        against_reference = dataclasses.replace(against_old, old_per_token_logps=ref_per_token_logps)
        per_token_kl = 1.0 / against_reference.ratio + against_reference.log_ratio - 1.0
        if self.args.use_bias_correction_kl:
            per_token_kl = per_token_kl * against_old.ratio
        return per_token_kl

    def _per_micro_batch_terms(self, entropies: Tensor, kept: Tensor, aux_loss: Tensor | None) -> Tensor | float:
        """Entropy bonus and router loss: means over the micro-batch, averaged over the window, as in TRL."""
        accumulator = self._accumulators[self._mode]
        # Set by the training loop; a call outside of it is a window of its own.
        share = 1.0 / getattr(self, "current_gradient_accumulation_steps", 1) if self._mode == "train" else 1.0
        terms: Tensor | float = 0.0
        if self._entropy_bonus_enabled:
            terms = terms - self._entropy_coefficient() * masked_mean(entropies, kept) * share
            accumulator.add_mean("_entropy_controlled", entropies, kept.bool())
        if self.aux_loss_enabled and aux_loss is not None:
            terms = terms + self.router_aux_loss_coef * aux_loss * share
            accumulator.add_mean("aux_loss", aux_loss)
        return terms

    def _entropy_coefficient(self) -> float:
        """The coefficient in force for this window; the adaptive one acts only below its target entropy."""
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return self.entropy_coef

    def _adapt_entropy_coefficient(self, window_entropy: float) -> None:
        step = (
            self.args.entropy_coef_delta
            if window_entropy <= self.args.entropy_target
            else -self.args.entropy_coef_delta
        )
        self.entropy_coef = min(max(self.entropy_coef + step, self.args.entropy_coef_min), self.args.entropy_coef_max)
        self._last_world_entropy = window_entropy

    # Metrics

    def _add_policy_metrics(self, losses: PolicyLossInputs, output: PolicyLossOutput, inputs: dict[str, Any]) -> None:
        accumulator = self._accumulators[self._mode]
        level = self.policy_loss.level if isinstance(self.policy_loss, DRO) else "token"
        add_log_ratio_metrics(accumulator, losses, level)
        accumulator.add_objective_metrics(output.metrics, losses.mask)
        age = torch.full(losses.mask.shape, float(self._anchor_age(inputs)), device=losses.mask.device)
        accumulator.add_mean("dro/anchor_staleness", age, losses.mask)

    def _anchor_age(self, inputs: dict[str, Any]) -> int:
        """Optimizer steps between the anchor policy and the one being updated."""
        now = self.state.global_step
        born = inputs.get("window_born", now)  # when the anchor was scored
        if self.args.anchor_policy != "reference":
            return now - born
        return now - born + born % self.args.ref_model_sync_steps if self.args.sync_ref_model else now

    @property
    def _adaptive_beta(self) -> AdaptiveBeta | None:
        # transformers may put another one in its place when it resumes
        callbacks = self.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, AdaptiveBeta)), None)

    def _close_window(self) -> None:
        """Reduce the window's metrics over ranks, with one collective."""
        window = self._accumulators[self._mode].close_window(lambda local: self.accelerator.gather(local.unsqueeze(0)))
        if self._mode == "train" and self.use_adaptive_entropy:
            total, count = window["sum:_entropy_controlled"], window["count:_entropy_controlled"]
            self._adapt_entropy_coefficient((total / count.clamp(min=1.0)).item())
        adaptive = self._adaptive_beta
        if self._mode == "train" and adaptive is not None:
            self._metrics["train"]["dro/beta"].append(adaptive.beta)
            total, count = window["sum:dro/kl_k2"], window["count:dro/kl_k2"]
            if count > 0 and window["sum:dro/advantage_abs"] > 0:
                adaptive.update((total / count).item())
        if self._mode == "train" and self._entropy_bonus_enabled:
            self._metrics["train"]["entropy_coef"].append(self.entropy_coef)
        self._agree_to_stop(window)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._close_window()
        return loss

    # Model card

    def create_model_card(  # type: ignore[override]  # TRL's has other parameters than transformers'
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """TRL's, with the objective and its settings, a learning curve and the recipe. Written at every checkpoint."""
        if not self.is_world_process_zero():
            return
        super().create_model_card(model_name, dataset_name, tags)
        path = Path(str(self.args.output_dir), "README.md")
        adaptive = self._adaptive_beta
        best = self.args.load_best_model_at_end and not self.is_in_train
        section = model_card.describe(
            self.args,
            self.state.log_history,
            objective=self.policy_loss,
            dro_beta=None if adaptive is None else adaptive.beta,
            recipe=self.recipe,
            best_step=self.state.best_global_step if best else None,
        )
        card = ModelCard.load(path)
        model_card.extend(
            card,
            section,
            model_name=model_name,
            adapter=adapter_kind(self.accelerator.unwrap_model(self.model)),
            has_chat_template=getattr(self.processing_class, "chat_template", None) is not None,
        )
        card.save(path)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """As in transformers. A card stays what it was: peft's names paths of this machine, which the Hub refuses."""
        folder = Path(str(output_dir or self.args.output_dir))
        path = folder / "README.md"
        before = path.read_bytes() if path.is_file() else None
        super()._save(output_dir, state_dict)
        if not self.args.should_save or not path.is_file():
            return
        if before is not None:
            path.write_bytes(before)
        else:
            with temporarily(self.args, output_dir=str(folder)):
                self.create_model_card(model_name=Path(self.hub_model_id or str(self.args.output_dir)).name)
