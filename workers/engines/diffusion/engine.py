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

import msgspec

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
from workers.contract.media import File, Medium, VideoInput
from workers.contract.models import ModelSpec
from workers.engines.batch_memory import BatchMemory, CudaMeter
from workers.engines.cooperative_batching import (
    CooperativeBatcher,
    Phase,
    PipelineRun,
    Stopped,
)
from workers.engines.devices import PROGRESS
from workers.engines.diffusion import loading
from workers.engines.diffusion.inputs import InputReader, frame_rate
from workers.engines.diffusion.options import Options, read_options
from workers.engines.diffusion.request import (
    PREVIEW_TYPE,
    Generation,
    GenerationError,
    Request,
    image_file,
    make_pipeline_call,
    video_files,
)
from workers.engines.diffusion.upscaling import Upscaler, check_upscaler
from workers.engines.memory import has_own_memory, is_out_of_memory, memory_of, spare
from workers.engines.threads import use_threads
from workers.engines.torch_engine import TorchEngine
from workers.media import encode
from workers.media.pixels import Pixels
from workers.protocol.engine import (
    Deferred,
    Demand,
    Inspected,
    Memory,
    PhaseClock,
    StepReport,
)

log = logging.getLogger(__name__)


class DiffusionEngine(TorchEngine[Options, loading.LoadedCheckpoint, Request]):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._batcher = CooperativeBatcher(rows_max=self._options.rows or 2 * self._options.slots)
        self._upscaler: Upscaler | None = None
        self._room_bytes: int | None = None
        """Memory of the device for the next load, if it is limited."""
        self._placed = loading.Placement()
        self._by_run: dict[int, tuple[Request, Generation]] = {}

    def _inspect(self) -> Inspected:
        loading.inspect(self._spec, self._options)
        if self._options.upscaler is not None:
            check_upscaler(self._options.upscaler, self._options)
        return Inspected(cache_bytes=loading.further_bytes(self._options))

    def _load(self) -> loading.LoadedCheckpoint:
        device = self._options.torch_device
        room_bytes = self._room_bytes if has_own_memory(device) else None
        loaded = loading.load(self._spec, self._options, self._batcher, room_bytes)
        if self._options.upscaler is not None:
            self._upscaler = Upscaler(self._options.upscaler, self._options, self._batcher)
        self._choose_threads(loaded.denoiser)
        if has_own_memory(device):
            self._placed = loading.placement(loaded, self._spec, self._options)
        if device.type == "cuda":
            spare_bytes = spare(device, self._placed.resident_bytes, room_bytes)
            self._batcher.memory = BatchMemory(spare_bytes, CudaMeter(device))
        return loaded

    def demand(self) -> Demand:
        """Estimate the least memory: with all that can wait in host memory there."""
        demand = super().demand()
        if not has_own_memory(self._options.torch_device):
            return demand
        least = demand.bytes - loading.optional_bytes(self._spec, self._options)
        return demand._replace(bytes=least)

    def allow(self, memory_bytes: int | None) -> None:
        self._room_bytes = memory_bytes

    @property
    def memory(self) -> Memory:
        """Weights on the device, and the most that a batch has taken beside them."""
        device, batches = self._options.torch_device, self._batcher.memory
        if not has_own_memory(device):
            return super().memory
        activations = 0 if batches is None else batches.peak_bytes
        placed = self._placed
        return memory_of(
            *(device, placed.resident_bytes, activations, placed.optional_bytes),
            host_bytes=placed.host_bytes,
        )

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
        scale_max = None if self._upscaler is None else self._upscaler.scale
        return InputReader(self._spec, self._options, self._model, scale_max).read(job, files)

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
                    request,
                    generation,
                    pipeline,
                    guidance,
                    self._upscaler,
                    fps=frame_rate(input, self._options),
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
            fps, audio = frame_rate(input, self._options), generation.audio
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
