"""Vision-language models, small enough to be built here: their weights after training equal TRL's."""

import datasets
import numpy
import pytest
import torch
from datasets import Dataset, Features, Value
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLVisionConfig,
    Qwen2VLImageProcessorPil,
)
from trl import GRPOConfig, GRPOTrainer

from trl_dro import DROConfig, DROTrainer

from .test_parity import GEOMETRY, largest_difference
from .tiny import tiny_tokenizer


FAMILIES = ["llava", "qwen2.5-vl"]
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + IMAGE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


class PictureProcessor(Qwen2_5_VLProcessor):
    """Without the processor of videos, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def picture_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, VIDEO]})
    return tokenizer


def tiny_processor(family: str) -> ProcessorMixin:
    tokenizer = picture_tokenizer()
    if family == "llava":
        pixels = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        return LlavaProcessor(
            image_processor=CLIPImageProcessorPil(**pixels),
            tokenizer=tokenizer,
            patch_size=8,
            vision_feature_select_strategy="default",
            chat_template=CHAT_TEMPLATE,
            image_token=IMAGE,
            num_additional_image_tokens=1,
        )
    pixels = {"patch_size": 4, "size": {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}}
    return PictureProcessor(Qwen2VLImageProcessorPil(**pixels), tokenizer, chat_template=CHAT_TEMPLATE)


def tiny_vlm(family: str = "llava") -> PreTrainedModel:
    torch.manual_seed(0)
    tokenizer = picture_tokenizer()
    image_token_id, video_token_id = tokenizer.convert_tokens_to_ids([IMAGE, VIDEO])
    # Wide enough that attention, and with it the positions, shows in the weights.
    both = {"hidden_size": 16, "initializer_range": 0.2}
    text = {
        **both,
        "vocab_size": len(tokenizer),
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {**both, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "llava":
        llava = LlavaConfig(
            vision_config=CLIPVisionConfig(**vision, image_size=16, patch_size=8, projection_dim=16),
            text_config=LlamaConfig(**text),
            image_token_id=image_token_id,
            image_seq_length=4,
            vision_feature_layer=-1,
            pad_token_id=0,
        )
        return LlavaForConditionalGeneration(llava)
    windows = {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 16}
    # One section of the rotary angles for each of time, height and width.
    rotary = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
    qwen = Qwen2_5_VLConfig(
        vision_config=Qwen2_5_VLVisionConfig(**vision, **windows),
        text_config=Qwen2_5_VLTextConfig(**text, rope_parameters=rotary),
        image_token_id=image_token_id,
        video_token_id=video_token_id,
    )
    return Qwen2_5_VLForConditionalGeneration(qwen)


def pictures(seed: int = 0) -> Dataset:
    """No two prompts are of one length, so every batch is padded."""
    generator = numpy.random.default_rng(seed)
    shapes = [(32, 16, 3), (16, 24, 3), (16, 16, 3)]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"what is {'abcdefgh'[: index + 1]}="}],
                "image": Image.fromarray(generator.integers(0, 255, shapes[index % 3], dtype=numpy.uint8)),
            }
            for index in range(8)
        ]
    )


def pictures_in_prompts() -> Dataset:
    """The same, but for the images, which are parts of the messages."""

    def row(prompt, image):
        parts = [{"type": "image", "image": image}, {"type": "text", "text": prompt[0]["content"]}]
        return {"prompt": [{"role": "user", "content": parts}]}

    part = {"type": Value("string"), "image": datasets.Image(), "text": Value("string")}
    features = Features({"prompt": [{"role": Value("string"), "content": [part]}]})
    return Dataset.from_list([row(**each) for each in pictures()], features=features)


def variety(completions, **_) -> list[float]:
    return [len(set(completion[0]["content"])) / 8 for completion in completions]


def configs(output_dir, **options) -> tuple[GRPOConfig, DROConfig]:
    settings = {**GEOMETRY, "model_init_kwargs": None, "learning_rate": 0.5, **options}
    source = GRPOConfig(output_dir=str(output_dir), **settings)
    return source, DROConfig.from_grpo_config(source)


def build(trainer_class, args, family: str, seed: int = 0, train_dataset: Dataset | None = None):
    return trainer_class(
        model=tiny_vlm(family).double(),
        reward_funcs=variety,
        args=args,
        train_dataset=pictures(seed) if train_dataset is None else train_dataset,
        processing_class=tiny_processor(family),
    )


def train(*args, **kwargs) -> PreTrainedModel:
    trainer = build(*args, **kwargs)
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_a_vision_language_model_equal_trls(family, options, tmp_path):
    source, config = configs(tmp_path, **options)
    start, trl, ours = tiny_vlm(family), train(GRPOTrainer, source, family), train(DROTrainer, config, family)
    assert largest_difference(start, trl) > 1e-2
    assert largest_difference(trl, ours) < 1e-7
    assert largest_difference(start.get_encoder("image"), ours.get_encoder("image")) > 1e-3
    other_pictures = train(DROTrainer, config, family, seed=1)
    assert largest_difference(ours, other_pictures) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_multimodal_model_keeps_its_own_positions(family, tmp_path):
    _, config = configs(tmp_path, max_steps=1)
    trainer = build(DROTrainer, config, family)
    assert not trainer.model._forward_pre_hooks
    seen = []
    trainer.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    trainer.train()
    by_the_loss = seen[-1]
    if family == "llava":
        assert by_the_loss is None
    else:
        time, height, width = by_the_loss
        assert (time != height).any()
        assert (height != width).any()


@pytest.mark.parametrize("data", [pictures, pictures_in_prompts])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_with_pictures_goes_on_exactly(family, data, tmp_path):
    geometry = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}
    _, config = configs(tmp_path, **geometry, save_strategy="steps", save_steps=3, max_steps=6)

    def trained(**kwargs):
        trainer = build(DROTrainer, config, family, train_dataset=data())
        trainer.train(**kwargs)
        return trainer.model

    whole, again = trained(), trained(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert largest_difference(tiny_vlm(family), whole) > 1e-2
    assert largest_difference(whole, again) == 0.0
