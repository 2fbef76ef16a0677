"""Every supported pipeline: a batch at different steps gives what each request gives alone."""

from __future__ import annotations

import importlib
import io
from collections import Counter
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
ROUNDING = 2.0
"""Mean difference in 16 bits, of 255: the order of sums depends on the rows of a product."""
STEPS = (2, 4, 3)
# Tasks that are called in one way count as one.
_ALL = list(
    {
        (kind, id((masked and family.inpainting) or family), masked): (kind, task, masked)
        for kind in MAKERS
        for task, family in FAMILIES[kind.split("/")[0]].items()
        for masked in (False, True)
        if (not masked and family.mask is None)
        or (masked and family.image and family.maskable and not family.frames)
    }.values()
)
# In every run: one task of each checkpoint of a family that differs from the others in its calls.
_ALWAYS = {
    "StableDiffusionXLPipeline",
    "StableDiffusion3Pipeline",
    "FluxPipeline",
    "FluxKontextPipeline",
    "WanPipeline/times of tokens",
    "LTX2Pipeline",
    "CogVideoXPipeline",
    "HunyuanVideo15Pipeline",
    "QwenImagePipeline",
    "QwenImageEditPlusPipeline",
    "ZImagePipeline",
    "Flux2Pipeline",
}
_FIRST = {kind: index for index, (kind, _, _) in reversed(list(enumerate(_ALL)))}
TASKS = [
    pytest.param(
        *one,
        marks=() if one[0] in _ALWAYS and _FIRST[one[0]] == index else pytest.mark.long,
        id="-".join((*one[:2], "masked" if one[2] else "plain")),
    )
    for index, one in enumerate(_ALL)
]
PROMPTS = ("a red circle", "a blue star left of the circle", "make it night")


def _request(
    loaded: loading.LoadedCheckpoint, task: str, index: int, *, masked: bool
) -> tuple[Request, Generation]:
    family = loaded.families[task]
    if masked:
        family = family.inpainting or family
    kind = VideoInput if family.frames else ImageInput
    image = Image.open(io.BytesIO(picture(index)))
    drawing = Generation(0, seed=index)
    side = 64 if "Flux2" in family.pipeline and family.image else SIZE  # the least it takes
    request = Request(
        job=Job(RequestId(f"r{index}"), "acct", "painter", task, {}),
        input=kind(prompt=PROMPTS[index], negative_prompt="square" if family.negative else ""),
        family=family,
        width=side,
        height=side,
        frames=9,
        steps=STEPS[index],
        strength=0.8,
        sources=(crop_to_fit(image, side, side),) if family.image else (),
        mask=_half(side) if masked else None,
        generations=[drawing],
    )
    return request, drawing


def _half(side: int) -> Weights:
    """A mask of the right half."""
    mask = np.zeros((side, side), np.float32)
    mask[:, side // 2 :] = 1
    return mask


pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi's, on a CPU


@pytest.fixture(autouse=True)
def _small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen-Image edits at a megapixel, whatever the size of its output."""
    for name in ("edit", "edit_plus", "edit_inpaint"):
        module = importlib.import_module(f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{name}")
        monkeypatch.setattr(
            module,
            "calculate_dimensions",
            lambda area, ratio, stock=module.calculate_dimensions: stock(64 * 64, ratio),
        )


def _compare(
    loaded: loading.LoadedCheckpoint, batcher: CooperativeBatcher, task: str, *, masked: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the results of requests alone, by the pipeline itself, and of all together."""
    alone, together, runs = [], [], []
    with torch.no_grad():
        for index in range(len(STEPS)):
            request, drawing = _request(loaded, task, index, masked=masked)
            pipeline = loaded.copy_for(request.family, None)
            alone.append(make_pipeline_call(request, drawing, pipeline, None)())
    for index in range(len(STEPS)):
        request, drawing = _request(loaded, task, index, masked=masked)
        pipeline = loaded.copy_for(request.family, None)
        runs.append(PipelineRun(make_pipeline_call(request, drawing, pipeline, None)))
        batcher.start(runs[-1])
    ended = forwards = 0
    calls: Counter[tuple[str, int]] = Counter()
    while ended < len(runs):
        turn = batcher.turn(PhaseNames().phase)
        ended += len(turn.ended)
        if turn.point is not None and turn.point.phase == "forward":
            forwards += 1
            calls.update((turn.point.name, run) for run in turn.rows)
    for run in runs:
        if run.error is not None:
            raise run.error
        together.append(run.result)
    most: dict[str, int] = {}
    for (name, _), count in calls.items():
        most[name] = max(most.get(name, 0), count)
    if len(most) == 1:  # of two experts, some requests are at one and some at the other
        assert forwards == sum(most.values()), "some forwards were not shared"
    assert forwards < sum(calls.values())
    return alone, together


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
    monkeypatch.setattr("workers.engines.diffusion.request._fit", lambda drawn, *_: drawn)
    of = spec(checkpoint(kind), task)
    batcher = CooperativeBatcher(rows_max=16)
    loaded = loading.load(of, read_options(of), batcher)

    alone, together = _compare(loaded, batcher, task, masked=masked)

    for one, other in zip(alone, together, strict=True):
        assert np.isfinite(one).all()
        assert np.abs(one - other).max() <= TOLERANCE
    assert np.abs(together[0] - together[1]).max() > 1e-3, "seed and prompt made no difference"


@pytest.mark.parametrize(("kind", "task", "masked"), TASKS)
def test_batching_works_in_sixteen_bits(
    kind: str, task: str, masked: bool, checkpoint: Callable[[str], Path]
) -> None:
    of = spec(checkpoint(kind), task, dtype="bfloat16")
    batcher = CooperativeBatcher(rows_max=16)
    loaded = loading.load(of, read_options(of), batcher)

    alone, together = _compare(loaded, batcher, task, masked=masked)

    for one, other in zip(alone, together, strict=True):
        assert other.std() > 1, "it is one plain colour"
        assert np.abs(one.astype(np.float32) - other).mean() <= ROUNDING


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
