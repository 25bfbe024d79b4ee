"""A vision-language model, small enough to be built here: its weights after training equal TRL's."""

import numpy
import pytest
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from trl import GRPOConfig, GRPOTrainer

from trl_dro import DROConfig, DROTrainer

from .test_parity import GEOMETRY, largest_difference
from .tiny import CHARACTERS


SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<image>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def tiny_processor() -> LlavaProcessor:
    core = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        padding_side="left",
    )
    pixels = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(**pixels),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=1,
    )


def tiny_vlm() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    text = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=4,
            image_token_index=4,
            image_seq_length=4,
            vision_feature_layer=-1,
            pad_token_id=0,
        )
    )


def pictures() -> Dataset:
    generator = numpy.random.default_rng(0)
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"what is {letter}="}],
                "image": Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype=numpy.uint8)),
            }
            for letter in "abcdefgh"
        ]
    )


def variety(completions, **_) -> list[float]:
    return [len(set(completion[0]["content"])) / 8 for completion in completions]


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_the_weights_of_a_vision_language_model_equal_trls(options, tmp_path):
    settings = {**GEOMETRY, "model_init_kwargs": None, "learning_rate": 0.5, **options}
    source = GRPOConfig(output_dir=str(tmp_path), **settings)
    trained = []
    for trainer_class, args in ((GRPOTrainer, source), (DROTrainer, DROConfig.from_grpo_config(source))):
        trainer = trainer_class(
            model=tiny_vlm(),
            reward_funcs=variety,
            args=args,
            train_dataset=pictures(),
            processing_class=tiny_processor(),
        )
        trainer.train()
        trained.append(trainer.model)
    assert largest_difference(tiny_vlm(), trained[0]) > 1e-2
    assert largest_difference(*trained) < 1e-5
    vision = [name for name, _ in tiny_vlm().named_parameters() if "vision_tower" in name]
    moved = dict(trained[1].named_parameters())
    assert any((moved[name] - p).abs().max() > 1e-5 for name, p in tiny_vlm().named_parameters() if name in vision)
