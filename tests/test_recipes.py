"""Recipes run: a few steps with the model swapped for a tiny one of the same architecture."""

import json
import runpy
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_dro.train import main


ROOT = Path(__file__).parent.parent
SMOLLM2 = ROOT / "recipes" / "SmolLM2-135M"
# As SmolLM2's: a system message of its own unless there is one.
CHATML = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and one merge; SmolLM2's special tokens and template."""
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    core = Tokenizer(models.BPE(vocabulary, [("t", "h")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.mark.parametrize("variant", ["full", "lora"])
def test_the_smollm2_recipe_trains_and_its_result_loads_and_answers(variant, tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    options = ["--config", str(SMOLLM2 / "dro" / f"config_{variant}.yaml")]
    options += ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "run")]
    assert main([*options, "--max_steps", "5", "--logging_steps", "1"]) == 0
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert [log["step"] for log in history if "loss" in log] == [1, 2, 3, 4, 5]
    assert (tmp_path / "run" / "adapter_config.json").exists() == (variant == "lora")
    out = capsys.readouterr().out
    assert "held-out reasoning_gym_final_number: " in out
    assert ("AutoPeftModelForCausalLM" in out) == (variant == "lora")

    answer = runpy.run_path(str(SMOLLM2 / "answer.py"))
    answer["main"](options)
    out = capsys.readouterr().out
    assert out.count("State the") == 8
    assert "held-out reasoning_gym_final_number, greedy: 0.000 before, 0.000 after" in out


def as_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """The model as llama.cpp stores it: its names, and the rows of q and k in the order of its rotary embedding."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    kinds = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([kinds[token not in SPECIAL] for token in TOKENS])
    writer.add_token_merges(["t h"])
    for name, index in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_chat_template(CHATML)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        for projection, count in heads.items():
            if projection in name:
                halves = tensor.view(count, 2, config.head_dim // 2, -1)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_demos_model_is_converted_with_its_numbers_and_its_template(tmp_path):
    model, tokenizer = tiny_llama().eval(), byte_tokenizer()
    as_gguf(model, tmp_path / "tiny.gguf")
    convert = runpy.run_path(str(SMOLLM2 / "get_model.py"))["convert"]
    convert(tmp_path / "tiny.gguf", tmp_path / "converted")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    assert type(loaded) is LlamaForCausalLM
    assert not hasattr(loaded.config, "quantization_config")
    chat = [{"role": "user", "content": "What is the sum of 2 and 2?"}]
    converted = AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert converted.padding_side == "left"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    again = converted.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.testing.assert_close(again["input_ids"], ids["input_ids"], rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(**again).logits, model(**ids).logits)
    assert not (tmp_path / "converted.unfinished").exists()
