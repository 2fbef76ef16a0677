"""Models that speak a sentence at once: FastSpeech2Conformer, and vocoders for its frames."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

from gateway.plan.networks.tally import Config, Tally, Work

_SAMPLING_RATE: Final = 22_050
"""Samples per second, unless a configuration has another number."""
_OWN_RATE: Final = _SAMPLING_RATE / 300
"""Frames per second of our own vocoder."""
_OWN_FRAME: Final = 82
"""Values of one of its frames."""
_OWN_FILTER: Final = 1026
"""Values of the two filters that it predicts for a frame."""


def frame_rate(vocoder: Config) -> float:
    """Return the frames of a second of sound."""
    if "upsample_rates" not in vocoder:
        return _OWN_RATE
    samples: int = vocoder.get("sampling_rate") or _SAMPLING_RATE
    return samples / math.prod(vocoder["upsample_rates"])


def conformer_work(config: Config, *, phonemes: int, frames: int) -> Work:
    """Return the work for a text of so many phonemes, spoken in so many frames."""
    tally, width = Tally(), config["hidden_size"]
    mels, reduced = config["num_mel_bins"], config["reduction_factor"]
    tally.weights(config["vocab_size"] * width)
    for several in ("num_languages", "num_speakers"):
        if (config.get(several) or 0) > 1:
            tally.weights(config[several] * width)
    if speaker := config.get("speaker_embed_dim"):
        tally.linear(width + speaker, width, phonemes)
    _conformer(tally, config, config["encoder_config"], phonemes)
    for name in ("duration", "pitch", "energy"):
        _predictor(tally, config, name, phonemes)
    for name in ("pitch", "energy"):
        tally.conv(1, width, config[f"{name}_embed_kernel_size"], phonemes)
    positions = -(-frames // reduced)
    _conformer(tally, config, config["decoder_config"], positions)
    tally.linear(width, mels * reduced, positions)
    layers, units = config["speech_decoder_postnet_layers"], config["speech_decoder_postnet_units"]
    widths = [mels, *[units] * (layers - 1), mels]
    for inputs, outputs in pairwise(widths):
        tally.conv(inputs, outputs, config["speech_decoder_postnet_kernel"], frames, bias=False)
        tally.weights(2 * outputs)
    return tally.work


def vocoder_work(config: Config, *, frames: int) -> Work:
    """Return the work of a HiFi-GAN, or of our own vocoder, for so many frames."""
    return _hifigan(config, frames) if "upsample_rates" in config else _own_vocoder(config, frames)


def _conformer(tally: Tally, config: Config, part: Mapping[str, Any], positions: int) -> None:
    width, kernel = config["hidden_size"], config["positionwise_conv_kernel_size"]
    feeds = 2 if config["use_macaron_style_in_conformer"] else 1
    bias = config["convolution_bias"]
    for _ in range(part["layers"]):
        tally.weights(2 * width)  # biases of queries
        for _ in range(4):
            tally.linear(width, width, positions)
        relative = 2 * positions - 1
        tally.linear(width, width, relative, bias=False)
        tally.attend(positions, positions, width)
        tally.attend(positions, relative // 2, width)  # scores alone
        for _ in range(feeds):
            tally.conv(width, part["linear_units"], kernel, positions)
            tally.conv(part["linear_units"], width, kernel, positions)
        tally.weights(2 * width * (1 + feeds))
        if config["use_cnn_in_conformer"]:
            tally.weights(3 * 2 * width)
            tally.conv(width, 2 * width, 1, positions, bias=bias)
            tally.linear(part["kernel_size"], width, positions, bias=bias)  # by channel
            tally.conv(width, width, 1, positions, bias=bias)
        if part["concat_after"]:
            tally.linear(2 * width, width, positions)


def _predictor(tally: Tally, config: Config, name: str, positions: int) -> None:
    inputs, channels = config["hidden_size"], config[f"{name}_predictor_channels"]
    for _ in range(config[f"{name}_predictor_layers"]):
        tally.conv(inputs, channels, config[f"{name}_predictor_kernel_size"], positions)
        tally.weights(2 * channels)
        inputs = channels
    tally.linear(channels, 1, positions)


def _hifigan(config: Config, frames: int) -> Work:
    tally, channels, positions = Tally(), config["upsample_initial_channel"], frames
    tally.conv(config["model_in_dim"], channels, 7, positions)
    for rate, taps in zip(config["upsample_rates"], config["upsample_kernel_sizes"], strict=True):
        # Transposed: every position of the input contributes to as many of the output as taps.
        tally.linear(channels, channels // 2 * taps, positions, bias=False)
        channels, positions = channels // 2, positions * rate
        tally.weights(channels)
        kernels = zip(
            config["resblock_kernel_sizes"], config["resblock_dilation_sizes"], strict=True
        )
        for kernel, dilations in kernels:
            for _ in range(2 * len(dilations)):
                tally.conv(channels, channels, kernel, positions)
    tally.conv(channels, 1, 7, positions)
    return tally.work


def _own_vocoder(config: Config, frames: int) -> Work:
    tally, width = Tally(), config["width"]
    tally.conv(_OWN_FRAME, width, 3, frames)
    for _ in range(config["depth"]):
        tally.linear(7, width, frames)  # by channel
        tally.weights(2 * width)
        tally.mlp(width, 3 * width, frames)
    tally.conv(width, _OWN_FILTER, 1, frames)
    return tally.work
