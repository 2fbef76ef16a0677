"""Tiny random checkpoints of the newer pipelines; ``checkpoints`` has the older ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers as d
import torch
import transformers as t
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from tests.workers.diffusion import parts

_CHAT = (
    "{% for m in messages %}<|im_start|> {{ m.role }} "
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }} {% endfor %}{% endif %} <|im_end|> {% endfor %}"
)
_DECODER: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 3,
    "eos_token_id": 1,
}
_SECTIONS: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
    }
}


def _chat_tokenizer(length: int, *, before: int = 0) -> Any:
    """``before``: words in front, for a pipeline that drops a number of tokens of its template."""
    tokenizer = parts.tokenizer(length)
    tokenizer.chat_template = "a " * before + _CHAT
    return tokenizer


def _qwen_vl() -> Any:
    config = t.Qwen2_5_VLConfig(
        text_config={**_DECODER, "num_hidden_layers": 2, **_SECTIONS},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
            "fullatt_block_indexes": [0],
        },
        image_token_id=parts.IMAGE_TOKEN,
        vision_start_token_id=parts.IMAGE_TOKEN - 1,
        vision_end_token_id=parts.IMAGE_TOKEN + 1,
    )
    return t.Qwen2_5_VLForConditionalGeneration(config)


def _qwen_vae() -> Any:
    return d.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1] * 4,
        latents_std=[0.9] * 4,
    )


def _qwen_transformer(**settings: Any) -> Any:
    return d.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
        **settings,
    )


def _qwen() -> Any:
    return d.QwenImagePipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_qwen_vae(),
        text_encoder=_qwen_vl(),
        tokenizer=parts.tokenizer(1024),
        transformer=_qwen_transformer(),
    )


def _qwen_edit(kind: Any, **settings: Any) -> Any:
    return kind(
        scheduler=d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_qwen_vae(),
        text_encoder=_qwen_vl(),
        tokenizer=parts.tokenizer(1024),
        processor=parts.QwenProcessor(parts.tokenizer(1024)),
        transformer=_qwen_transformer(**settings),
    )


def _z_image() -> Any:
    transformer = d.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    return d.ZImagePipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.vae(16, shift_factor=0.1159, scaling_factor=0.3611, **parts.LATENT),
        text_encoder=t.Qwen3Model(t.Qwen3Config(**_DECODER, num_hidden_layers=2, head_dim=8)),
        tokenizer=_chat_tokenizer(512),
        transformer=transformer,
    )


def _flux2_parts(layers: int) -> dict[str, Any]:
    return {
        "scheduler": d.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": d.AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            **parts.LATENT,
        ),
        "tokenizer": _chat_tokenizer(512),
        "transformer": d.Flux2Transformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=layers * 16,
            axes_dims_rope=(4, 4, 4, 4),
        ),
    }


def _flux2() -> Any:
    config = t.Mistral3Config(
        text_config={"model_type": "mistral", **_DECODER, "num_hidden_layers": 30},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "image_size": 28,
            "patch_size": 14,
        },
    )
    encoder = t.Mistral3ForConditionalGeneration(config)
    return d.Flux2Pipeline(text_encoder=encoder, **_flux2_parts(3))


def _klein() -> Any:
    config = t.Qwen3Config(**_DECODER, num_hidden_layers=27, head_dim=8)
    return d.Flux2KleinPipeline(text_encoder=t.Qwen3ForCausalLM(config), **_flux2_parts(3))


def _wan_encoder() -> Any:
    return parts.t5(t.UMT5EncoderModel, t.UMT5Config)


def _wan_two_experts() -> Any:
    return d.WanPipeline(
        tokenizer=parts.tokenizer(16),
        text_encoder=_wan_encoder(),
        vae=parts.wan_vae(),
        scheduler=parts.wan_scheduler(),
        transformer=parts.wan_transformer(16),
        transformer_2=parts.wan_transformer(16),
        boundary_ratio=0.875,
    )


def _wan_small(kind: Any = d.WanPipeline, **settings: Any) -> Any:
    """Wan 2.2's 5B: one time per token, an autoencoder of patches."""
    vae = d.AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=16,
    )
    return kind(
        tokenizer=parts.tokenizer(16),
        text_encoder=_wan_encoder(),
        vae=vae,
        scheduler=parts.wan_scheduler(),
        transformer=parts.wan_transformer(16),
        transformer_2=None,
        expand_timesteps=True,
        **settings,
    )


def _ltx2() -> Any:
    config = t.Gemma3Config(
        text_config={**_DECODER, "num_hidden_layers": 2, "head_dim": 8},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=1,
    )
    transformer = d.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        qk_norm="rms_norm_across_heads",
        caption_channels=16,
        rope_double_precision=False,
        rope_type="split",
    )
    connectors = LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=4,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=4,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
        rope_theta=10000.0,
        rope_double_precision=False,
        causal_temporal_positioning=False,
        rope_type="split",
    )
    vae = d.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    audio_vae = d.AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        dropout=0.0,
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        is_causal=True,
        mel_bins=8,
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        out_channels=2,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        leaky_relu_negative_slope=0.1,
        output_sampling_rate=16000,
    )
    return d.LTX2Pipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=t.Gemma3ForConditionalGeneration(config),
        tokenizer=parts.tokenizer(32),
        connectors=connectors,
        transformer=transformer,
        vocoder=vocoder,
    )


