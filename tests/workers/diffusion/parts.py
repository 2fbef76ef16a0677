"""Tiny random networks and tokenizers that checkpoints of several pipelines share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import diffusers as d
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BatchFeature,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    T5Config,
    T5EncoderModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

_WORDS = [
    "a",
    "red",
    "green",
    "blue",
    "circle",
    "square",
    "star",
    "left",
    "right",
    "of",
    "the",
    "on",
    "make",
    "it",
    "night",
]
LATENT: dict[str, Any] = {"use_quant_conv": False, "use_post_quant_conv": False}
_VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IMAGE_TOKEN = 4 + len(_WORDS) + 1


def tokenizer(length: int) -> Any:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", "<s>", *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=length,
    )
    fast.add_special_tokens({"additional_special_tokens": list(_VISION)})
    return fast


def clip(*, projected: bool = False, width: int = 32) -> Any:
    config = CLIPTextConfig(
        vocab_size=32,
        hidden_size=width,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=32,
        max_position_embeddings=77,
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=0,
        hidden_act="gelu",
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def t5(kind: Any = T5EncoderModel, config: Any = T5Config) -> Any:
    return kind(
        config(
            vocab_size=32, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, pad_token_id=0
        )
    )


def vae(channels: int = 4, **settings: Any) -> Any:
    return d.AutoencoderKL(
        block_out_channels=[32, 64],
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=channels,
        sample_size=32,
        **settings,
    )


def unet(**settings: Any) -> Any:
    values: dict[str, Any] = {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 32,
    }
    return d.UNet2DConditionModel(**(values | settings))


def noise_scheduler() -> Any:
    return d.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def wan_vae() -> Any:
    return d.AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )


def wan_transformer(channels: int) -> Any:
    return d.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def wan_scheduler() -> Any:
    return d.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


class QwenProcessor(ProcessorMixin):  # type: ignore[misc]  # untyped
    """The processor of Qwen-VL without videos, which need torchvision."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)

    def save_pretrained(self, path: str | Path, **_: Any) -> None:
        self.tokenizer.save_pretrained(path)

    @classmethod
    def from_pretrained(cls, path: str | Path, **_: Any) -> Self:
        return cls(AutoTokenizer.from_pretrained(path))

    def __call__(self, *, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        seen = self.images(images=images, return_tensors=return_tensors)
        filled = "".join(text)
        for grid in seen["image_grid_thw"]:
            filled = filled.replace(_VISION[1], "<|one|>" * int(grid.prod() // 4), 1)
        filled = filled.replace("<|one|>", _VISION[1])
        tokens = self.tokenizer([filled], padding=padding, return_tensors=return_tensors)
        return BatchFeature({**tokens, **seen})
