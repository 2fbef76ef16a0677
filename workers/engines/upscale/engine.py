"""The engine of ``image-upscale`` and ``video-upscale``: tiles of all requests share batches.

A batch is interrupted between the layers of the network.
"""

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
from workers.engines.interrupting import SlicedCall, add_hooks
from workers.engines.memory import is_out_of_memory
from workers.engines.threads import use_threads
from workers.engines.torch_engine import (
    InputError,
    TorchEngine,
    out_of_memory,
    read_input,
    reading,
)
from workers.engines.upscale.network import Network, find_weights
from workers.engines.upscale.options import Options, read_options
from workers.engines.upscale.request import ImageResult, Result, Size, UpscaleRequest, VideoResult
from workers.engines.upscale.tiles import Canvas, plan
from workers.engines.visual_output import complete, encoding_failed
from workers.media.decode import read_image
from workers.media.encode import Origin
from workers.media.pixels import MediaError, Pixels
from workers.media.video_decode import open_video
from workers.media.video_files import VideoFiles
from workers.protocol.engine import Deferred, PhaseClock, StepReport

VIDEO_TASK: Final = "video-upscale"


@dataclass(frozen=True, slots=True)
class _Tile:
    request: UpscaleRequest
    canvas: Canvas
    index: int

    @property
    def pixels(self) -> int:
        return self.canvas.grid.height * self.canvas.grid.width


