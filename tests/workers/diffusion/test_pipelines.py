"""Every supported pipeline: a batch at different steps gives what each request gives alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.workers.diffusion.checkpoints import MAKERS
from tests.workers.diffusion.driver import SIZE, picture, spec
from tests.workers.driving import PhaseNames
from workers.contract.jobs import Job, RequestId
from workers.contract.media import ImageInput, VideoInput
from workers.engines.cooperative_batching import CooperativeBatcher, PipelineRun
from workers.engines.diffusion import loading, masks
from workers.engines.diffusion.families import FAMILIES
from workers.engines.diffusion.options import read_options
from workers.engines.diffusion.request import Generation, Request, crop_to_fit, make_pipeline_call
from workers.media.pixels import Weights

TOLERANCE = 1e-4
STEPS = (3, 6, 4, 6)
# Tasks that are called in one way count as one.
TASKS = list(
    {
        (kind, id((masked and family.inpainting) or family), masked): (kind, task, masked)
        for kind in MAKERS
        for task, family in FAMILIES[kind].items()
        for masked in (False, True)
        if (masked or family.mask is None) and (not masked or (family.image and not family.frames))
    }.values()
)
PROMPTS = ("a red circle", "a blue star left of the circle", "make it night", "a green square")


def _request(
    loaded: loading.LoadedCheckpoint, task: str, index: int, *, masked: bool
) -> tuple[Request, Generation]:
    family = loaded.families[task]
    if masked:
        family = family.inpainting or family
    kind = VideoInput if family.frames else ImageInput
    image = Image.open(io.BytesIO(picture(index)))
    drawing = Generation(0, seed=index)
    request = Request(
        job=Job(RequestId(f"r{index}"), "acct", "painter", task, {}),
        input=kind(prompt=PROMPTS[index], negative_prompt="square" if family.negative else ""),
        family=family,
        width=SIZE,
        height=SIZE,
        frames=9,
        steps=STEPS[index],
        strength=0.8,
        sources=(crop_to_fit(image, SIZE, SIZE),) if family.image else (),
        mask=_half() if masked else None,
        generations=[drawing],
    )
    return request, drawing


def _half() -> Weights:
    """A mask of the right half."""
    mask = np.zeros((SIZE, SIZE), np.float32)
    mask[:, SIZE // 2 :] = 1
    return mask


@pytest.mark.parametrize(("kind", "task", "masked"), TASKS)
def test_batched_runs_give_the_same_result_as_alone(
    kind: str,
    task: str,
    masked: bool,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # before they are rounded
    monkeypatch.setattr("workers.engines.diffusion.request.to_pixels", np.asarray)
    monkeypatch.setattr(masks, "keep_outside", lambda drawn, *_: drawn)
    of = spec(checkpoint(kind), task)
    batcher = CooperativeBatcher(rows_max=16)
    loaded = loading.load(of, read_options(of), batcher)
    alone, together, done = [], [], []
    with torch.no_grad():
        for index in range(len(STEPS)):
            request, drawing = _request(loaded, task, index, masked=masked)
            pipeline = loaded.copy_for(request.family, None)
            begin = make_pipeline_call(request, drawing, pipeline, None)
            alone.append(begin())
            done.append(drawing.done)
    forwards = 0
    runs = []
    for index in range(len(STEPS)):
        request, drawing = _request(loaded, task, index, masked=masked)
        pipeline = loaded.copy_for(request.family, None)
        runs.append(PipelineRun(make_pipeline_call(request, drawing, pipeline, None)))
        batcher.start(runs[-1])
    ended = 0
    while ended < len(runs):
        turn = batcher.turn(PhaseNames().phase)
        ended += len(turn.ended)
        forwards += turn.point is not None and turn.point.phase == "forward"
    for run in runs:
        if run.error is not None:
            raise run.error
        together.append(run.result)
    for one, other in zip(alone, together, strict=True):
        assert np.isfinite(one).all()
        assert np.abs(one - other).max() <= TOLERANCE
    calls_a_step = 2 if kind.startswith("Wan") else 1
    assert forwards == max(done) * calls_a_step, "some forwards were not shared"
    assert np.abs(together[1] - together[3]).max() > 1e-3, "seed and prompt made no difference"


@pytest.mark.parametrize(("kind", "task", "masked"), TASKS)
def test_batching_works_in_sixteen_bits(
    kind: str, task: str, masked: bool, checkpoint: Callable[[str], Path]
) -> None:
    of = spec(checkpoint(kind), task, dtype="bfloat16")
    batcher = CooperativeBatcher(rows_max=16)
    loaded = loading.load(of, read_options(of), batcher)
    runs = []
    for index in (0, 2):
        request, drawing = _request(loaded, task, index, masked=masked)
        pipeline = loaded.copy_for(request.family, None)
        runs.append(PipelineRun(make_pipeline_call(request, drawing, pipeline, None)))
    batcher.start(runs[0])
    ended = turns = 0
    while ended < len(runs):
        turns += 1
        if turns == 3:  # the second comes while the first is on its way
            batcher.start(runs[1])
        ended += len(batcher.turn(PhaseNames().phase).ended)
    for run in runs:
        if run.error is not None:
            raise run.error
        assert run.result.std() > 1, "it is one plain colour"


@pytest.mark.parametrize("offset", range(8))
def test_image_inputs_do_not_change_the_precision_of_other_runs(
    offset: int, checkpoint: Callable[[str], Path]
) -> None:
    of = spec(
        checkpoint("StableDiffusionXLPipeline"), "text-to-image", "image-to-image", dtype="bfloat16"
    )
    batcher = CooperativeBatcher(rows_max=16)
    loaded = loading.load(of, read_options(of), batcher)
    runs = []
    for task in ("text-to-image", "image-to-image"):
        request, drawing = _request(loaded, task, 0, masked=False)
        pipeline = loaded.copy_for(request.family, None)
        runs.append(PipelineRun(make_pipeline_call(request, drawing, pipeline, None)))
    batcher.start(runs[0])
    ended = turns = 0
    while ended < len(runs):
        if turns == offset:
            batcher.start(runs[1])
        turns += 1
        ended += len(batcher.turn(PhaseNames().phase).ended)

    assert [run.error for run in runs] == [None, None]


def test_unsupported_pipeline_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "KandinskyPipeline"}')
    of = spec(tmp_path)
    with pytest.raises(ValueError, match=r"KandinskyPipeline.*supported are"):
        loading.load(of, read_options(of), CooperativeBatcher(rows_max=4))


def test_unsupported_task_is_refused(checkpoint: Callable[[str], Path]) -> None:
    of = spec(checkpoint("FluxPipeline"), "text-to-image", "image-blend")
    with pytest.raises(ValueError, match="FluxPipeline does not support image-blend; it supports"):
        loading.load(of, read_options(of), CooperativeBatcher(rows_max=4))


def test_directory_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    of = spec(tmp_path)
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        loading.load(of, read_options(of), CooperativeBatcher(rows_max=4))
