"""Masks: what they protect, by every way of inpainting, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.workers.diffusion.driver import SIZE, Driver, opened, picture, spec
from workers.contract.jobs import Failed, Sketch
from workers.engines.cooperative_batching import CooperativeBatcher
from workers.engines.diffusion import loading, masks, schedulers
from workers.engines.diffusion.options import read_options

Make = Callable[[str], Path]
HALF = SIZE // 2


def mask_file(
    *, transparent: bool = False, size: tuple[int, int] = (SIZE, SIZE), open_: bool = True
) -> bytes:
    """The right half may change: it is white, or transparent as OpenAI's clients have it."""
    width, height = size
    right = np.zeros((height, width), np.uint8)
    right[:, width // 2 :] = 255 * open_
    if transparent:
        colours = np.full((height, width, 3), 90, np.uint8)
        image = Image.fromarray(np.dstack([colours, 255 - right]), "RGBA")
    else:
        image = Image.fromarray(right)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("StableDiffusionPipeline", "image-to-image"),
        ("StableDiffusionInpaintPipeline", "image-edit"),
        ("FluxKontextPipeline", "image-edit"),
        ("StableDiffusionInstructPix2PixPipeline", "image-edit"),
        ("PocketImagePipeline", "image-to-image"),
        ("PocketImagePipeline", "image-edit"),
    ],
)
@pytest.mark.parametrize("transparent", [False, True])
def test_protected_area_is_unchanged_in_previews_and_output(
    kind: str, task: str, transparent: bool, checkpoint: Make
) -> None:
    driver = Driver(spec(checkpoint(kind), task))
    source = picture(1, (SIZE, SIZE))

    driver.admit("one", [source, mask_file(transparent=transparent)], mask=True, previews=1)
    driver.finish()

    kept = opened(source)
    shown = [one.file.data for one in driver.events["one"] if isinstance(one, Sketch)]
    assert len(shown) == 1
    for made in (*driver.files("one"), *shown):
        assert np.array_equal(opened(made)[:, :HALF], kept[:, :HALF])
        assert not np.array_equal(opened(made)[:, HALF:], kept[:, HALF:])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("StableDiffusionInstructPix2PixPipeline", name) for name in schedulers._NOISE),
        *(("PocketImagePipeline", name) for name in schedulers._FLOW),
    ],
)
def test_source_has_the_noise_level_of_the_latents_between_steps(
    kind: str, name: str, checkpoint: Make
) -> None:
    of = spec(checkpoint(kind), "image-edit")
    loaded = loading.load(of, read_options(of), CooperativeBatcher(rows_max=4))
    pipeline = loaded.copy_for(loaded.families["image-edit"], name)
    scheduler = pipeline.scheduler
    scheduler.set_timesteps(5)
    mask = np.zeros((SIZE, SIZE), np.float32)
    source = Image.open(io.BytesIO(picture(1, (SIZE, SIZE))))
    with torch.no_grad():
        blend = masks.Blend(pipeline, source, mask, 7)
    clean, noise = blend._source, torch.randn(blend._source.shape, generator=_seeded(7))

    for place, timestep in enumerate(scheduler.timesteps):
        scheduler.step(torch.zeros_like(clean), timestep, clean, return_dict=False)
        kept = blend.keep(torch.full_like(clean, 1e6), timestep)

        if place + 1 == len(scheduler.timesteps):
            expected = clean
        elif schedulers.is_flow(scheduler):
            time = scheduler.sigmas[place + 1]
            expected = (1 - time) * clean + time * noise
        elif name.startswith("euler"):
            expected = clean + scheduler.sigmas[place + 1] * noise
        else:
            left = scheduler.alphas_cumprod[int(scheduler.timesteps[place + 1])]
            expected = left.sqrt() * clean + (1 - left).sqrt() * noise
        assert torch.allclose(kept, expected.to(kept.dtype), atol=1e-4)


def test_masked_area_is_generated_in_the_context_of_the_rest(checkpoint: Make) -> None:
    driver = Driver(spec(checkpoint("PocketImagePipeline"), "image-edit"))
    source = picture(1, (SIZE, SIZE))

    driver.admit("free", [source], seed=5)
    driver.admit("masked", [source, mask_file()], mask=True, seed=5)
    driver.finish()

    free, masked = (opened(driver.files(name)[0])[:, HALF:] for name in ("free", "masked"))
    assert not np.array_equal(free, masked), "more than pasted in"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([picture()], "edits the area of a mask"),
        ([mask_file()], "A mask needs an image"),
        ([picture(), mask_file(size=(40, 40))], "The mask is 40x40"),
        ([picture(), b"nothing"], "not a supported image"),
        ([picture(size=(SIZE, SIZE)), mask_file(open_=False)], "protects the whole image"),
    ],
)
def test_invalid_masks_are_refused(files: list[bytes], words: str, checkpoint: Make) -> None:
    driver = Driver(spec(checkpoint("StableDiffusionInpaintPipeline"), "image-edit"))

    refused = driver.admit("one", files, mask="edits the area" not in words)

    assert isinstance(refused, Failed)
    assert (refused.code, refused.param) == ("invalid_input", "mask")
    assert words in refused.message
    assert not driver.open


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