class UpscaleEngine(TorchEngine[Options, Network, UpscaleRequest]):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, read_options(spec))
        self._step_pixels = 0
        self._first = 0
        self._call: SlicedCall[list[_Tile], list[npt.NDArray[np.float32] | None]] | None = None

    def _inspect(self) -> None:
        find_weights(self._spec)

    def _load(self) -> Network:
        network = Network(self._spec, self._options)
        self._choose_threads(network.module)
        add_hooks(network.module)
        upscaled = network.upscale(np.zeros((1, 16, 16, 3), np.uint8))
        if upscaled.shape != (1, 16 * network.scale, 16 * network.scale, 3):
            raise ValueError(f"not an upscaling network: 16x16 pixels become {upscaled.shape}")
        self._step_pixels = network.step_pixels
        return network

    def prepare(self, job: Job, files: Sequence[bytes]) -> UpscaleRequest | Failed:
        """Decode the images of a job, or open its video."""
        return self._prepare(job, files)

    def step(self, clock: PhaseClock) -> StepReport:
        use_threads(self._threads)
        outcomes: dict[RequestId, Outcome | Deferred] = {}
        call, self._call = self._call, None
        if call is None:
            with clock.phase("preprocess"):
                batch = self._select_tiles(outcomes)
            call = SlicedCall(batch, lambda: self._upscale(batch))
        with clock.phase("forward"):
            upscaled = call.run_slice()
        self._call = call if upscaled is None else None
        weights: dict[RequestId, float] = {}
        with clock.phase("postprocess"):
            for tile in filter(self._is_active, call.rows):
                id = tile.request.request_id
                weights[id] = weights.get(id, 0.0) + tile.pixels
            for tile, pixels in zip(call.rows, upscaled or (), strict=False):
                if not self._is_active(tile):
                    continue
                if pixels is not None:
                    tile.request.put(tile.canvas, tile.index, pixels)
                elif tile.request.request_id not in outcomes:
                    outcomes[tile.request.request_id] = out_of_memory(tile.request.usage())
            events = self._collect(outcomes)
        return StepReport(weights, events, tuple(outcomes.items()))

    def _is_active(self, tile: _Tile) -> bool:
        request = tile.request
        return request.cancelled is None and self._running.get(request.request_id) is request

    def release(self, request_id: RequestId) -> None:
        request = self._running.pop(request_id)
        if self._call is not None and not any(map(self._is_active, self._call.rows)):
            self._call.abandon()
            self._call = None
        if not request.finishing:
            request.result.close()

    # --- Input ------------------------------------------------------------------------------------

    def _read(self, job: Job, files: Sequence[bytes]) -> UpscaleRequest:
        read = self._read_video if job.task == VIDEO_TASK else self._read_images
        return read(job, files)

    def _read_images(self, job: Job, files: Sequence[bytes]) -> UpscaleRequest:
        input = read_input(job, ImageInput)
        if not 1 <= input.images <= len(files):
            raise InputError("invalid_input", "The image to upscale is missing.", "image")
        if input.n != 1:
            message = f"n is {input.n}; upscaling has a single result, so n must be 1."
            raise InputError("unsupported_parameter", message, "n")
        with reading("image"):
            sources = [
                read_image(data, pixels_max=self._options.pixels_max, alpha=True)
                for data in files[: input.images]
            ]
        sizes = [
            self._output_size(
                (source.shape[1], source.shape[0]),
                scale=input.scale if input.scale > 1 else None,
                requested=(input.width, input.height),
            )
            for source in sources
        ]
        result = ImageResult(sizes, input.format, input.compression, self._origin(job))
        steps = sum(self._tiles(source.shape[1], source.shape[0]) for source in sources)
        return self._request(job, iter(sources), result, steps)

    def _read_video(self, job: Job, files: Sequence[bytes]) -> UpscaleRequest:
        input = read_input(job, VideoInput)
        if not input.video or not files:
            raise InputError("invalid_input", "The video to upscale is missing.", "video")
        with reading("video"):
            source = open_video(
                files[-1],
                pixels_max=self._options.frame_pixels_max,
                frames_max=self._options.frames_max,
                seconds_max=self._seconds_max(job),
                audio=input.format == "mp4",
            )
        size = self._output_size(
            (source.width, source.height),
            scale=input.scale,
            requested=(input.width, input.height),
        )
        video = VideoFiles(
            source.fps,
            input.format,
            frames_expected=source.frames_expected,
            origin=self._origin(job),
            audio=source.audio,
        )
        result = VideoResult(size, video)
        steps = source.frames_expected * self._tiles(source.width, source.height)
        return self._request(job, source.frames, result, steps)

    def _request(
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

    def _seconds_max(self, job: Job) -> float:
        """Return the maximum length of the source: the option, or what is held for if shorter."""
        held_ms = job.limits.video_ms
        return min(self._options.seconds_max, held_ms / 1000 if held_ms else math.inf)

    def _tiles(self, width: int, height: int) -> int:
        return plan(height, width, tile=self._model.tile, overlap=self._options.overlap).tiles

    def _output_size(
        self, source: Size, *, scale: int | None, requested: tuple[int | None, int | None]
    ) -> Size:
        """Compute the output size from a factor or a requested size; limited by the network."""
        factor, (width, height) = self._model.scale, source
        if scale is not None and not 1 <= scale <= factor:
            message = f"scale is {scale}; this model supports 1 to {factor}."
            raise InputError("unsupported_parameter", message, "scale")
        if requested == (None, None):
            return width * (scale or factor), height * (scale or factor)
        output_width = requested[0] or max(1, round(width * (requested[1] or 0) / height))
        output_height = requested[1] or max(1, round(height * output_width / width))
        if not (0 < output_width <= width * factor and 0 < output_height <= height * factor):
            message = (
                f"size is {output_width}x{output_height}; for a source of {width}x{height} it can "
                f"be at most {width * factor}x{height * factor}."
            )
            raise InputError("unsupported_parameter", message, "size")
        if abs(output_width * height - output_height * width) > 0.02 * output_width * height:
            message = (
                f"size is {output_width}x{output_height}; its aspect ratio must be that of the "
                f"source, {width}x{height}."
            )
            raise InputError("unsupported_parameter", message, "size")
        return output_width, output_height

    # --- Steps ------------------------------------------------------------------------------------

    def _select_tiles(self, outcomes: dict[RequestId, Outcome | Deferred]) -> list[_Tile]:
        """Select tiles of one shape, taking turns among the requests.

        The shape is that of the first request's tile; each step starts with another request.
        """
        requests = [request for request in self._running.values() if request.cancelled is None]
        if requests:
            self._first = (self._first + 1) % len(requests)
            requests = requests[self._first :] + requests[: self._first]
        batch: list[_Tile] = []
        pixels_left = self._step_pixels
        while requests:
            for request in tuple(requests):
                candidate = _next_tile(request, outcomes)
                shape = candidate and (candidate[0].grid.height, candidate[0].grid.width)
                if candidate is None or (batch and shape != _shape(batch[0])):
                    requests.remove(request)
                    continue
                tile = _Tile(request, *candidate)
                if batch and tile.pixels > pixels_left:
                    return batch
                request.take()
                batch.append(tile)
                pixels_left -= tile.pixels
        return batch

    def _upscale(self, batch: Sequence[_Tile]) -> list[npt.NDArray[np.float32] | None]:
        """Upscale tiles; None for one that does not fit into memory even alone."""
        if not batch:
            return []
        try:
            upscaled = self._model.upscale(
                np.stack([tile.canvas.cut(tile.index) for tile in batch])
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            # Grow again slowly: other models may have freed memory in the meantime.
            grown = self._step_pixels + self._step_pixels // 64
            self._step_pixels = min(self._model.step_pixels, grown)
            return list(upscaled)
        torch.cuda.empty_cache()
        if len(batch) == 1:
            return [None]
        half = len(batch) // 2
        self._step_pixels = max(half * batch[0].pixels, 64)
        return self._upscale(batch[:half]) + self._upscale(batch[half:])

    def _collect(
        self, outcomes: dict[RequestId, Outcome | Deferred]
    ) -> list[tuple[RequestId, Event]]:
        """Encode complete images and frames, report progress, and end requests that are done."""
        events: list[tuple[RequestId, Event]] = []
        for id, request in self._running.items():
            if id in outcomes:
                continue
            if request.cancelled is not None:
                outcomes[id] = Cancelled(request.cancelled, usage=request.usage())
                continue
            try:
                request.collect()
                if not request.canvases:
                    _next_tile(request, outcomes)
                if progress := request.progress():
                    events.append((id, progress))
                if request.done:
                    request.finishing = True
                    usage = request.usage()
                    finish = partial(complete, id, request.result, usage)
                    outcomes[id] = Deferred(finish, usage=usage)
            except av.FFmpegError:
                outcomes[id] = encoding_failed(id)
        return events


def _next_tile(
    request: UpscaleRequest, outcomes: dict[RequestId, Outcome | Deferred]
) -> tuple[Canvas, int] | None:
    """Return the request's next tile; fail the request if its source is damaged."""
    if request.request_id in outcomes:
        return None
    try:
        return request.next_tile()
    except MediaError as error:
        outcomes[request.request_id] = Failed("invalid_input", str(error), param="video")
        return None


def _shape(tile: _Tile) -> tuple[int, int]:
    return tile.canvas.grid.height, tile.canvas.grid.width
