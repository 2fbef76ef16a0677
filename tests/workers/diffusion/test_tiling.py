"""Autoencoders in tiles and row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.diffusion.driver import SIZE, Driver, opened, spec
from workers.contract.jobs import Completed
from workers.engines.cooperative_batching import CooperativeBatcher
from workers.engines.diffusion import loading
from workers.engines.diffusion.options import read_options

Make = Callable[[str], Path]
# Compressions of the tiny checkpoints: frames and sides.
KINDS = {
    "FluxPipeline": (1, 2),
    "Flux2Pipeline": (1, 2),
    "QwenImagePipeline": (1, 4),
    "CogVideoXPipeline": (4, 4),
    "WanPipeline": (4, 8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_and_rows_are_chosen_by_the_pixels_of_the_output(kind: str, checkpoint: Make) -> None:
    frames, side = KINDS[kind]
    video = "Video" in kind or "Wan" in kind
    of = spec(checkpoint(kind), "text-to-video" if video else "text-to-image", tiling=9 * 32 * 32)
    loaded = loading.load(of, read_options(of), CooperativeBatcher(rows_max=4))
    vae = loaded.pipelines[kind].vae
    channels = getattr(vae.config, "latent_channels", None) or vae.config.z_dim
    is_flat = "Flux" in kind

    def decode(rows: int, height: int) -> tuple[bool, bool]:
        depth = () if is_flat else (8 // frames + 1 if video else 1,)
        with torch.no_grad():
            vae.decode(torch.zeros(rows, channels, *depth, height // side, 32 // side))
        return vae.use_tiling, vae.use_slicing

    limit = 32 if video else 9 * 32
    assert decode(1, limit) == (False, False)
    assert decode(2, limit) == (False, True)
    assert decode(1, limit + 32) == (True, True)


def test_rows_one_by_one_give_the_same(checkpoint: Make) -> None:
    kind = "FluxPipeline"
    together = Driver(spec(checkpoint(kind), steps=2, tiling=None))
    bounded = Driver(spec(checkpoint(kind), steps=2, tiling=SIZE * SIZE))

    for driver in (together, bounded):
        driver.admit("one", n=2)
        driver.finish()

    for one, other in zip(together.files("one"), bounded.files("one"), strict=True):
        assert np.abs(opened(one) - opened(other)).max() <= 1


def test_video_in_tiles_is_complete(checkpoint: Make) -> None:
    driver = Driver(spec(checkpoint("WanPipeline"), "text-to-video", steps=2, tiling=1))

    driver.admit("one", width=2 * SIZE, duration_ms=1000)
    driver.finish()

    done = driver.outcomes["one"]
    assert isinstance(done, Completed), done
    assert done.output["media"][0]["width"] == 2 * SIZE
