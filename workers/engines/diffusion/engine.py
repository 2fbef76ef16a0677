"""The engine of diffusion models: continuous batching of requests, each with its own pipeline.

A step is one forward of the denoiser, a text encoder or the autoencoder, over all runs suspended at
that batch point. Requests enter and leave between steps. More urgent requests go first; others stay
suspended and keep only their latents.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import msgspec
import numpy as np
from PIL import Image

from workers.contract.jobs import (
    Cancelled,
    Completed,
    Event,
    Failed,
    Job,
    Outcome,
    RequestId,
    Sketch,
    Usage,
)
from workers.contract.media import File, ImageInput, Medium, VideoInput
from workers.contract.models import ModelSpec
from workers.engines.cooperative_batching import (
    CooperativeBatcher,
    Phase,
    PipelineRun,
    Stopped,
)
from workers.engines.devices import PROGRESS
from workers.engines.diffusion import adapters, controls, loading, masks, references, sizes
from workers.engines.diffusion.families import PipelineFamily
from workers.engines.diffusion.options import Options, read_options
from workers.engines.diffusion.request import (
    PREVIEW_TYPE,
    Generation,
    GenerationError,
    Request,
    VisualInput,
    crop_to_fit,
    image_file,
    make_pipeline_call,
    video_files,
)
from workers.engines.diffusion.upscaling import Upscaler, check_upscaler
from workers.engines.memory import is_out_of_memory
from workers.engines.threads import use_threads
from workers.engines.torch_engine import InputError, TorchEngine, read_input, reading
from workers.media import encode
from workers.media.decode import read_image, read_mask
from workers.media.pixels import Pixels, Weights
from workers.protocol.engine import Deferred, Inspected, PhaseClock, StepReport

log = logging.getLogger(__name__)

VIDEO_TASKS: Final = ("text-to-video", "image-to-video")
SOURCE_PIXELS_MAX: Final = 32_000_000


class DiffusionEngine(TorchEngine[Options, loading.LoadedCheckpoint, Request]):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._batcher = CooperativeBatcher(rows_max=self._options.rows or 2 * self._options.slots)
        self._upscaler: Upscaler | None = None
        self._by_run: dict[int, tuple[Request, Generation]] = {}

    def _inspect(self) -> Inspected:
        loading.inspect(self._spec, self._options)
        if self._options.upscaler is not None:
            check_upscaler(self._options.upscaler, self._options)
        return Inspected(cache_bytes=loading.further_bytes(self._options))

    def _load(self) -> loading.LoadedCheckpoint:
        loaded = loading.load(self._spec, self._options, self._batcher)
        if self._options.upscaler is not None:
            self._upscaler = Upscaler(self._options.upscaler, self._options, self._batcher)
        self._choose_threads(loaded.denoiser)
        return loaded

    def unload(self) -> None:
        self._upscaler = None
        self._batcher.forget()
        super().unload()

    def prepare(self, job: Job, files: Sequence[bytes]) -> Request | Failed:
        """Decode the images of a job, cropped and resized to the size of the output."""
        return self._prepare(job, files)

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        self._start_generations()
        turn = self._batcher.turn(lambda name: self._phase(clock, name))
        weights, preprocess = self._by_request(turn.rows), self._by_request(turn.preprocess_s)
        events: list[tuple[RequestId, Event | Deferred]] = []
        for run in turn.ended:
            self._collect_result(run)
        for request in self._running.values():
            events += [(request.job.request_id, event) for event in _events(request)]
        outcomes = [
            (request.job.request_id, outcome)
            for request in self._running.values()
            if (outcome := self._outcome(request)) is not None
        ]
        if not weights and outcomes:
            weights = dict.fromkeys((request_id for request_id, _ in outcomes), 1.0)
        return StepReport(weights, events, outcomes, preprocess)

    def _by_request(self, by_run: Mapping[int, float]) -> dict[RequestId, float]:
        """Sum numbers of runs by their request; those of runs that have been dropped are lost."""
        sums: dict[RequestId, float] = {}
        for key, number in by_run.items():
            if key in self._by_run:
                request_id = self._by_run[key][0].job.request_id
                sums[request_id] = sums.get(request_id, 0.0) + number
        return sums

    def release(self, request_id: RequestId) -> None:
        request = self._running.pop(request_id)
        runs = [one.run for one in request.generations if one.run is not None and not one.run.ended]
        self._batcher.stop(*runs)
        for run in runs:
            self._by_run.pop(id(run), None)

    # --- Input ------------------------------------------------------------------------------------

    @property
    def _occupied(self) -> int:
        """Number of outputs that are not finished, started or not."""
        return sum(
            not generation.ended
            for request in self._running.values()
            for generation in request.generations
        )

    def _read(self, job: Job, files: Sequence[bytes]) -> Request:
        family = self._model.families.get(job.task)
        if family is None:
            raise InputError("invalid_input", f"{self._spec.name} does not support {job.task}.")
        input = _read_input(job)
        has_mask = isinstance(input, ImageInput) and input.mask
        if has_mask and family.inpainting is not None:
            family = family.inpainting
        self._check(input, family)
        images = [_picture(data, "image") for data in files[: input.images]]
        width, height = self._size(input)
        sources = tuple(crop_to_fit(one, width, height) for one in images)
        mask = None
        if has_mask:
            mask = _mask(files[input.images], images[0], (width, height))
        guides = iter(files[input.images + bool(has_mask) :])
        control = self._control(input, family, guides, (width, height))
        reference = self._reference(input, family, guides)
        count = input.n if isinstance(input, ImageInput) else 1
        return Request(
            job=job,
            input=input,
            family=family,
            width=width,
            height=height,
            frames=self._frames(input) if family.frames else 1,
            steps=input.steps or self._options.steps,
            strength=self._strength(input, family),
            sources=sources,
            mask=mask,
            adapters=adapters.select(input.adapters, self._options.adapters),
            control=control,
            reference=reference,
            generations=[Generation(index, input.seed + index) for index in range(count)],
        )

    def _control(
        self,
        input: VisualInput,
        family: PipelineFamily,
        files: Iterator[bytes],
        size: tuple[int, int],
    ) -> controls.ChosenControl | None:
        if not isinstance(input, ImageInput) or not input.control:
            return None
        return controls.choose(
            input.control,
            input.control_strength,
            self._options.controls,
            family.pipeline,
            lambda: crop_to_fit(_picture(next(files), "control_image"), *size),
        )

    def _reference(
        self, input: VisualInput, family: PipelineFamily, files: Iterator[bytes]
    ) -> references.ChosenReference | None:
        if not isinstance(input, ImageInput) or not input.reference:
            return None
        return references.choose(
            input.reference_strength,
            self._options.reference,
            self._model.pipelines[family.pipeline],
            lambda: _picture(next(files), "reference_image"),
        )

    def _check(self, input: VisualInput, family: PipelineFamily) -> None:
        """Raise ``InputError`` for a parameter that the pipeline would otherwise ignore."""
        name = self._spec.name
        if input.negative_prompt and not family.negative:
            raise InputError(
                "unsupported_parameter",
                f"{name} does not support negative prompts.",
                "negative_prompt",
            )
        if input.guidance is not None and family.guidance is None:
            raise InputError(
                "unsupported_parameter", f"{name} does not support guidance.", "guidance"
            )
        if (input.images and family.image is None) or input.images > family.images_max:
            raise InputError(
                "invalid_input", f"{name} accepts at most {family.images_max} images.", "image"
            )
        has_mask = isinstance(input, ImageInput) and input.mask
        if has_mask and not input.images:
            raise InputError("invalid_input", "A mask needs an image; send one.", "mask")
        if has_mask and not family.maskable:
            raise InputError("unsupported_parameter", f"{name} does not support masks.", "mask")
        if family.mask is not None and not has_mask:
            raise InputError("invalid_input", f"{name} edits the area of a mask; send one.", "mask")
        if not input.images and (family.strength is not None or not family.sized):
            raise InputError("invalid_input", "This task needs an image; send one.", "image")
        scale = input.scale or 1
        if scale > 1 and self._upscaler is None:
            raise InputError("unsupported_parameter", f"{name} has no upscaler.", "scale")
        if self._upscaler is not None and scale > self._upscaler.scale:
            raise InputError(
                "invalid_input",
                f"scale is {scale}; {name} supports at most {self._upscaler.scale}.",
                "scale",
            )
        if input.parameters:
            field = min(input.parameters)
            raise InputError("unsupported_parameter", f"{name} has no parameter {field}.", field)

    def _strength(self, input: VisualInput, family: PipelineFamily) -> float:
        """Return the strength. Raise ``InputError`` if it leaves no step."""
        requested = input.strength if isinstance(input, ImageInput) else None
        default = self._options.strength if self._options.strength is not None else family.strength
        strength = (default or 0.0) if requested is None else requested
        steps = input.steps or self._options.steps
        if family.strength is not None and int(steps * strength) < 1:
            raise InputError(
                "invalid_input",
                f"strength is {strength}; with {steps} steps it must be at least {1 / steps:.2g}.",
                "strength",
            )
        return strength

    def _size(self, input: VisualInput) -> tuple[int, int]:
        """Return width and height, requested or native. Raise ``InputError`` if not supported."""
        pipeline = next(iter(self._model.pipelines.values()))
        side = sizes.native_side(pipeline)
        width, height = input.width or side, input.height or side
        multiple = sizes.side_multiple(pipeline)
        if width % multiple or height % multiple:
            raise InputError(
                "invalid_input",
                f"size is {width}x{height}; {self._spec.name} needs multiples of {multiple}.",
                "size",
            )
        return width, height

    def _frames(self, input: VisualInput) -> int:
        assert isinstance(input, VideoInput)
        fps = self._fps(input)
        if input.duration_ms is None:
            return self._options.frames or 2 * fps + 1
        return max(1, round(input.duration_ms * fps / 1000))

    def _fps(self, input: VisualInput) -> int:
        return (input.fps if isinstance(input, VideoInput) else None) or self._options.fps

    def _start_generations(self) -> None:
        """Start generations in free slots: by priority, then in order of arrival."""
        free = self._options.slots - len(self._by_run)
        if free <= 0:
            return
        waiting = [
            (request, generation)
            for request in sorted(self._running.values(), key=lambda one: -one.job.priority)
            if request.cancelled is None
            for generation in request.generations
            if generation.run is None and not generation.ended
        ]
        for request, generation in waiting[:free]:
            input = request.input
            name = input.scheduler or self._options.scheduler
            control, reference = request.control, request.reference
            try:
                pipeline = self._model.copy_for(
                    request.family, name, "" if control is None else control.name
                )
            except ValueError as error:
                generation.error = Failed("unsupported_parameter", f"{error}.", param="scheduler")
                continue
            guidance = input.guidance if input.guidance is not None else self._options.guidance
            run = PipelineRun(
                make_pipeline_call(
                    request, generation, pipeline, guidance, self._upscaler, fps=self._fps(input)
                ),
                priority=request.job.priority,
                variant=loading.Variant(
                    request.adapters, None if reference is None else reference.strength
                ),
                calls_left=(input.steps or self._options.steps) * (1 if control is None else 2),
            )
            request.started_s = request.started_s or time.monotonic()
            generation.run = run
            self._by_run[id(run)] = (request, generation)
            self._batcher.start(run)

    # --- Output -----------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, clock: PhaseClock, name: Phase) -> Iterator[None]:
        """Time a phase until the device has finished, not only until work is enqueued."""
        with clock.phase(name):
            yield
            if self._options.torch_device.type == "cuda":
                PROGRESS.wait()

    def _collect_result(self, run: PipelineRun) -> None:
        """Store the result of a run, to be encoded later, or its error."""
        request, generation = self._by_run.pop(id(run), (None, None))
        if request is None or generation is None:
            return
        generation.pixels, run.result = run.result, None
        if run.error is not None:
            self._record_error(request, generation, run.error)

    def _record_error(self, request: Request, generation: Generation, error: BaseException) -> None:
        generation.error = _failure(error, generation)
        expected = isinstance(error, Stopped | GenerationError)
        if generation.error.code == "engine_error" and not expected:
            log.error(
                "generation failed",
                extra={"request_id": request.job.request_id},
                exc_info=error,
            )

    def _encode_media(
        self, request: Request, generation: Generation, pixels: Pixels
    ) -> list[tuple[Medium, File]]:
        input, job = request.input, request.job
        origin = encode.Origin(self._spec.name, str(job.request_id), generation.seed)
        if isinstance(input, VideoInput):
            fps, audio = self._fps(input), generation.audio
            return video_files(pixels, fps, input, origin, audio)
        kind, file = image_file(pixels, input, origin)
        height, width = pixels.shape[:2]
        medium = Medium(
            "image",
            index=generation.index,
            content_type=kind,
            width=width,
            height=height,
            seed=generation.seed,
        )
        return [(medium, file)]

    def _outcome(self, request: Request) -> Outcome | Deferred | None:
        if request.cancelled is not None:
            return Cancelled(request.cancelled, usage=_usage(request))
        if not request.ended:
            return None
        return Deferred(lambda: self._complete(request), usage=_usage(request))

    def _complete(self, request: Request) -> Outcome:
        """Encode all results. Runs on another thread, in parallel to the steps."""
        for generation in request.generations:
            if generation.pixels is None:
                continue
            try:
                generation.media = self._encode_media(request, generation, generation.pixels)
            except Exception as error:  # such as an encoder's; fails only this output
                self._record_error(request, generation, error)
            generation.pixels = None
        if all(generation.error is not None for generation in request.generations):
            first = request.generations[0].error
            assert first is not None
            return msgspec.structs.replace(first, usage=_usage(request))
        media: list[Medium] = []
        files: list[File] = []
        for generation in request.generations:
            if generation.error is not None:
                media.append(
                    Medium("image", index=generation.index, error=generation.error.message)
                )
            for medium, file in generation.media:
                media.append(msgspec.structs.replace(medium, blob=len(files)))
                files.append(file)
        return Completed(
            _usage(request),
            output={"media": msgspec.to_builtins(media)},
            files=tuple(files),
        )


def _read_input(job: Job) -> VisualInput:
    kind: type[VisualInput] = VideoInput if job.task in VIDEO_TASKS else ImageInput
    return read_input(job, kind)


def _picture(data: bytes, param: str) -> Image.Image:
    """Decode an image. Raise ``InputError``, which names ``param``."""
    with reading(param):
        return Image.fromarray(read_image(data, pixels_max=SOURCE_PIXELS_MAX))


def _mask(data: bytes, image: Image.Image, size: tuple[int, int]) -> Weights:
    """Decode a mask, cropped and resized like its image. Raise ``InputError``."""
    with reading("mask"):
        found = read_mask(data, image.size, pixels_max=SOURCE_PIXELS_MAX)
    fitted = crop_to_fit(masks.as_image(found), *size)
    mask = np.asarray(fitted, dtype=np.float32) / np.float32(255)
    if not mask.any():
        raise InputError(
            "invalid_input",
            "The mask protects the whole image; the area to edit must be transparent or white.",
            "mask",
        )
    return mask


def _events(request: Request) -> list[Event | Deferred]:
    found: list[Event | Deferred] = []
    full_size = not request.family.frames  # the preview of a video is a thumbnail
    if (progress := request.progress()) is not None:
        found.append(progress)
    for generation in request.generations:
        first = generation.previews_taken - len(generation.previews)
        for position, pixels in enumerate(generation.previews, start=first):
            found.append(
                Deferred(partial(_encode_preview, generation.index, position, pixels, full_size))
            )
        generation.previews.clear()
    return found


def _encode_preview(index: int, position: int, pixels: Pixels, full_size: bool) -> Sketch:
    return Sketch(index, position, File(PREVIEW_TYPE, encode.image(pixels, "png")), full_size)


def _failure(error: BaseException, generation: Generation) -> Failed:
    """Map an exception of a pipeline to a failure that reveals nothing internal."""
    if isinstance(error, Stopped):
        return Failed("engine_error", "The generation was stopped.")
    if isinstance(error, GenerationError):
        return Failed("engine_error", str(error))
    if is_out_of_memory(error):
        return Failed("out_of_memory", "The device ran out of memory.")
    if isinstance(error, ValueError) and generation.done == 0:
        return Failed("invalid_input", f"The model rejected the input: {error}")
    return Failed("engine_error", "The engine failed on this request.")


def _usage(request: Request) -> Usage:
    media = [medium for generation in request.generations for medium, _ in generation.media]
    attributes = {"size": f"{request.width}x{request.height}"} | request.job.limits.attributes
    return Usage(
        requests=1,
        images=sum(one.kind == "image" and one.role == "output" for one in media),
        video_ms=sum(one.duration_ms for one in media if one.kind == "video"),
        steps=request.done,
        attributes=attributes,
    )
