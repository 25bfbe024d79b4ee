"""Weights come back from a checkpoint, on resuming and as the best ones, whatever names they were saved under."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOTrainer

from trl_dro import DROTrainer

from .test_resuming import SAVED
from .test_trainer import largest_difference, weights
from .test_vlm import pictures, tiny_processor, tiny_vlm
from .tiny import CHARACTERS, falling_reward, prompts, tiny_model, tiny_tokenizer


LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
MODULES = {"modules_to_save": ["lm_head"]}


def tiny_moe() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=len(CHARACTERS) + 4,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def adapted(model: PreTrainedModel, adapter_name: str = "default", **options) -> PeftModel:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**LORA, **options), adapter_name=adapter_name)


MODELS = {
    "plain": tiny_model,
    "tied": lambda: tiny_model(tie_word_embeddings=True),
    "mixture of experts": tiny_moe,
    "pictures": tiny_vlm,
    "adapter": lambda: adapted(tiny_model()),
    "adapter named policy": lambda: adapted(tiny_model(), "policy"),
    "adapter, with a reference": lambda: adapted(tiny_model(), init_lora_weights=False),
    "adapter, whole head": lambda: adapted(tiny_model(), **MODULES),
    "adapter of a mixture of experts": lambda: adapted(tiny_moe()),
    "adapter of pictures": lambda: adapted(tiny_vlm()),
}
SETTINGS = {"adapter, with a reference": {"beta": 0.1, "use_bias_correction_kl": False}}
CONVERTED = ["mixture of experts", "pictures"]


def falling_variety(completions, trainer_state, **_) -> list[float]:
    return falling_reward([completion[0]["content"] for completion in completions], trainer_state)


@pytest.fixture
def trained(build):
    """Trains a kind of model from its start."""

    def train(kind, trainer_class=DROTrainer, settings=None, eval_dataset=None, **kwargs):
        in_pictures = "pictures" in kind
        trainer = build(
            trainer_class,
            model=MODELS[kind](),
            reward_funcs=falling_variety if in_pictures else falling_reward,
            train_dataset=pictures() if in_pictures else prompts(),
            eval_dataset=eval_dataset and (pictures() if in_pictures else prompts(8)),
            tokenizer=tiny_processor("llava") if in_pictures else tiny_tokenizer(),
            settings={**SAVED, **SETTINGS.get(kind, {}), "max_completion_length": 8, **(settings or {})},
        )
        trainer.train(**kwargs)
        return trainer

    return train


def start(kind) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in MODELS[kind]().named_parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_goes_on_exactly(trained, tmp_path, kind):
    whole = trained(kind)
    again = trained(kind, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert largest_difference(start(kind), weights(whole)) > 1e-3
    assert largest_difference(weights(whole), weights(again)) == 0.0


@pytest.mark.parametrize("kind", CONVERTED)
def test_trl_goes_on_from_other_weights_where_they_were_saved_under_other_names(trained, tmp_path, kind):
    on_the_boundary = {"steps_per_generation": 1, "num_iterations": 1}
    whole = trained(kind, GRPOTrainer, on_the_boundary)
    checkpoint = str(tmp_path / "run" / "checkpoint-3")
    again = trained(kind, GRPOTrainer, on_the_boundary, resume_from_checkpoint=checkpoint)
    assert largest_difference(weights(whole), weights(again)) > 1e-4


@pytest.mark.parametrize("kind", MODELS)
def test_the_best_weights_are_loaded_at_the_end(trained, kind):
    constant = {"lr_scheduler_type": "constant"}
    every = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4}
    first = trained(kind, settings={"max_steps": 3, **constant})
    best = trained(kind, settings={**constant, **every, "load_best_model_at_end": True}, eval_dataset=True)
    assert best.state.best_global_step == 3
    assert best.state.global_step == 6
    assert largest_difference(start(kind), weights(first)) > 1e-3
    assert largest_difference(weights(first), weights(best)) == 0.0


def test_a_checkpoint_of_another_model_is_refused(trained, tmp_path):
    trained("plain")
    with pytest.raises(ValueError, match=r"The weights in .*checkpoint-3 are not those of this Qwen3MoeForCausalLM"):
        trained("mixture of experts", resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
