"""The engine of ``image-upscale`` and ``video-upscale``: each step takes tiles of all requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import av
import numpy as np
import numpy.typing as npt
import torch

from workers.contract.jobs import Cancelled, Event, Failed, Job, Outcome, RequestId
from workers.contract.media import ImageInput, VideoInput
from workers.contract.models import ModelSpec
from workers.engines.memory import is_out_of_memory
from workers.engines.threads import use_threads
from workers.engines.torch_engine import (
    InputError,
    TorchEngine,
    out_of_memory,
    read_input,
    reading,
)
from workers.engines.upscale.network import Network
from workers.engines.upscale.options import Options, read_options
from workers.engines.upscale.request import Pictures, Result, Size, UpscaleRequest, Video
from workers.engines.upscale.tiles import Canvas, plan
from workers.engines.visual_output import complete, encoding_failed
from workers.media.clip_files import ClipFiles
from workers.media.decode import read_image
from workers.media.encode import Origin
from workers.media.pixels import MediaError, Pixels
from workers.media.video_decode import open_video
from workers.protocol.engine import Estimate, Later, PhaseClock, StepReport

VIDEO_TASK: Final = "video-upscale"
_BYTE_US: Final = 1.0
"""Of an attachment: a guess, because its size in pixels is known only once it is opened."""
_PIXEL_BYTES: Final = 2048
"""Of device memory for each pixel of the source in a step."""


@dataclass(frozen=True, slots=True)
class _Tile:
    work: UpscaleRequest
    canvas: Canvas
    place: int

    @property
    def pixels(self) -> int:
        return self.canvas.grid.height * self.canvas.grid.width


class UpscaleEngine(TorchEngine[Options, Network, UpscaleRequest]):
    """Raise ``ValueError`` if an option is wrong."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._step_pixels = 0
        self._turn = 0

    def _load(self) -> Network:
        network = Network(self._spec, self._options)
        self._choose_threads(network.module)
        drawn = network.draw(np.zeros((1, 16, 16, 3), np.uint8))
        if drawn.shape != (1, 16 * network.scale, 16 * network.scale, 3):
            raise ValueError(f"the network draws {drawn.shape} from 16x16, which is no enlarging")
        self._step_pixels = network.step_pixels
        return network

    def estimate(self, job: Job) -> Estimate:
        size = sum(blob.bytes for blob in job.attachments)
        return Estimate(round(size * _BYTE_US), self._step_pixels * _PIXEL_BYTES)

    def prepare(self, job: Job, files: Sequence[bytes]) -> UpscaleRequest | Failed:
        """Read the pictures of a job, or open its video."""
        return self._prepare(job, files)

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        outcomes: dict[RequestId, Outcome | Later] = {}
        with clock.phase("preprocess"):
            batch = self._choose(outcomes)
        weights: dict[RequestId, float] = {}
        with clock.phase("forward"):
            drawn = self._draw(batch)
        with clock.phase("postprocess"):
            for tile, pixels in zip(batch, drawn, strict=True):
                id = tile.work.request_id
                weights[id] = weights.get(id, 0.0) + tile.pixels
                if pixels is not None:
                    tile.work.put(tile.canvas, tile.place, pixels)
                elif id not in outcomes:
                    outcomes[id] = out_of_memory(tile.work.usage())
            events = self._collect(outcomes)
        return StepReport(weights, events, tuple(outcomes.items()))

    def release(self, request_id: RequestId) -> None:
        work = self._running.pop(request_id)
        if not work.finishing:
            work.result.close()

    # --- What is asked for ------------------------------------------------------------------------

    def _read(self, job: Job, files: Sequence[bytes]) -> UpscaleRequest:
        return self._video(job, files) if job.task == VIDEO_TASK else self._pictures(job, files)

    def _pictures(self, job: Job, files: Sequence[bytes]) -> UpscaleRequest:
        asked = read_input(job, ImageInput)
        if not 1 <= asked.images <= len(files):
            raise InputError("invalid_input", "There is no picture to enlarge.", "image")
        if asked.n != 1:
            message = f"n is {asked.n}; a picture is enlarged in one way only, so n must be 1."
            raise InputError("unsupported_parameter", message, "n")
        with reading("image"):
            sources = [
                read_image(data, pixels_max=self._options.pixels_max, alpha=True)
                for data in files[: asked.images]
            ]
        sizes = [
            self._size(
                (source.shape[1], source.shape[0]),
                scale=asked.scale if asked.scale > 1 else None,
                wanted=(asked.width, asked.height),
            )
            for source in sources
        ]
        result = Pictures(sizes, asked.format, asked.compression, self._origin(job))
        steps = sum(self._tiles(source.shape[1], source.shape[0]) for source in sources)
        return self._work(job, iter(sources), result, steps)

    def _video(self, job: Job, files: Sequence[bytes]) -> UpscaleRequest:
        asked = read_input(job, VideoInput)
        if not asked.video or not files:
            raise InputError("invalid_input", "There is no video to enlarge.", "video")
        with reading("video"):
            footage = open_video(
                files[-1],
                pixels_max=self._options.frame_pixels_max,
                frames_max=self._options.frames_max,
                seconds_max=self._seconds(job),
                audio=asked.format == "mp4",
            )
        size = self._size(
            (footage.width, footage.height),
            scale=asked.scale,
            wanted=(asked.width, asked.height),
        )
        clip = ClipFiles(
            footage.fps,
            asked.format,
            frames_expected=footage.frames_expected,
            origin=self._origin(job),
            audio=footage.audio,
        )
        result = Video(size, clip)
        steps = footage.frames_expected * self._tiles(footage.width, footage.height)
        return self._work(job, footage.frames, result, steps)

    def _work(
        self, job: Job, sources: Iterator[Pixels], result: Result, steps: int
    ) -> UpscaleRequest:
        return UpscaleRequest(
            job.request_id,
            sources,
            result,
            steps,
            scale=self._model.scale,
            tile=self._model.tile,
            overlap=self._options.overlap,
        )

    def _origin(self, job: Job) -> Origin:
        return Origin(self._spec.name, job.request_id, source="algorithmicallyEnhanced")

    def _seconds(self, job: Job) -> float:
        """The longest source: no longer than what was held for."""
        held_ms = job.limits.video_ms
        return min(self._options.seconds_max, held_ms / 1000 if held_ms else math.inf)

    def _tiles(self, width: int, height: int) -> int:
        return plan(height, width, tile=self._model.tile, overlap=self._options.overlap).tiles

    def _size(
        self, source: Size, *, scale: int | None, wanted: tuple[int | None, int | None]
    ) -> Size:
        """What is delivered: so many times as large, or as large as said, but not larger still."""
        own, (width, height) = self._model.scale, source
        if scale is not None and not 1 <= scale <= own:
            message = f"scale is {scale}; this model draws 1 to {own} times as large."
            raise InputError("unsupported_parameter", message, "scale")
        if wanted == (None, None):
            return width * (scale or own), height * (scale or own)
        wide = wanted[0] or max(1, round(width * (wanted[1] or 0) / height))
        high = wanted[1] or max(1, round(height * wide / width))
        if not (0 < wide <= width * own and 0 < high <= height * own):
            message = f"{wide}x{high} is asked for; of {width}x{height} this model makes at most "
            message += f"{width * own}x{height * own}."
            raise InputError("unsupported_parameter", message, "size")
        if abs(wide * height - high * width) > 0.02 * wide * height:
            message = f"{wide}x{high} has other proportions than the source, {width}x{height}."
            raise InputError("unsupported_parameter", message, "size")
        return wide, high

    # --- Steps ------------------------------------------------------------------------------------

    def _choose(self, outcomes: dict[RequestId, Outcome | Later]) -> list[_Tile]:
        """Tiles of one shape, by turns of all requests; each step another one says the shape."""
        works = [work for work in self._running.values() if work.cancelled is None]
        if works:
            self._turn = (self._turn + 1) % len(works)
            works = works[self._turn :] + works[: self._turn]
        batch: list[_Tile] = []
        room = self._step_pixels
        while works:
            for work in tuple(works):
                found = _next(work, outcomes)
                shape = found and (found[0].grid.height, found[0].grid.width)
                if found is None or (batch and shape != _shape(batch[0])):
                    works.remove(work)
                    continue
                tile = _Tile(work, *found)
                if batch and tile.pixels > room:
                    return batch
                work.take()
                batch.append(tile)
                room -= tile.pixels
        return batch

    def _draw(self, batch: Sequence[_Tile]) -> list[npt.NDArray[np.float32] | None]:
        """Each tile drawn, or None for one that alone is too much for the memory there is."""
        if not batch:
            return []
        try:
            drawn = self._model.draw(np.stack([tile.canvas.cut(tile.place) for tile in batch]))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            # What was too much once need not be for ever: others may have left the device.
            grown = self._step_pixels + self._step_pixels // 64
            self._step_pixels = min(self._model.step_pixels, grown)
            return list(drawn)
        torch.cuda.empty_cache()
        if len(batch) == 1:
            return [None]
        half = len(batch) // 2
        self._step_pixels = max(half * batch[0].pixels, 64)
        return self._draw(batch[:half]) + self._draw(batch[half:])

    def _collect(self, outcomes: dict[RequestId, Outcome | Later]) -> list[tuple[RequestId, Event]]:
        """Encode what is whole, say how far each request is, and end those that are done."""
        events: list[tuple[RequestId, Event]] = []
        for id, work in self._running.items():
            if id in outcomes:
                continue
            if work.cancelled is not None:
                outcomes[id] = Cancelled(work.cancelled, usage=work.usage())
                continue
            try:
                work.collect()
                if not work.drawing:
                    _next(work, outcomes)
                if progress := work.progress():
                    events.append((id, progress))
                if work.done:
                    work.finishing = True
                    usage = work.usage()
                    finish = partial(complete, id, work.result, usage)
                    outcomes[id] = Later(finish, usage=usage)
            except av.FFmpegError:
                outcomes[id] = encoding_failed(id)
        return events


def _next(
    work: UpscaleRequest, outcomes: dict[RequestId, Outcome | Later]
) -> tuple[Canvas, int] | None:
    """The request's next tile; a source that turns out to be damaged ends it."""
    if work.request_id in outcomes:
        return None
    try:
        return work.next()
    except MediaError as error:
        outcomes[work.request_id] = Failed("invalid_input", str(error), param="video")
        return None


def _shape(tile: _Tile) -> tuple[int, int]:
    return tile.canvas.grid.height, tile.canvas.grid.width
