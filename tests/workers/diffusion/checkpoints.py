"""Tiny random checkpoints of every supported pipeline, of the real classes, on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers as d
import torch
from transformers import UMT5Config, UMT5EncoderModel

from tests.workers.diffusion import parts, recent
from workers.engines.diffusion.pocket_image import COORDINATES, SOURCES, PocketImagePipeline
from workers.engines.diffusion.pocket_video import PocketVideoPipeline


def make_checkpoint(name: str, path: Path) -> Path:
    """Save a checkpoint of a pipeline, the same one every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = MAKERS[name]()
        pipeline.save_pretrained(path)
    return path


def make_control_network(name: str, checkpoint: Path, path: Path) -> Path:
    """Save a control network for a checkpoint of a pipeline, with weights that make a difference;
    some libraries start with zeros."""
    pipeline = getattr(d, name).from_pretrained(checkpoint)
    if hasattr(pipeline, "transformer"):
        network: Any = d.FluxControlNetModel.from_transformer(
            pipeline.transformer,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
        )
    else:
        network = d.ControlNetModel.from_unet(
            pipeline.unet, conditioning_embedding_out_channels=(8, 16)
        )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    network.save_pretrained(path)
    return path


def _stable_diffusion(kind: Any = d.StableDiffusionPipeline, **unet: Any) -> Any:
    return kind(
        vae=parts.vae(),
        text_encoder=parts.clip(),
        tokenizer=parts.tokenizer(77),
        unet=parts.unet(**unet),
        scheduler=parts.noise_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _pix2pix() -> Any:
    return _stable_diffusion(d.StableDiffusionInstructPix2PixPipeline, in_channels=8)


def _sdxl(kind: Any = d.StableDiffusionXLPipeline, **settings: Any) -> Any:
    unet = parts.unet(
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
        vae=parts.vae(),
        text_encoder=parts.clip(),
        text_encoder_2=parts.clip(projected=True),
        tokenizer=parts.tokenizer(77),
        tokenizer_2=parts.tokenizer(77),
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
        vae=parts.vae(16, shift_factor=0.06, scaling_factor=1.5, **parts.LATENT),
        text_encoder=parts.clip(projected=True),
        text_encoder_2=parts.clip(projected=True),
        text_encoder_3=parts.t5(),
        tokenizer=parts.tokenizer(77),
        tokenizer_2=parts.tokenizer(77),
        tokenizer_3=parts.tokenizer(16),
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
        vae=parts.vae(1, shift_factor=0.06, scaling_factor=1.5, **parts.LATENT),
        text_encoder=parts.clip(),
        tokenizer=parts.tokenizer(77),
        text_encoder_2=parts.t5(),
        tokenizer_2=parts.tokenizer(16),
        transformer=transformer,
    )


def _wan() -> Any:
    return d.WanPipeline(
        tokenizer=parts.tokenizer(16),
        text_encoder=parts.t5(UMT5EncoderModel, UMT5Config),
        vae=parts.wan_vae(),
        scheduler=parts.wan_scheduler(),
        transformer=parts.wan_transformer(16),
        transformer_2=None,
    )


def _wan_from_image() -> Any:
    return d.WanImageToVideoPipeline(
        tokenizer=parts.tokenizer(16),
        text_encoder=parts.t5(UMT5EncoderModel, UMT5Config),
        vae=parts.wan_vae(),
        scheduler=parts.wan_scheduler(),
        transformer=parts.wan_transformer(36),
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
        text_encoder=parts.t5(),
        tokenizer=parts.tokenizer(128),
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
    unet = parts.unet(
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
    return kind(vae, parts.t5(), parts.tokenizer(32), unet, scheduler)


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
    **recent.MAKERS,
}
