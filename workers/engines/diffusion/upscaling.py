"""Upscales generated images with an upscaling network, tile by tile, within pipeline runs.

Each tile is a separate call at a batch point, so that steps stay short and requests share them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from workers.contract.models import ModelSpec
from workers.engines.cooperative_batching import CooperativeBatcher
from workers.engines.diffusion.options import Options
from workers.engines.upscale import options as upscale_options
from workers.engines.upscale.network import Network, find_weights
from workers.engines.upscale.request import resize
from workers.engines.upscale.tiles import Canvas, plan
from workers.media.pixels import Pixels

_OVERLAP: Final = 16


def _spec(path: str, options: Options) -> ModelSpec:
    own = {"device": options.device, "overlap": _OVERLAP}
    return ModelSpec("upscaler", "image-upscale", checkpoint=path, options=own)


def check_upscaler(path: str, options: Options) -> None:
    """Raise ``ValueError`` if a checkpoint has no weights. They are not read."""
    try:
        find_weights(_spec(path, options))
    except ValueError as error:
        raise ValueError(f"the upscaler: {error}") from error


class Upscaler:
    """Raise ``ValueError`` if the checkpoint cannot be read."""

    def __init__(self, path: str, options: Options, batcher: CooperativeBatcher) -> None:
        spec = _spec(path, options)
        try:
            network = Network(spec, upscale_options.read_options(spec))
        except ValueError as error:
            raise ValueError(f"the upscaler: {error}") from error

        def upscale(tiles: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(network.upscale(tiles.numpy()))

        self.scale = network.scale
        self._tile = network.tile
        self._upscale_tiles = batcher.batch_point("upscaler", upscale, "postprocess")

    def upscale(self, pixels: Pixels, scale: int) -> Pixels:
        """Upscale ``(H, W, 3)`` by ``scale``, which is at most the network's factor."""
        height, width = pixels.shape[:2]
        grid = plan(height, width, tile=self._tile, overlap=_OVERLAP)
        canvas = Canvas(pixels, grid, self.scale)
        for tile in range(grid.tiles):
            crop = torch.from_numpy(np.ascontiguousarray(canvas.cut(tile))[None])
            canvas.put(tile, self._upscale_tiles(crop)[0].numpy())
        upscaled = canvas.image()
        if scale == self.scale:
            return upscaled
        return resize(upscaled, (width * scale, height * scale))
