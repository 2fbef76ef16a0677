"""Autoencoders of pictures: ``AutoencoderKL`` and ``AutoencoderTiny`` of diffusers."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.plan.networks.tally import Config, Tally, Work


def kl_work(config: Config, *, width: int, height: int) -> tuple[Work, Work]:
    """Return the work of the encoder and of the decoder for a picture of this size in pixels."""
    channels: Sequence[int] = config["block_out_channels"]
    layers, latent = config.get("layers_per_block", 1), config["latent_channels"]
    blocks = len(channels)
    sizes = [(width >> block) * (height >> block) for block in range(blocks)]
    has_attention = config.get("mid_block_add_attention", True)

    encoder, inputs = Tally(), channels[0]
    encoder.conv(config.get("in_channels", 3), channels[0], 9, sizes[0])
    for block, outputs in enumerate(channels):
        for _ in range(layers):
            _resnet(encoder, inputs, outputs, sizes[block])
            inputs = outputs
        if block < blocks - 1:
            encoder.conv(outputs, outputs, 9, sizes[block + 1])
    _middle(encoder, inputs, sizes[-1], has_attention=has_attention)
    encoder.weights(2 * inputs)
    encoder.conv(inputs, 2 * latent, 9, sizes[-1])
    if config.get("use_quant_conv", True):
        encoder.conv(2 * latent, 2 * latent, 1, sizes[-1])

    decoder = Tally()
    if config.get("use_post_quant_conv", True):
        decoder.conv(latent, latent, 1, sizes[-1])
    decoder.conv(latent, inputs, 9, sizes[-1])
    _middle(decoder, inputs, sizes[-1], has_attention=has_attention)
    for block in reversed(range(blocks)):
        for _ in range(layers + 1):
            _resnet(decoder, inputs, channels[block], sizes[block])
            inputs = channels[block]
        if block:
            decoder.conv(inputs, inputs, 9, sizes[block - 1])
    decoder.weights(2 * inputs)
    decoder.conv(inputs, config.get("out_channels", 3), 9, sizes[0])
    return encoder.work, decoder.work


def tiny_work(config: Config, *, width: int, height: int) -> tuple[Work, Work]:
    """Return the work of the encoder and of the decoder for a picture of this size in pixels."""
    latent = config["latent_channels"]
    counts, widths = config["num_encoder_blocks"], config["encoder_block_out_channels"]
    encoder = Tally()
    for block, (count, channels) in enumerate(zip(counts, widths, strict=True)):
        positions = (width >> block) * (height >> block)
        if block:
            encoder.conv(channels, channels, 9, positions, bias=False)
        else:
            encoder.conv(config.get("in_channels", 3), channels, 9, positions)
        _tiny_blocks(encoder, count, channels, positions)
    encoder.conv(widths[-1], latent, 9, positions)

    counts, widths = config["num_decoder_blocks"], config["decoder_block_out_channels"]
    decoder, last = Tally(), len(counts) - 1
    for block, (count, channels) in enumerate(zip(counts, widths, strict=True)):
        positions = (width >> (last - block)) * (height >> (last - block))
        if not block:
            decoder.conv(latent, channels, 9, positions)
        _tiny_blocks(decoder, count, channels, positions)
        if block < last:
            larger = (width >> (last - block - 1)) * (height >> (last - block - 1))
            decoder.conv(channels, channels, 9, larger, bias=False)
        else:
            decoder.conv(channels, config.get("out_channels", 3), 9, positions)
    return encoder.work, decoder.work


def _tiny_blocks(tally: Tally, count: int, channels: int, positions: int) -> None:
    for _ in range(3 * count):
        tally.conv(channels, channels, 9, positions)


def _middle(tally: Tally, width: int, positions: int, *, has_attention: bool) -> None:
    _resnet(tally, width, width, positions)
    if has_attention:
        tally.weights(2 * width)
        tally.linear(width, 3 * width, positions)
        tally.linear(width, width, positions)
        tally.attend(positions, positions, width)
    _resnet(tally, width, width, positions)


def _resnet(tally: Tally, inputs: int, outputs: int, positions: int) -> None:
    tally.weights(2 * inputs + 2 * outputs)
    tally.conv(inputs, outputs, 9, positions)
    tally.conv(outputs, outputs, 9, positions)
    if inputs != outputs:
        tally.conv(inputs, outputs, 1, positions)
