"""The denoiser ``UNet2DConditionModel`` of diffusers: Stable Diffusion 1, 2 and XL, and our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.plan.networks.tally import Config, Tally, Unknown, Work


def unet_work(config: Config, *, width: int, height: int, text: int) -> Work:
    """Return the work of a forward pass over latents of this size, with ``text`` tokens.

    Raise ``Unknown`` if it has a kind of block that is not known.
    """
    return _Unet(config, text).work(width, height)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention of one block. ``simple`` is the kind that reads text and picture together."""

    simple: bool
    layers: int


class _Unet:
    def __init__(self, config: Config, text: int) -> None:
        self._config = config
        self._text = text
        self._tally = Tally()
        self._channels: Sequence[int] = config["block_out_channels"]
        self._time = 4 * self._channels[0]
        self._scale_shift = config.get("resnet_time_scale_shift") == "scale_shift"

    def work(self, width: int, height: int) -> Work:
        config, tally, channels = self._config, self._tally, self._channels
        blocks = len(channels)
        sizes = [(width >> block) * (height >> block) for block in range(blocks)]
        layers = _each(config.get("layers_per_block", 2), blocks)
        attentions = [
            self._attention(kind, depth)
            for kind, depth in zip(
                config["down_block_types"],
                _each(config.get("transformer_layers_per_block", 1), blocks),
                strict=True,
            )
        ]
        self._conditions()
        tally.conv(config["in_channels"], channels[0], 9, sizes[0])
        skips, inputs = [channels[0]], channels[0]
        for block, outputs in enumerate(channels):
            for _ in range(layers[block]):
                self._resnet(inputs, outputs, sizes[block])
                self._attend(attentions[block], outputs, sizes[block])
                skips.append(outputs)
                inputs = outputs
            if block < blocks - 1:
                self._resample(attentions[block], outputs, sizes[block + 1])
                skips.append(outputs)
        self._middle(channels[-1], sizes[-1], attentions[-1])
        for block in reversed(range(blocks)):
            outputs = channels[block]
            for _ in range(layers[block] + 1):
                self._resnet(inputs + skips.pop(), outputs, sizes[block])
                self._attend(attentions[block], outputs, sizes[block])
                inputs = outputs
            if block:
                self._resample(attentions[block], outputs, sizes[block - 1])
        tally.weights(2 * channels[0])
        tally.conv(channels[0], config["out_channels"], 9, sizes[0])
        return tally.work

    def _attention(self, kind: str, layers: Any) -> _Attention | None:
        if not isinstance(layers, int):
            raise Unknown(f"layers per block {layers!r}")
        match kind:
            case "DownBlock2D":
                return None
            case "CrossAttnDownBlock2D":
                return _Attention(False, layers)
            case "SimpleCrossAttnDownBlock2D":
                return _Attention(True, layers)
        raise Unknown(f"block {kind}")

    def _conditions(self) -> None:
        """Count the embeddings of the time and of what else is given once for a pass."""
        config, time = self._config, self._time
        self._tally.mlp(self._channels[0], time, 1, time)
        given = config.get("projection_class_embeddings_input_dim")
        if config.get("class_embed_type") == "projection" or (
            config.get("addition_embed_type") == "text_time"
        ):
            self._tally.mlp(given or 0, time, 1, time)

    def _middle(self, width: int, positions: int, attention: _Attention | None) -> None:
        kind = self._config.get("mid_block_type", "UNetMidBlock2DCrossAttn")
        if kind not in ("UNetMidBlock2DCrossAttn", "UNetMidBlock2DSimpleCrossAttn"):
            raise Unknown(f"block {kind}")
        layers = 1 if attention is None else attention.layers
        self._resnet(width, width, positions)
        self._attend(_Attention("Simple" in kind, layers), width, positions)
        self._resnet(width, width, positions)

    def _resnet(self, inputs: int, outputs: int, positions: int) -> None:
        tally = self._tally
        tally.weights(2 * inputs + 2 * outputs)
        tally.conv(inputs, outputs, 9, positions)
        tally.linear(self._time, outputs * (2 if self._scale_shift else 1), 1)
        tally.conv(outputs, outputs, 9, positions)
        if inputs != outputs:
            tally.conv(inputs, outputs, 1, positions)

    def _resample(self, attention: _Attention | None, width: int, positions: int) -> None:
        """Count the layers that change the size, to ``positions``."""
        if attention is not None and attention.simple:
            self._resnet(width, width, positions)
        else:
            self._tally.conv(width, width, 9, positions)

    def _attend(self, attention: _Attention | None, width: int, positions: int) -> None:
        if attention is None:
            return
        tally, cross, text = self._tally, self._config["cross_attention_dim"], self._text
        tally.weights(2 * width)
        if attention.simple:
            for _ in range(4):
                tally.linear(width, width, positions)
            tally.linear(cross, 2 * width, text)
            tally.attend(positions, positions + text, width)
            return
        tally.linear(width, width, positions)
        for _ in range(attention.layers):
            tally.weights(6 * width)
            tally.linear(width, 3 * width, positions, bias=False)
            tally.attend(positions, positions, width)
            tally.linear(width, width, positions)
            tally.linear(width, width, positions, bias=False)
            tally.linear(cross, 2 * width, text, bias=False)
            tally.attend(positions, text, width)
            tally.linear(width, width, positions)
            # Half of the hidden layer gates the other.
            tally.linear(width, 8 * width, positions)
            tally.linear(4 * width, width, positions)
        tally.linear(width, width, positions)


def _each(value: Any, blocks: int) -> Sequence[Any]:
    return [value] * blocks if isinstance(value, int) else list(value)
