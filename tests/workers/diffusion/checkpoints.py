"""Tiny random checkpoints of every supported pipeline, of the real classes, on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers as d
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from workers.engines.diffusion.pocket_image import COORDINATES, SOURCES, PocketImagePipeline
from workers.engines.diffusion.pocket_video import PocketVideoPipeline

WORDS = [
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
_LATENT = {"use_quant_conv": False, "use_post_quant_conv": False}


def make_checkpoint(name: str, path: Path) -> Path:
    """Save a checkpoint of a pipeline, the same one every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = MAKERS[name]()
        pipeline.save_pretrained(path)
    return path


def _tokenizer(length: int) -> Any:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", "<s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=length,
    )


def _clip(*, projected: bool = False, width: int = 32) -> Any:
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


def _t5(kind: Any = T5EncoderModel, config: Any = T5Config) -> Any:
    return kind(
        config(
            vocab_size=32, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, pad_token_id=0
        )
    )


def _vae(channels: int = 4, **settings: Any) -> Any:
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


def _unet(**settings: Any) -> Any:
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


def _noise_scheduler() -> Any:
    return d.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def _stable_diffusion(kind: Any = d.StableDiffusionPipeline, **unet: Any) -> Any:
    return kind(
        vae=_vae(),
        text_encoder=_clip(),
        tokenizer=_tokenizer(77),
        unet=_unet(**unet),
        scheduler=_noise_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _pix2pix() -> Any:
    return _stable_diffusion(d.StableDiffusionInstructPix2PixPipeline, in_channels=8)


def _sdxl(kind: Any = d.StableDiffusionXLPipeline, **settings: Any) -> Any:
    unet = _unet(
        **settings,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=64,
    )
    return kind(
        vae=_vae(),
        text_encoder=_clip(),
        text_encoder_2=_clip(projected=True),
        tokenizer=_tokenizer(77),
        tokenizer_2=_tokenizer(77),
        unet=unet,
        scheduler=d.EulerDiscreteScheduler(beta_schedule="scaled_linear"),
    )


def _sd3() -> Any:
    transformer = d.SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=16,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=16,
    )
    return d.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=d.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(16, shift_factor=0.06, scaling_factor=1.5, **_LATENT),
        text_encoder=_clip(projected=True),
        text_encoder_2=_clip(projected=True),
        text_encoder_3=_t5(),
        tokenizer=_tokenizer(77),
        tokenizer_2=_tokenizer(77),
        tokenizer_3=_tokenizer(16),
    )


def _flux(kind: Any = d.FluxPipeline, **settings: Any) -> Any:
    transformer = d.FluxTransformer2DModel(
        patch_size=1,
        **{"in_channels": 4, **settings},
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )
    return kind(
        scheduler=d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(1, shift_factor=0.06, scaling_factor=1.5, **_LATENT),
        text_encoder=_clip(),
        tokenizer=_tokenizer(77),
        text_encoder_2=_t5(),
        tokenizer_2=_tokenizer(16),
        transformer=transformer,
    )


def _wan_vae() -> Any:
    return d.AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )


def _wan_transformer(channels: int) -> Any:
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


def _wan_scheduler() -> Any:
    return d.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def _wan() -> Any:
    return d.WanPipeline(
        tokenizer=_tokenizer(16),
        text_encoder=_t5(UMT5EncoderModel, UMT5Config),
        vae=_wan_vae(),
        scheduler=_wan_scheduler(),
        transformer=_wan_transformer(16),
        transformer_2=None,
    )


def _wan_from_image() -> Any:
    return d.WanImageToVideoPipeline(
        tokenizer=_tokenizer(16),
        text_encoder=_t5(UMT5EncoderModel, UMT5Config),
        vae=_wan_vae(),
        scheduler=_wan_scheduler(),
        transformer=_wan_transformer(36),
        transformer_2=None,
        image_encoder=None,
        image_processor=None,
    )


def _ltx() -> Any:
    transformer = d.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=1,
        caption_channels=32,
    )
    vae = d.AutoencoderKLLTXVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    return d.LTXPipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=_t5(),
        tokenizer=_tokenizer(128),
        transformer=transformer,
    )


def _pocket(kind: Any, *, frames: int, sources: int) -> Any:
    latents = 4
    vae = d.AutoencoderTiny(
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        latent_channels=latents,
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
    )
    unet = _unet(
        in_channels=latents * (frames + sources) + COORDINATES,
        out_channels=latents * frames,
        down_block_types=("DownBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=16,
        class_embed_type="projection",
        projection_class_embeddings_input_dim=32,
    )
    scheduler = d.FlowMatchEulerDiscreteScheduler()
    return kind(vae, _t5(), _tokenizer(32), unet, scheduler)


MAKERS: dict[str, Callable[[], Any]] = {
    "StableDiffusionPipeline": _stable_diffusion,
    "StableDiffusionInpaintPipeline": lambda: _stable_diffusion(
        d.StableDiffusionInpaintPipeline, in_channels=9
    ),
    "StableDiffusionXLPipeline": _sdxl,
    "StableDiffusionXLInpaintPipeline": lambda: _sdxl(
        d.StableDiffusionXLInpaintPipeline, in_channels=9
    ),
    "StableDiffusion3Pipeline": _sd3,
    "FluxPipeline": _flux,
    "StableDiffusionInstructPix2PixPipeline": _pix2pix,
    "FluxFillPipeline": lambda: _flux(d.FluxFillPipeline, in_channels=24, out_channels=4),
    "FluxKontextPipeline": lambda: _flux(d.FluxKontextPipeline),
    "WanPipeline": _wan,
    "WanImageToVideoPipeline": _wan_from_image,
    "LTXPipeline": _ltx,
    "PocketImagePipeline": lambda: _pocket(PocketImagePipeline, frames=1, sources=SOURCES),
    "PocketVideoPipeline": lambda: _pocket(PocketVideoPipeline, frames=4, sources=1),
}
