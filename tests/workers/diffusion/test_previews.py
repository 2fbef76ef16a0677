"""Previews of videos: small, of the right frame, and like the final video."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.diffusion.driver import SIZE, Driver, opened, picture, spec
from workers.contract.jobs import Completed, Sketch
from workers.engines.cooperative_batching import CooperativeBatcher
from workers.engines.diffusion import loading, previews
from workers.engines.diffusion.options import read_options

Make = Callable[[str], Path]


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("PocketVideoPipeline", "text-to-video"),
        ("WanPipeline", "text-to-video"),
        ("WanImageToVideoPipeline", "image-to-video"),
        ("LTXPipeline", "text-to-video"),
        pytest.param("LTXPipeline", "image-to-video", marks=pytest.mark.long),
        ("LTX2Pipeline", "text-to-video"),
        pytest.param("LTX2Pipeline", "image-to-video", marks=pytest.mark.long),
        ("CogVideoXPipeline/dpm", "text-to-video"),
        pytest.param("CogVideoXImageToVideoPipeline", "image-to-video", marks=pytest.mark.long),
        pytest.param("HunyuanVideo15Pipeline", "text-to-video", marks=pytest.mark.long),
        pytest.param(
            "HunyuanVideo15ImageToVideoPipeline", "image-to-video", marks=pytest.mark.long
        ),
    ],
)
def test_previews_of_a_video_are_frames(kind: str, task: str, checkpoint: Make) -> None:
    driver = Driver(spec(checkpoint(kind), task))
    files = [picture()] if task.startswith("image") else []

    driver.admit("one", files, steps=3, previews=2, duration_ms=1000)
    driver.admit("blind", files, steps=3, duration_ms=1000)
    driver.finish()

    assert all(isinstance(driver.outcomes[name], Completed) for name in ("one", "blind"))
    shown = [one for one in driver.events["one"] if isinstance(one, Sketch)]
    assert [one.index for one in shown] == [0, 1]
    assert [opened(one.file.data).shape for one in shown] == [(SIZE, SIZE, 3)] * 2
    assert not any(isinstance(one, Sketch) for one in driver.events["blind"])


def test_preview_of_a_large_video_is_a_thumbnail(checkpoint: Make) -> None:
    driver = Driver(spec(checkpoint("PocketVideoPipeline"), "text-to-video"))

    driver.admit("one", steps=2, previews=1, width=480, height=240, duration_ms=250)
    driver.finish()

    (shown,) = (one for one in driver.events["one"] if isinstance(one, Sketch))
    assert opened(shown.file.data).shape == (160, 320, 3)


def _keep_latents(scheduler: Any) -> list[torch.Tensor]:
    """Return a list that contains the latents after the last step."""
    kind, last = type(scheduler), []

    @functools.wraps(kind.step)
    def kept(own: Any, *args: Any, **kwargs: Any) -> Any:
        stepped = kind.step(own, *args, **kwargs)
        if own is scheduler:
            last[:] = [stepped[0]]
        return stepped

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": kept})
    return last


@pytest.mark.parametrize(
    "kind",
    [
        "FluxPipeline",
        "Flux2Pipeline",
        "QwenImagePipeline",
        "ZImagePipeline",
        pytest.param("SanaPipeline", marks=pytest.mark.long),
    ],
)
def test_decoded_preview_is_the_image(kind: str, checkpoint: Make) -> None:
    of = spec(checkpoint(kind))
    loaded = loading.load(of, read_options(of), CooperativeBatcher(rows_max=4))
    family = loaded.families["text-to-image"]
    pipeline = loaded.copy_for(family, None)
    last = _keep_latents(pipeline.scheduler)

    made = pipeline(
        prompt="a red circle",
        width=SIZE,
        height=2 * SIZE,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **family.extra,
    )
    with torch.no_grad():
        seen = previews.decode_image(pipeline, last[0], 2 * SIZE, SIZE)

    assert np.abs(np.clip(seen, 0, 1) - made.images[0]).max() <= 1e-5


@pytest.mark.parametrize(
    ("kind", "frames", "place"),
    [
        ("PocketVideoPipeline", 4, 2),
        ("WanPipeline", 1, 0),
        ("LTXPipeline", 1, 0),
        ("CogVideoXPipeline", 1, 0),
        pytest.param("CogVideoXPipeline/dpm", 1, 0, marks=pytest.mark.long),
        pytest.param("LTX2Pipeline", 1, 0, marks=pytest.mark.long),
        pytest.param("HunyuanVideo15Pipeline", 1, 0, marks=pytest.mark.long),
    ],
)
def test_decoded_middle_frame_is_that_of_the_video(
    kind: str, frames: int, place: int, checkpoint: Make
) -> None:
    of = spec(checkpoint(kind), "text-to-video")
    loaded = loading.load(of, read_options(of), CooperativeBatcher(rows_max=4))
    pipeline = loaded.copy_for(loaded.families["text-to-video"], None)
    last = _keep_latents(pipeline.scheduler)
    made = pipeline(
        prompt="a red circle",
        width=SIZE,
        height=SIZE,
        num_frames=frames,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    )
    with torch.no_grad():
        seen = previews.decode_middle_frame(pipeline, last[0], SIZE, SIZE)

    assert np.abs(np.clip(seen, 0, 1) - made.frames[0][place]).max() <= 1e-5
