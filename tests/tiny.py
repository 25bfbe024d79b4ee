"""A tiny model, its tokenizer of single characters, prompts and rewards: whatever several tests train with."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


# A few fast steps on a CPU, for either trainer.
FAST = {
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 4,
    "num_iterations": 2,
}

CHARACTERS = "abcdefghijklmnopqrstuvwxyz=? "


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def tiny_model(seed: int = 0, **config) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(CHARACTERS) + 4,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **config}))


def prompts(count: int = 32) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{'abcdefgh'[i % 8]}{'ijkl'[i // 8 % 4]}=" for i in range(count)]})


def length_reward(completions: list[str], **_: object) -> list[float]:
    """A reward that differs within groups."""
    return [len(set(completion)) / 8 for completion in completions]


def falling_reward(completions: list[str], trainer_state, **_: object) -> list[float]:
    """A reward by which the first checkpoint is the best one."""
    return [reward - 10 * trainer_state.global_step for reward in length_reward(completions)]
