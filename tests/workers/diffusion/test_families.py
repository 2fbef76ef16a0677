"""What single families need beyond a call: sound, a guider, texts of different lengths."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import av
import pytest

from gateway.plan.subjects import PIPELINE_TASKS
from tests.workers.diffusion.driver import SIZE, Driver, opened, picture, spec
from workers.contract.jobs import Completed, Failed
from workers.engines.cooperative_batching import CooperativeBatcher
from workers.engines.diffusion import loading, sizes
from workers.engines.diffusion.families import FAMILIES
from workers.engines.diffusion.options import read_options

Make = Callable[[str], Path]


def test_video_has_the_sound_that_was_generated_with_it(checkpoint: Make) -> None:
    driver = Driver(spec(checkpoint("LTX2Pipeline"), "text-to-video"))

    driver.admit("one", steps=2, duration_ms=1000, fps=8)
    driver.finish()

    done = driver.outcomes["one"]
    assert isinstance(done, Completed)
    with av.open(io.BytesIO(done.files[0].data)) as video:
        (sound,) = video.streams.audio
        samples = sum(frame.samples for frame in video.decode(sound))
    assert sound.rate == 16_000
    assert samples > 0


def test_guidance_of_one_request_does_not_change_another(checkpoint: Make) -> None:
    """HunyuanVideo's guidance is the state of a component that its pipelines share."""
    kind = "HunyuanVideo15Pipeline"
    alone, both = (Driver(spec(checkpoint(kind), "text-to-video")) for _ in range(2))
    settings = {"steps": 2, "duration_ms": 250, "format": "webp"}

    for driver, names in ((alone, ("weak",)), (both, ("strong", "weak"))):
        for name in names:
            driver.admit(name, guidance={"weak": 1.5, "strong": 9.0}[name], **settings)
        driver.finish()

    pictures = {
        name: opened(driver.outcomes[name].files[0].data)
        for driver, name in ((both, "strong"), (both, "weak"))
    }
    expected = opened(alone.outcomes["weak"].files[0].data)
    assert abs(pictures["weak"] - expected).max() <= 1
    assert abs(pictures["strong"] - expected).max() > 1


@pytest.mark.parametrize("kind", ["Flux2Pipeline", "QwenImageEditPlusPipeline"])
def test_mask_is_refused_by_a_pipeline_that_cannot_keep_an_area(
    kind: str, checkpoint: Make
) -> None:
    driver = Driver(spec(checkpoint(kind), "image-edit"))

    refused = driver.admit("one", [picture(), picture()], mask=True)

    assert isinstance(refused, Failed)
    assert (refused.code, refused.param) == ("unsupported_parameter", "mask")


def test_proposed_task_of_a_checkpoint_is_one_that_its_pipeline_serves() -> None:
    for kind, tasks in FAMILIES.items():
        assert PIPELINE_TASKS.get(kind, "text-to-image") in tasks, kind


@pytest.mark.parametrize(
    ("kind", "multiple"),
    [
        ("FluxPipeline", 4),
        ("Flux2Pipeline", 4),
        ("LTXPipeline", 4),
        ("CogVideoXPipeline", 8),
        ("ZImagePipeline", 4),
    ],
)
def test_sides_are_multiples_of_what_the_pipeline_packs(
    kind: str, multiple: int, checkpoint: Make
) -> None:
    task = "text-to-video" if "LTX" in kind or "Cog" in kind else "text-to-image"
    of = spec(checkpoint(kind), task)
    loaded = loading.load(of, read_options(of), CooperativeBatcher(rows_max=4))

    assert sizes.side_multiple(loaded.pipelines[kind]) == multiple
    assert SIZE % multiple == 0
