"""State of one upscaling request: tiles still to be processed, and the output so far.

Knows neither the network nor batching. Tiles are handed out and returned in order, so a video frame
is encoded as soon as its last tile is done, and memory holds no more frames than one step needs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from workers.contract.jobs import Progress, RequestId, Usage
from workers.contract.media import File, ImageFormat, Medium
from workers.engines.upscale.tiles import Canvas, plan
from workers.media import encode
from workers.media.encode import CONTENT_TYPES, Origin
from workers.media.pixels import Pixels
from workers.media.video_files import VideoFiles, resolution_name
from workers.protocol.engine import CancelReason

Size: TypeAlias = tuple[int, int]
"""Width and height."""


def resize(pixels: Pixels, size: Size) -> Pixels:
    """Resize to the output size, which is never larger than what the network produced."""
    if (pixels.shape[1], pixels.shape[0]) == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


class Result(Protocol):
    """Collects finished images or frames, in order, and encodes them."""

    def add(self, canvas: Canvas, source: Pixels) -> None: ...

    def finish(self) -> tuple[list[Medium], list[File]]: ...

    def usage(self) -> Usage: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class ImageResult:
    """One file per image. Alpha is resized bilinearly, not by the network."""

    sizes: list[Size]
    format: ImageFormat
    quality: int
    origin: Origin
    upscaled: list[tuple[Canvas, Pixels]] = field(default_factory=list)
    """Complete canvases, which are blended when they are encoded: not in a step."""
    files: list[File] = field(default_factory=list)

    def add(self, canvas: Canvas, source: Pixels) -> None:
        self.upscaled.append((canvas, source))

    def _encode(self, upscaled: Pixels, source: Pixels) -> None:
        pixels = resize(upscaled, self.sizes[len(self.files)])
        if source.shape[2] == 4 and self.format != "jpeg":
            size = (pixels.shape[1], pixels.shape[0])
            alpha = Image.fromarray(source[..., 3]).resize(size, Image.Resampling.BILINEAR)
            pixels = np.dstack([pixels, np.asarray(alpha)])
        data = encode.image(pixels, self.format, quality=self.quality, origin=self.origin)
        self.files.append(File(CONTENT_TYPES[self.format], data))

    def finish(self) -> tuple[list[Medium], list[File]]:
        for canvas, source in self.upscaled:
            self._encode(canvas.image(), source)
        media = [
            Medium(
                "image",
                index=index,
                blob=index,
                content_type=file.content_type,
                width=width,
                height=height,
            )
            for index, (file, (width, height)) in enumerate(
                zip(self.files, self.sizes, strict=True)
            )
        ]
        return media, self.files

    def usage(self) -> Usage:
        width, height = self.sizes[0]
        attributes = {"size": f"{width}x{height}"}
        return Usage(requests=1, images=len(self.upscaled), attributes=attributes)

    def close(self) -> None:
        self.upscaled = []


@dataclass(slots=True)
class VideoResult:
    """All frames as one video."""

    size: Size
    video: VideoFiles

    def add(self, canvas: Canvas, source: Pixels) -> None:
        self.video.add_made(lambda: resize(canvas.image(), self.size))

    def finish(self) -> tuple[list[Medium], list[File]]:
        return self.video.finish()

    def usage(self) -> Usage:
        return Usage(
            requests=1,
            video_ms=self.video.duration_ms,
            attributes={"resolution": resolution_name(self.size)},
        )

    def close(self) -> None:
        self.video.close()


@dataclass(slots=True, eq=False)
class UpscaleRequest:
    """Sources still to be read, canvases in progress, and the result."""

    request_id: RequestId
    sources: Iterator[Pixels]
    result: Result
    steps: int
    """Expected number of tiles."""
    scale: int
    tile: int
    overlap: int
    step: int = 0
    cancelled: CancelReason | None = None
    exhausted: bool = False
    finishing: bool = False
    """Whether the result is being encoded; that also closes it."""
    started_s: float = field(default_factory=time.monotonic)
    waiting: deque[tuple[Canvas, int]] = field(default_factory=deque)
    canvases: deque[tuple[Canvas, Pixels]] = field(default_factory=deque)
    _reported: int = 0

    @property
    def done(self) -> bool:
        return self.exhausted and not self.canvases

    def next_tile(self) -> tuple[Canvas, int] | None:
        """Return the next tile without taking it. Raise ``MediaError`` if a source is damaged."""
        if not self.waiting and not self.exhausted:
            source = next(self.sources, None)
            if source is None:
                self.exhausted = True
            else:
                height, width = source.shape[:2]
                grid = plan(height, width, tile=self.tile, overlap=self.overlap)
                canvas = Canvas(source[..., :3], grid, self.scale)
                self.canvases.append((canvas, source))
                self.waiting.extend((canvas, tile) for tile in range(grid.tiles))
        return self.waiting[0] if self.waiting else None

    def take(self) -> tuple[Canvas, int]:
        return self.waiting.popleft()

    def put(self, canvas: Canvas, tile: int, upscaled: npt.NDArray[np.float32]) -> None:
        canvas.put(tile, upscaled)
        self.step += 1

    def collect(self) -> None:
        """Pass complete images or frames on to the result."""
        while self.canvases and self.canvases[0][0].done:
            canvas, source = self.canvases.popleft()
            self.result.add(canvas, source)

    def progress(self) -> Progress | None:
        """Return the progress if it has grown by a percent since the last report."""
        steps = max(self.steps, self.step)
        if self.step == 0 or ((self.step - self._reported) * 100 < steps and self.step < steps):
            return None
        self._reported = self.step
        spent_ms = (time.monotonic() - self.started_s) * 1000
        return Progress(self.step, steps, round(spent_ms * (steps - self.step) / self.step))

    def usage(self) -> Usage:
        usage = self.result.usage()
        return Usage(
            requests=usage.requests,
            images=usage.images,
            video_ms=usage.video_ms,
            steps=self.step,
            attributes=usage.attributes,
        )
