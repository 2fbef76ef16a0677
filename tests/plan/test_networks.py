"""Weights and operations computed from configurations, compared with torch on its meta device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from gateway.plan.generators import ResultOrder, generators, read_generator
from gateway.plan.networks.audio import csm_work, musicgen_work
from gateway.plan.networks.autoencoders import kl_work, tiny_work, wan_video_work
from gateway.plan.networks.diffusion_transformers import flux_work, ltx_work, sd3_work, wan_work
from gateway.plan.networks.encoders import clip_work, t5_work
from gateway.plan.networks.sentence_speech import conformer_work, frame_rate, vocoder_work
from gateway.plan.networks.tally import Unknown, Work
from gateway.plan.networks.unet import unet_work
from gateway.plan.networks.upscaler import compact_work
from gateway.plan.shapes import read_config
from workers.engines.speech.source_filter_vocoder import SourceFilterVocoder
from workers.engines.upscale.compact import Compact

POCKET = Path(__file__).parents[2] / "workers" / "pocket"
TEXT = 6


def weights(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def operations(module: Any, *inputs: Any, **named: Any) -> int:
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*inputs, **named)
    return int(counter.get_total_flops())


def build(name: str, config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return getattr(diffusers, name)(**config).eval()


def meta(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="meta")


def close(work: Work, module: Any, counted: int) -> None:
    """The weights are exact; the counter sees operations that we ignore, and the reverse."""
    assert work.parameters == weights(module)
    assert work.operations == pytest.approx(counted, rel=0.02)


UNET = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [32, 64],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "cross_attention_dim": 48,
    "attention_head_dim": 8,
    "transformer_layers_per_block": [1, 2],
}


def test_unet_with_transformers_in_its_blocks() -> None:
    module = build("UNet2DConditionModel", UNET)

    work = unet_work(UNET, width=16, height=8, text=TEXT)

    counted = operations(module, meta(1, 4, 8, 16), 1, meta(1, TEXT, 48))
    close(work, module, counted)


@pytest.mark.parametrize("name", ["image", "video"])
def test_unets_of_the_shipped_models(name: str) -> None:
    config = dict(read_generator(POCKET / name).networks["unet"])
    module = build("UNet2DConditionModel", {k: v for k, v in config.items() if k[0] != "_"})

    work = unet_work(config, width=32, height=32, text=TEXT)

    inputs = (meta(1, config["in_channels"], 32, 32), 1, meta(1, TEXT, 128))
    close(work, module, operations(module, *inputs, class_labels=meta(1, 128)))


def test_unknown_blocks_are_refused() -> None:
    with pytest.raises(Unknown, match="KDownBlock2D"):
        unet_work({**UNET, "down_block_types": ["KDownBlock2D"] * 2}, width=8, height=8, text=1)


FLUX = {
    "num_layers": 2,
    "num_single_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 8,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 12,
    "guidance_embeds": True,
    "axes_dims_rope": [4, 4, 8],
}
SD3 = {
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "joint_attention_dim": 24,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 12,
    "qk_norm": "rms_norm",
    "dual_attention_layers": [0],
    "pos_embed_max_size": 16,
    "sample_size": 16,
}
WAN = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "ffn_dim": 48,
    "freq_dim": 16,
    "text_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": [1, 2, 2],
    "cross_attn_norm": True,
}
LTX = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 8,
    "out_channels": 8,
    "cross_attention_dim": 32,
    "caption_channels": 24,
}


def test_transformer_of_flux() -> None:
    module = build("FluxTransformer2DModel", FLUX)

    counted = operations(
        module, meta(1, 32, 8), meta(1, TEXT, 24), meta(1, 12), meta(1), meta(32, 3),
        meta(TEXT, 3), meta(1),
    )  # fmt: skip

    close(flux_work(FLUX, positions=32, text=TEXT), module, counted)


def test_transformer_of_stable_diffusion_3() -> None:
    module = build("SD3Transformer2DModel", SD3)

    counted = operations(module, meta(1, 4, 16, 8), meta(1, TEXT, 24), meta(1, 12), meta(1))

    close(sd3_work(SD3, positions=32, text=TEXT), module, counted)


def test_transformer_of_wan() -> None:
    module = build("WanTransformer3DModel", WAN)

    counted = operations(module, meta(1, 4, 3, 16, 8), meta(1), meta(1, TEXT, 24))

    close(wan_work(WAN, positions=3 * 32, text=TEXT), module, counted)


def test_transformer_of_ltx_video() -> None:
    module = build("LTXVideoTransformer3DModel", LTX)

    counted = operations(
        module, meta(1, 24, 8), meta(1, TEXT, 24), torch.zeros(1, device="meta"),
        meta(1, TEXT), 3, 2, 4,
    )  # fmt: skip

    close(ltx_work(LTX, positions=24, text=TEXT), module, counted)


@pytest.mark.parametrize(
    ("kind", "work", "config"),
    [
        (
            "AutoencoderKL",
            kl_work,
            {
                "block_out_channels": [32, 64],
                "down_block_types": ["DownEncoderBlock2D"] * 2,
                "up_block_types": ["UpDecoderBlock2D"] * 2,
                "layers_per_block": 1,
                "latent_channels": 4,
            },
        ),
        (
            "AutoencoderTiny",
            tiny_work,
            {
                "encoder_block_out_channels": [8, 8, 8],
                "decoder_block_out_channels": [16, 16, 16],
                "num_encoder_blocks": [1, 1, 2],
                "num_decoder_blocks": [2, 1, 1],
                "latent_channels": 4,
            },
        ),
    ],
)
def test_autoencoders(
    kind: str, work: Callable[..., tuple[Work, Work]], config: dict[str, Any]
) -> None:
    module = build(kind, config)
    encoder, decoder = work(config, width=32, height=16)

    latents = meta(1, 4, *((8, 16) if kind == "AutoencoderKL" else (4, 8)))
    encoded = operations(module.encode, meta(1, 3, 16, 32))
    decoded = operations(module.decode, latents)

    assert encoder.parameters + decoder.parameters == weights(module)
    assert encoder.operations == pytest.approx(encoded, rel=0.02)
    assert decoder.operations == pytest.approx(decoded, rel=0.02)


def test_autoencoder_of_video() -> None:
    config = {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True],
    }
    module = build(
        "AutoencoderKLWan", {**config, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    )

    encoder, decoder = wan_video_work(config, width=32, height=16, frames=5)

    assert encoder.parameters + decoder.parameters == weights(module)
    decoded = operations(module.decode, meta(1, 4, 3, 4, 8))
    assert decoder.operations == pytest.approx(decoded, rel=0.02)
    with pytest.raises(Unknown, match="residual"):
        wan_video_work({**config, "is_residual": True}, width=32, height=16, frames=5)


def test_encoders_of_prompts() -> None:
    clip = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "vocab_size": 100,
        "projection_dim": 24,
    }
    t5 = {
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_heads": 2,
        "num_layers": 2,
        "vocab_size": 100,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": 8,
    }
    with torch.device("meta"):
        seen: Any = transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**clip))
        read: Any = transformers.T5EncoderModel(transformers.T5Config(**t5))

    assert clip_work(clip, text=TEXT, projected=True).parameters == weights(seen)
    assert t5_work(t5, text=TEXT).parameters == weights(read)
    ids = torch.zeros((1, TEXT), dtype=torch.long, device="meta")
    assert t5_work(t5, text=TEXT).operations == pytest.approx(operations(read, ids), rel=0.02)


def test_decoders_of_codec_tokens() -> None:
    table = generators()
    with torch.device("meta"):
        csm: Any = transformers.CsmForConditionalGeneration(transformers.CsmConfig())
        decoder = {**table["musicgen-medium"].networks[""]["decoder"], "num_attention_heads": 24}
        music: Any = transformers.MusicgenForCausalLM(transformers.MusicgenDecoderConfig(**decoder))

    backbone, depth = csm_work(table["csm-1b"].networks[""])
    written = musicgen_work(table["musicgen-medium"].networks[""])

    codec = weights(csm.codec_model)
    # The embeddings of codes are the backbone's and the depth decoder's.
    shared = 32 * 2051 * 2048
    assert backbone.parameters + depth.parameters == weights(csm) - codec
    assert shared < backbone.parameters
    # The projection of the encoded text is beside the decoder.
    assert written.parameters == weights(music) + 768 * 1536 + 1536


def test_models_that_speak_a_sentence_at_once() -> None:
    config = read_config(POCKET / "speech" / "config.json")
    speaker: Any = transformers.FastSpeech2ConformerModel(
        transformers.FastSpeech2ConformerConfig.from_pretrained(POCKET / "speech")
    ).eval()
    with torch.no_grad():
        speaker.duration_predictor.linear.bias.fill_(2.0)
    ids = torch.arange(1, 31)[None]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        frames = speaker(ids, speaker_embedding=torch.ones(1, 32)).spectrogram.shape[1]

    work = conformer_work(config, phonemes=30, frames=frames)

    assert work.parameters == weights(speaker)
    assert work.operations == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_vocoders() -> None:
    config = transformers.FastSpeech2ConformerHifiGanConfig(upsample_initial_channel=32)
    own = read_config(POCKET / "speech" / "vocoder" / "config.json")
    with torch.device("meta"):
        hifigan: Any = transformers.FastSpeech2ConformerHifiGan(config).eval()
        source_filter = SourceFilterVocoder(width=own["width"], depth=own["depth"])

    work = vocoder_work(config.to_dict(), frames=20)

    close(work, hifigan, operations(hifigan, meta(1, 20, config.model_in_dim)))
    assert frame_rate(config.to_dict()) == 22_050 / 256
    assert frame_rate(own) == 22_050 / 300
    assert vocoder_work(own, frames=20).parameters == weights(source_filter)


def test_upscaler() -> None:
    config = {"width": 8, "depth": 3, "scale": 2}
    with torch.device("meta"):
        module = Compact(**config)

    work = compact_work(config, pixels=16 * 8)

    close(work, module, operations(module, meta(1, 3, 8, 16)))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "csm"}, "the configuration of csm has no 'hidden_size'"),
        ({"architecture": "compact", "width": "8"}, "the configuration of compact is invalid"),
        ({"model_type": "vits"}, "the weights of vits are not there to be counted"),
    ],
)
def test_configuration_that_lacks_something_is_refused(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = ResultOrder(width=64, height=64, seconds=1, fps=1, steps=1, guidance=1)

    with pytest.raises(ValueError, match=said):
        read_generator(tmp_path).parts(result, "text-to-speech")


def test_weights_of_well_known_models() -> None:
    def denoiser(name: str) -> Any:
        model = generators()[name]
        return model.networks.get("unet") or model.networks["transformer"]

    # As published with the models.
    assert unet_work(denoiser("sdxl"), width=128, height=128, text=77).parameters == 2_567_463_684
    flux = flux_work(denoiser("flux.1-dev"), positions=4096, text=512)
    assert flux.parameters == 11_901_408_320
    # 59.5 TFLOP of products with weights, as diffusers reports, and 14.9 of attention.
    assert flux.operations == pytest.approx(74.4e12, rel=0.001)
    large = wan_work(denoiser("wan2.1-t2v-14b"), positions=1, text=512)
    small = wan_work(denoiser("wan2.1-t2v-1.3b"), positions=1, text=512)
    assert (large.parameters, small.parameters) == (14_288_491_584, 1_418_996_800)
    vae = generators()["wan2.1-t2v-14b"].networks["vae"]
    both = wan_video_work(vae, width=832, height=480, frames=81)
    assert sum(work.parameters for work in both) == 126_892_531
