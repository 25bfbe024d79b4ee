"""The loss alone: gradients with respect to the log-probs equal TRL's to 1e-9, for every loss and option.

Both trainers get the same log-probs as a float64 leaf in place of a model, so that nothing but the loss is compared.
`tests/test_parity.py` compares whole runs, where float32 inside the model blurs the eighth digit.
"""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from trl_dro import DROConfig, DROTrainer

from .test_parity import GEOMETRY, LOSSES, NOT_AT_SEQUENCE_LEVEL
from .tiny import length_reward, prompts, tiny_model, tiny_tokenizer


OPTIONS = {
    "plain": {},
    "kl": {"beta": 0.3, "use_bias_correction_kl": False},
    "bias-corrected kl": {"beta": 0.3},
    "top entropy": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.1},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 10.0, "entropy_coef": 0.05},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "token correction": {"weights": "token"},
    "sequence correction": {"weights": "sequence"},
    "tool mask": {"tool_mask": True},
    "half of a window": {"gradient_accumulation_steps": 2},
    "everything": {
        "beta": 0.3,
        "use_bias_correction_kl": False,
        "entropy_coef": 0.1,
        "off_policy_mask_threshold": 0.05,
        "weights": "sequence",
    },
}
ROWS, LENGTH = 6, 7


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("policy"))
    tiny_model().save_pretrained(path)
    return path


def micro_batch(weights: str | None, tool_mask: bool, accumulation: int) -> dict:
    generator = torch.Generator().manual_seed(3)

    def noise(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    logps = noise(ROWS, LENGTH).abs().neg()
    lengths = torch.tensor([7, 1, 4, 6, 2, 5])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    inputs = {
        "logps": logps,
        "entropies": noise(ROWS, LENGTH).abs(),
        "prompt_ids": torch.ones(ROWS, 2, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
        "completion_ids": torch.ones(ROWS, LENGTH, dtype=torch.long),
        "completion_mask": mask,
        "advantages": noise(ROWS),
        "old_per_token_logps": logps + noise(ROWS, LENGTH, scale=0.3),
        "sampling_per_token_logps": logps + noise(ROWS, LENGTH, scale=0.4),
        "ref_per_token_logps": logps + noise(ROWS, LENGTH, scale=0.5),
    }
    if weights:
        inputs["importance_sampling_ratio"] = noise(ROWS, LENGTH if weights == "token" else 1).exp()
    if tool_mask:
        inputs["tool_mask"] = (torch.rand(ROWS, LENGTH, generator=generator) < 0.7).long()
        inputs["tool_mask"][:, 0] = 1
    trained = mask * inputs["tool_mask"] if tool_mask else mask
    # The window holds this micro-batch `accumulation` times.
    inputs["num_items_in_batch"] = inputs["window_num_tokens"] = trained.sum() * accumulation
    inputs["window_num_sequences"] = torch.tensor(ROWS * accumulation)
    return inputs


def gradient(trainer_class, args, model: str, inputs: dict, corrected: bool) -> tuple[torch.Tensor, torch.Tensor]:
    trainer = trainer_class(model, length_reward, args, prompts(), processing_class=tiny_tokenizer())
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    leaf, entropies = (inputs[name].clone().requires_grad_() for name in ("logps", "entropies"))
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, entropies, None)
    trainer._last_world_entropy = 1.0
    if corrected:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.compute_loss(trainer.model, inputs).backward()
    bonus = torch.zeros_like(entropies) if entropies.grad is None else entropies.grad
    return leaf.grad, bonus


# TRL differentiates through the mean over the sequence, so nothing may vary within one; see docs/migrating.md.
CASES = [
    (loss, option)
    for loss in LOSSES
    for option in OPTIONS
    if loss not in ("gspo", "luspo") or option not in (*NOT_AT_SEQUENCE_LEVEL, "token correction")
]


@pytest.mark.parametrize(("loss", "option"), CASES)
def test_the_gradient_of_the_loss_equals_trls(loss, option, policy, tmp_path):
    options = dict(OPTIONS[option])
    weights, tool_mask = options.pop("weights", None), options.pop("tool_mask", False)
    inputs = micro_batch(weights, tool_mask, options.get("gradient_accumulation_steps", 1))
    settings = {**GEOMETRY, "model_init_kwargs": None, **LOSSES[loss], **options}
    source = GRPOConfig(output_dir=str(tmp_path), **settings)
    theirs = gradient(GRPOTrainer, source, policy, inputs, corrected=weights is not None)
    ours = gradient(DROTrainer, DROConfig.from_grpo_config(source), policy, inputs, corrected=False)
    assert theirs[0].abs().max() > 1e-3
    for expected, got in zip(theirs, ours, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


# Outside of it the two differ, see docs/migrating.md.


def test_difference_trl_spreads_the_weight_of_a_token_over_its_sequence(policy, tmp_path):
    """At sequence level: TRL differentiates through the mean over the sequence, here each token keeps its weight."""
    inputs = micro_batch("token", False, 1)
    source = GRPOConfig(output_dir=str(tmp_path), **{**GEOMETRY, "model_init_kwargs": None, **LOSSES["gspo"]})
    theirs, _ = gradient(GRPOTrainer, source, policy, inputs, corrected=True)
    ours, _ = gradient(DROTrainer, DROConfig.from_grpo_config(source), policy, inputs, corrected=False)
    mask = inputs["completion_mask"].bool()
    assert (ours - theirs).abs().max() > 1e-3
    for row in range(ROWS):
        on_tokens = theirs[row][mask[row]]
        torch.testing.assert_close(on_tokens, on_tokens.mean().expand_as(on_tokens))
        weights = inputs["importance_sampling_ratio"][row][mask[row]]
        torch.testing.assert_close(ours[row][mask[row]], on_tokens.mean() * weights / weights.mean())


def test_difference_log_ratios_beyond_20_nats_are_cut_off(policy, tmp_path):
    """TRL's ratio overflows where this package's stays at e^20; negative advantages let it through the clip."""
    inputs = micro_batch(None, False, 1)
    inputs["old_per_token_logps"] = inputs["logps"] - 800.0  # e^800 is infinite in float64 too
    inputs["advantages"] = -inputs["advantages"].abs()
    source = GRPOConfig(output_dir=str(tmp_path), **{**GEOMETRY, "model_init_kwargs": None, **LOSSES["dapo"]})
    theirs, _ = gradient(GRPOTrainer, source, policy, inputs, corrected=False)
    ours, _ = gradient(DROTrainer, DROConfig.from_grpo_config(source), policy, inputs, corrected=False)
    assert not theirs.isfinite().all()
    assert ours.isfinite().all()


def test_difference_a_second_clip_inside_the_first_caps_positive_advantages_in_trl(policy, tmp_path):
    """`delta` is meant for negative advantages. Inside the first clip it cuts positive ones too, which is refused."""
    inputs = micro_batch(None, False, 1)
    inputs["old_per_token_logps"] = inputs["logps"] - 0.15  # a ratio of 1.16: inside 1.2, outside 1.1
    inputs["advantages"] = inputs["advantages"].abs()
    settings = {**GEOMETRY, "model_init_kwargs": None, "loss_type": "dapo"}
    for delta, cut in ((None, False), (1.1, True)):
        source = GRPOConfig(output_dir=str(tmp_path), **settings, delta=delta)
        theirs, _ = gradient(GRPOTrainer, source, policy, inputs, corrected=False)
        assert bool((theirs == 0).all()) is cut
    with pytest.raises(ValueError, match=r"delta=1\.1 is refused"):
        DROConfig.from_grpo_config(source)
