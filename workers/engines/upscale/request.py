"""One request on its way: what it still wants drawn, tile by tile, and what became of it.

It knows no network and no batch. Tiles are handed out in order and come back in order, so frames of
a video are encoded as soon as they are whole, and never more of them are at hand than a step takes.
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
from workers.media.clip_files import ClipFiles, band
from workers.media.encode import CONTENT_TYPES, Origin
from workers.media.pixels import Pixels
from workers.protocol.engine import CancelReason

Size: TypeAlias = tuple[int, int]
"""Width and height."""


def resized(pixels: Pixels, size: Size) -> Pixels:
    """As large as asked; what the network drew is only ever made smaller."""
    if (pixels.shape[1], pixels.shape[0]) == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


class Result(Protocol):
    """Takes finished pictures or frames, in order, and becomes files."""

    def add(self, drawn: Pixels, source: Pixels) -> None: ...

    def finish(self) -> tuple[list[Medium], list[File]]: ...

    def usage(self) -> Usage: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Pictures:
    """Each picture becomes a file of its own; alpha is enlarged beside the network."""

    sizes: list[Size]
    format: ImageFormat
    quality: int
    origin: Origin
    drawn: list[tuple[Pixels, Pixels]] = field(default_factory=list)
    files: list[File] = field(default_factory=list)

    def add(self, drawn: Pixels, source: Pixels) -> None:
        self.drawn.append((drawn, source))

    def _encode(self, drawn: Pixels, source: Pixels) -> None:
        pixels = resized(drawn, self.sizes[len(self.files)])
        if source.shape[2] == 4 and self.format != "jpeg":
            size = (pixels.shape[1], pixels.shape[0])
            alpha = Image.fromarray(source[..., 3]).resize(size, Image.Resampling.BILINEAR)
            pixels = np.dstack([pixels, np.asarray(alpha)])
        data = encode.image(pixels, self.format, quality=self.quality, origin=self.origin)
        self.files.append(File(CONTENT_TYPES[self.format], data))

    def finish(self) -> tuple[list[Medium], list[File]]:
        for drawn, source in self.drawn:
            self._encode(drawn, source)
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
        return Usage(requests=1, images=len(self.drawn), attributes=attributes)

    def close(self) -> None:
        self.drawn = []


@dataclass(slots=True)
class Video:
    """Frames become one clip."""

    size: Size
    clip: ClipFiles

    def add(self, drawn: Pixels, source: Pixels) -> None:
        self.clip.add(resized(drawn, self.size))

    def finish(self) -> tuple[list[Medium], list[File]]:
        return self.clip.finish()

    def usage(self) -> Usage:
        return Usage(
            requests=1,
            video_ms=self.clip.duration_ms,
            attributes={"resolution": band(self.size)},
        )

    def close(self) -> None:
        self.clip.close()


@dataclass(slots=True, eq=False)
class UpscaleRequest:
    """A request: sources still to come, canvases being drawn, and the result."""

    request_id: RequestId
    sources: Iterator[Pixels]
    result: Result
    steps: int
    """Tiles in all, as expected."""
    scale: int
    tile: int
    overlap: int
    step: int = 0
    cancelled: CancelReason | None = None
    exhausted: bool = False
    finishing: bool = False
    """Whether its result is being made into files, which then also closes it."""
    began: float = field(default_factory=time.monotonic)
    waiting: deque[tuple[Canvas, int]] = field(default_factory=deque)
    drawing: deque[tuple[Canvas, Pixels]] = field(default_factory=deque)
    _shown: int = 0

    @property
    def done(self) -> bool:
        return self.exhausted and not self.drawing

    def next(self) -> tuple[Canvas, int] | None:
        """The next tile to be drawn, not yet taken. Raise ``MediaError`` if a source is damaged."""
        if not self.waiting and not self.exhausted:
            source = next(self.sources, None)
            if source is None:
                self.exhausted = True
            else:
                height, width = source.shape[:2]
                grid = plan(height, width, tile=self.tile, overlap=self.overlap)
                canvas = Canvas(source[..., :3], grid, self.scale)
                self.drawing.append((canvas, source))
                self.waiting.extend((canvas, place) for place in range(grid.tiles))
        return self.waiting[0] if self.waiting else None

    def take(self) -> tuple[Canvas, int]:
        return self.waiting.popleft()

    def put(self, canvas: Canvas, place: int, drawn: npt.NDArray[np.float32]) -> None:
        canvas.put(place, drawn)
        self.step += 1

    def collect(self) -> None:
        """Encode what is whole."""
        while self.drawing and self.drawing[0][0].done:
            canvas, source = self.drawing.popleft()
            self.result.add(canvas.picture(), source)

    def progress(self) -> Progress | None:
        """How far it is, if that is a percent more than was said before."""
        steps = max(self.steps, self.step)
        if self.step == 0 or ((self.step - self._shown) * 100 < steps and self.step < steps):
            return None
        self._shown = self.step
        spent_ms = (time.monotonic() - self.began) * 1000
        return Progress(self.step, steps, round(spent_ms * (steps - self.step) / self.step))

    def usage(self) -> Usage:
        found = self.result.usage()
        return Usage(
            requests=found.requests,
            images=found.images,
            video_ms=found.video_ms,
            steps=self.step,
            attributes=found.attributes,
        )
