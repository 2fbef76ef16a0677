"""Autoencoders of diffusers: ``AutoencoderKL`` and ``AutoencoderTiny`` of pictures,
``AutoencoderKLWan`` of video."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.plan.networks.tally import Config, Tally, Unknown, Work


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


def wan_video_work(config: Config, *, width: int, height: int, frames: int) -> tuple[Work, Work]:
    """Return the work of the encoder and of the decoder for a video of this size in pixels.

    The first frame is encoded alone, the others in pairs, twice. Raise ``Unknown`` for the later
    kind with residual blocks.
    """
    if config.get("is_residual"):
        raise Unknown("autoencoder with residual blocks")
    base, latent, layers = config["base_dim"], config["z_dim"], config["num_res_blocks"]
    channels = [base * factor for factor in config["dim_mult"]]
    halved: Sequence[bool] = config["temperal_downsample"]
    last = len(channels) - 1

    encoder, inputs, area, time = Tally(), base, width * height, frames
    encoder.conv(config.get("in_channels") or 3, base, 27, time * area)
    for block, outputs in enumerate(channels):
        for _ in range(layers):
            _video_resnet(encoder, inputs, outputs, time * area)
            inputs = outputs
        if block < last:
            area //= 4
            encoder.conv(outputs, outputs, 9, time * area)
            if halved[block]:
                time = (time + 1) // 2
                encoder.conv(outputs, outputs, 3, (time - 1) * area)
    _video_middle(encoder, inputs, area, time)
    encoder.weights(inputs)
    encoder.conv(inputs, 2 * latent, 27, time * area)
    encoder.conv(2 * latent, 2 * latent, 1, time * area)

    decoder = Tally()
    decoder.conv(latent, latent, 1, time * area)
    decoder.conv(latent, inputs, 27, time * area)
    _video_middle(decoder, inputs, area, time)
    for block in reversed(range(last + 1)):
        outputs = channels[block]
        for _ in range(layers + 1):
            _video_resnet(decoder, inputs, outputs, time * area)
            inputs = outputs
        if block:
            if halved[block - 1]:
                decoder.conv(outputs, 2 * outputs, 3, (time - 1) * area)
                time = 2 * time - 1
            area *= 4
            decoder.conv(outputs, outputs // 2, 9, time * area)
            inputs = outputs // 2
    decoder.weights(inputs)
    decoder.conv(inputs, config.get("out_channels") or 3, 27, time * area)
    return encoder.work, decoder.work


def _video_middle(tally: Tally, width: int, area: int, time: int) -> None:
    _video_resnet(tally, width, width, time * area)
    tally.weights(width)
    tally.linear(width, 3 * width, time * area)
    tally.linear(width, width, time * area)
    tally.attend(time * area, area, width)
    _video_resnet(tally, width, width, time * area)


def _video_resnet(tally: Tally, inputs: int, outputs: int, positions: int) -> None:
    tally.weights(inputs + outputs)
    tally.conv(inputs, outputs, 27, positions)
    tally.conv(outputs, outputs, 27, positions)
    if inputs != outputs:
        tally.conv(inputs, outputs, 1, positions)


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
