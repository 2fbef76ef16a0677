"""The diffusion engine on a GPU: every family in 16 bits and quantised, and its peak memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.diffusion.driver import Driver, opened, picture, spec
from workers.contract.jobs import Completed

pytestmark = pytest.mark.gpu

Checkpoint = Callable[[str], Path]


def _draw(of: Driver, count: int = 1, **asked: object) -> list[np.ndarray]:
    names = [f"r{number}" for number in range(count)]
    for number, name in enumerate(names):
        of.admit(name, seed=number, **asked)
    of.finish()
    assert [type(of.outcomes[name]) for name in names] == [Completed] * count, of.outcomes
    return [opened(of.files(name)[0]) for name in names]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "fp8"])
@pytest.mark.parametrize(
    "family",
    [
        "StableDiffusionPipeline",
        "StableDiffusionXLPipeline",
        "StableDiffusion3Pipeline",
        "FluxPipeline",
    ],
)
def test_pictures_are_nearly_those_of_a_cpu(
    family: str, dtype: str, picture_checkpoint: Checkpoint
) -> None:
    path = picture_checkpoint(family)
    (exact,) = _draw(Driver(spec(path, device="cpu")))

    got = _draw(Driver(spec(path, device="cuda:0", dtype=dtype)), 3)

    assert np.abs(got[0] - exact).mean() < (2 if dtype == "float32" else 16)
    assert np.abs(got[0] - got[1]).max() > 3


@pytest.mark.parametrize("offset", range(8))
def test_image_input_of_sdxl_does_not_change_the_precision_of_other_runs(
    offset: int, picture_checkpoint: Checkpoint
) -> None:
    path = picture_checkpoint("StableDiffusionXLPipeline")
    driver = Driver(
        spec(path, "text-to-image", "image-to-image", device="cuda:0", dtype="bfloat16")
    )
    driver.admit("text", seed=1)
    for _ in range(offset):
        driver.step()
    driver.admit("image", [picture()], task="image-to-image", seed=2)

    driver.finish()

    assert {name: type(outcome) for name, outcome in driver.outcomes.items()} == {
        "text": Completed,
        "image": Completed,
    }


@pytest.mark.parametrize("family", ["WanPipeline", "LTXPipeline"])
def test_videos_are_made_in_sixteen_bits(family: str, picture_checkpoint: Checkpoint) -> None:
    driver = Driver(
        spec(picture_checkpoint(family), "text-to-video", device="cuda:0", dtype="bfloat16")
    )

    driver.admit("one", duration_ms=1125)
    driver.finish()

    assert isinstance(driver.outcomes["one"], Completed), driver.outcomes


def test_decoding_sixteen_large_pictures_fits_or_is_split(device: torch.device) -> None:
    """The decoder of Flux, at 1024 x 1024, with random weights."""
    from diffusers import AutoencoderKL

    from tests.workers.driving import PhaseNames
    from workers.engines.cooperative_batching import CooperativeBatcher, PipelineRun

    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).to(device, torch.bfloat16)
    batcher = CooperativeBatcher(rows_max=16)
    decode = batcher.batch_point("vae", vae.decode, "postprocess", module=vae)
    latents = torch.randn(16, 1, 16, 128, 128, dtype=torch.bfloat16, device=device)
    runs = [PipelineRun(lambda latent=latent: decode(latent).sample.shape) for latent in latents]
    for run in runs:
        batcher.start(run)

    ended = 0
    while ended < len(runs):
        ended += len(batcher.turn(PhaseNames().phase).ended)

    assert [run.error for run in runs] == [None] * 16
    assert {tuple(run.result) for run in runs} == {(1, 3, 1024, 1024)}


def test_parts_that_wait_in_pinned_memory_change_no_picture(
    picture_checkpoint: Checkpoint,
) -> None:
    of = spec(picture_checkpoint("StableDiffusionXLPipeline"), device="cuda:0", dtype="bfloat16")
    whole, parked = Driver(of), Driver(of)
    parked.engine.unload()
    parked.engine.allow(parked.engine.demand().bytes)
    parked.engine.load()

    expected, got = _draw(whole, 2), _draw(parked, 2)

    parking = parked.engine._model.parking
    assert parking is not None
    assert parked.engine.memory.host_bytes == parking.bytes > 0
    assert whole.engine.memory.host_bytes == 0
    assert all(host.is_pinned() for part in parking._parts.values() for _, host in part.tensors)
    for one, other in zip(got, expected, strict=True):
        assert np.array_equal(one, other)
