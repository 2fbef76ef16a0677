"""Checkpoints of every proven family: the real classes, tiny, with random weights, on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyz '.,!?[]0123456789S"
RATE = 8_000


def make_checkpoint(name: str, path: Path) -> Path:
    """Save a checkpoint of a family, the same one every time."""
    path.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MAKERS[name](path)
    return path


def _letters(path: Path, *, specials: tuple[str, ...] = ()) -> Any:
    """A tokenizer of single letters."""
    named = ["<pad>", "</s>", "<unk>", "<s>", *specials]
    vocabulary = {word: i for i, word in enumerate([*named, *LETTERS, *LETTERS.upper()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    made = t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(specials),
    )
    made.save_pretrained(path)
    return made


def _vits(path: Path, **settings: Any) -> None:
    config = t.VitsConfig(
        vocab_size=len(LETTERS) + 1,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=16,
        flow_size=16,
        spectrogram_bins=9,
        posterior_encoder_num_wavenet_layers=1,
        prior_encoder_num_flows=1,
        prior_encoder_num_wavenet_layers=1,
        upsample_initial_channel=16,
        upsample_rates=[8, 4],
        upsample_kernel_sizes=[16, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        duration_predictor_num_flows=1,
        duration_predictor_filter_channels=16,
        depth_separable_num_layers=1,
        wavenet_kernel_size=3,
        sampling_rate=RATE,
        **settings,
    )
    t.VitsModel(config).save_pretrained(path)
    vocabulary = path / "vocabulary.json"
    vocabulary.write_text(json.dumps({c: i for i, c in enumerate("_" + LETTERS[:28] + "-")}))
    t.VitsTokenizer(
        str(vocabulary), pad_token="_", unk_token="-", phonemize=False, language="eng"
    ).save_pretrained(path)


def _speecht5(path: Path) -> None:
    config = t.SpeechT5Config(
        vocab_size=120,
        hidden_size=16,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        num_mel_bins=8,
        reduction_factor=2,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_units=16,
        speech_decoder_postnet_layers=2,
        speaker_embedding_dim=6,
        pad_token_id=0,
        bos_token_id=3,
        eos_token_id=1,
        max_text_positions=600,
    )
    model = t.SpeechT5ForTextToSpeech(config)
    model.speech_decoder_postnet.prob_out.bias.data.fill_(-3)
    model.save_pretrained(path)
    _letters(path)
    _hifigan(t.SpeechT5HifiGan, t.SpeechT5HifiGanConfig).save_pretrained(path / "vocoder")
    for name, seed in (("ann", 1), ("bob", 2)):
        np.save(path / f"{name}.npy", np.random.RandomState(seed).randn(6).astype(np.float32))


def _hifigan(kind: Any, config: Any) -> Any:
    made = kind(_hifigan_config(config))
    return _heard(made)


def _heard(vocoder: Any) -> Any:
    """Weights as they begin are so small that nothing comes of them."""
    for weight in vocoder.parameters():
        weight.data.normal_(std=0.2)
    return vocoder


def _hifigan_config(config: Any) -> Any:
    return config(
        model_in_dim=8,
        sampling_rate=RATE,
        upsample_initial_channel=16,
        upsample_rates=[8, 4],
        upsample_kernel_sizes=[16, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
    )


def _fastspeech(path: Path) -> None:
    model = t.FastSpeech2ConformerConfig(
        hidden_size=16,
        vocab_size=120,
        num_mel_bins=8,
        encoder_num_attention_heads=2,
        encoder_layers=1,
        encoder_linear_units=16,
        decoder_layers=1,
        decoder_num_attention_heads=2,
        decoder_linear_units=16,
        speech_decoder_postnet_layers=2,
        speech_decoder_postnet_units=16,
        duration_predictor_layers=1,
        duration_predictor_channels=16,
        energy_predictor_layers=1,
        energy_predictor_channels=16,
        pitch_predictor_layers=1,
        pitch_predictor_channels=16,
        num_speakers=3,
    )
    vocoder = _hifigan_config(t.FastSpeech2ConformerHifiGanConfig)
    config = t.FastSpeech2ConformerWithHifiGanConfig(
        model_config=model.to_dict(), vocoder_config=vocoder.to_dict()
    )
    made = t.FastSpeech2ConformerWithHifiGan(config)
    made.model.duration_predictor.linear.bias.data.fill_(1.6)
    _heard(made.vocoder)
    made.save_pretrained(path)
    _letters(path)


def _encodec(**settings: Any) -> Any:
    return t.EncodecConfig(
        **{
            "target_bandwidths": [24.0],
            "sampling_rate": RATE,
            "num_filters": 4,
            "hidden_size": 8,
            "codebook_size": 16,
            "codebook_dim": 8,
            "upsampling_ratios": [4, 4],
            "num_lstm_layers": 1,
            "norm_type": "weight_norm",
            **settings,
        }
    )


def _bark(path: Path) -> None:
    small = {
        "block_size": 128,
        "num_layers": 1,
        "num_heads": 2,
        "hidden_size": 16,
        "bias": True,
        "n_codes_total": 4,
    }
    config = t.BarkConfig(
        semantic_config={**small, "input_vocab_size": 400, "output_vocab_size": 60},
        coarse_acoustics_config={**small, "input_vocab_size": 120, "output_vocab_size": 120},
        fine_acoustics_config={**small, "input_vocab_size": 20, "output_vocab_size": 20},
        codec_config=_encodec().to_dict(),
    )
    model = t.BarkModel(config)
    model.save_pretrained(path)
    _letters(path)


MAKERS = {
    "vits": _vits,
    "vits-speakers": lambda path: _vits(path, num_speakers=3, speaker_embedding_size=8),
    "speecht5": _speecht5,
    "fastspeech2_conformer": _fastspeech,
    "bark": _bark,
}
