"""Creates a model of Stable Diffusion's shape with random weights, small enough for one core."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

WORDS: Final = (
    "red",
    "green",
    "blue",
    "circle",
    "square",
    "star",
    "left",
    "right",
    "of",
    "a",
    "night",
)


def make_checkpoint(path: Path, *, channels: tuple[int, int, int] = (64, 128, 256)) -> Path:
    """Save the model: 17 million weights by default, 64x64 pixels, deterministic."""
    import torch
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel

    unet: Any = UNet2DConditionModel
    autoencoder: Any = AutoencoderKL
    scheduler: Any = DDIMScheduler
    pipeline: Any = StableDiffusionPipeline
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline(
            unet=unet(
                sample_size=8,
                in_channels=4,
                out_channels=4,
                layers_per_block=1,
                block_out_channels=channels,
                down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
                cross_attention_dim=256,
            ),
            vae=autoencoder(
                sample_size=64,
                latent_channels=4,
                block_out_channels=(32, 32, 64, 64),
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
            ),
            text_encoder=CLIPTextModel(
                CLIPTextConfig(
                    vocab_size=32,
                    hidden_size=256,
                    intermediate_size=1024,
                    num_hidden_layers=4,
                    num_attention_heads=4,
                    bos_token_id=3,
                    eos_token_id=1,
                    pad_token_id=0,
                )
            ),
            tokenizer=_tokenizer(),
            scheduler=scheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                clip_sample=False,
                set_alpha_to_one=False,
                steps_offset=1,
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ).save_pretrained(path)
    return path


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", "<s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 1)]
    )
    kind: Any = PreTrainedTokenizerFast
    return kind(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=77,
    )