def _cogvideo(kind: Any = d.CogVideoXPipeline, scheduler: Any = None, **settings: Any) -> Any:
    values: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 2,
        "text_embed_dim": 32,
        "num_layers": 1,
        "sample_width": 16,
        "sample_height": 16,
        "sample_frames": 9,
        "patch_size": 2,
        "max_text_seq_length": 226,
        "use_rotary_positional_embeddings": True,
    }
    vae = d.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 3,
        up_block_types=("CogVideoXUpBlock3D",) * 3,
        block_out_channels=(8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    return kind(
        tokenizer=parts.tokenizer(226),
        text_encoder=parts.t5(),
        vae=vae,
        transformer=d.CogVideoXTransformer3DModel(**{**values, **settings}),
        scheduler=scheduler or d.CogVideoXDDIMScheduler(prediction_type="v_prediction"),
    )


def _hunyuan_parts(task: str) -> dict[str, Any]:
    transformer = d.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=16,
        text_embed_2_dim=32,
        image_embed_dim=32,
        rope_axes_dim=(2, 2, 4),
        target_size=32,
        task_type=task,
    )
    vae = d.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    config = t.Qwen2_5_VLTextConfig(**_DECODER, num_hidden_layers=3, **_SECTIONS)
    return {
        "transformer": transformer,
        "vae": vae,
        "scheduler": d.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "text_encoder": t.Qwen2_5_VLTextModel(config),
        "tokenizer": _chat_tokenizer(1000, before=60),
        "text_encoder_2": parts.t5(),
        "tokenizer_2": parts.tokenizer(256),
        "guider": ClassifierFreeGuidance(guidance_scale=6.0),
    }


def _hunyuan_from_image() -> Any:
    vision = t.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return d.HunyuanVideo15ImageToVideoPipeline(
        image_encoder=t.SiglipVisionModel(vision),
        feature_extractor=t.SiglipImageProcessor(size={"height": 28, "width": 28}),
        **_hunyuan_parts("i2v"),
    )


def _mochi() -> Any:
    transformer = d.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=32,
        time_embed_dim=4,
        max_sequence_length=16,
    )
    torch.nn.init.normal_(transformer.pos_frequencies)
    vae = d.AutoencoderKLMochi(
        latent_channels=12,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    return d.MochiPipeline(
        scheduler=d.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=parts.t5(),
        tokenizer=parts.tokenizer(256),
        transformer=transformer,
    )


def _sana() -> Any:
    transformer = d.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=32,
    )
    vae = d.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    config = t.Gemma2Config(**_DECODER, num_hidden_layers=1, head_dim=8)
    return d.SanaPipeline(
        tokenizer=parts.tokenizer(600),
        text_encoder=t.Gemma2Model(config),
        vae=vae,
        transformer=transformer,
        scheduler=d.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def _pixart() -> Any:
    transformer = d.PixArtTransformer2DModel(
        sample_size=16,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
    )
    return d.PixArtSigmaPipeline(
        tokenizer=parts.tokenizer(300),
        text_encoder=parts.t5(),
        vae=parts.vae(),
        transformer=transformer,
        scheduler=d.DPMSolverMultistepScheduler(),
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "QwenImagePipeline": _qwen,
    "QwenImageEditPipeline": lambda: _qwen_edit(d.QwenImageEditPipeline),
    "QwenImageEditPlusPipeline": lambda: _qwen_edit(d.QwenImageEditPlusPipeline, zero_cond_t=True),
    "ZImagePipeline": _z_image,
    "Flux2Pipeline": _flux2,
    "Flux2KleinPipeline": _klein,
    "WanPipeline/two experts": _wan_two_experts,
    "WanPipeline/times of tokens": _wan_small,
    "WanImageToVideoPipeline/times of tokens": lambda: _wan_small(
        d.WanImageToVideoPipeline, image_encoder=None, image_processor=None
    ),
    "LTX2Pipeline": _ltx2,
    "CogVideoXPipeline": _cogvideo,
    "CogVideoXPipeline/dpm": lambda: _cogvideo(scheduler=d.CogVideoXDPMScheduler()),
    "CogVideoXImageToVideoPipeline": lambda: _cogvideo(
        d.CogVideoXImageToVideoPipeline, in_channels=8
    ),
    "HunyuanVideo15Pipeline": lambda: d.HunyuanVideo15Pipeline(**_hunyuan_parts("t2v")),
    "HunyuanVideo15ImageToVideoPipeline": _hunyuan_from_image,
    "MochiPipeline": _mochi,
    "SanaPipeline": _sana,
    "PixArtSigmaPipeline": _pixart,
}
"""Pipelines and, after a slash, variants of their checkpoints."""
