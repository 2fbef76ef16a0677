"""The files of a generated video: the video, a thumbnail, and a spritesheet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from typing import Final

from workers.contract.media import File, Medium, VideoFormat
from workers.media import encode
from workers.media.encode import CONTENT_TYPES, Origin, Overview, VideoWriter, frames_ms
from workers.media.pixels import Audio, Pixels

_RESOLUTIONS: Final = (480, 720, 1080, 1440, 2160, 4320)
"""Heights in lines by which resolutions are named and priced."""
_STILL_QUALITY: Final = 80
_WAITING_MAX: Final = 2
"""Frames that wait to be encoded, beside the one that is."""


def resolution_name(size: tuple[int, int]) -> str:
    """Return the smallest standard resolution for a width and height, such as ``1080p``."""
    short = min(size)
    return f"{next((lines for lines in _RESOLUTIONS if short <= lines), _RESOLUTIONS[-1])}p"


class VideoFiles:
    """Encodes frames in order, all of one size, keeping only a few of them uncompressed.

    Another thread encodes, so that a step waits for it only if it is far behind. An exception there
    is raised by one of the next calls.
    """

    def __init__(
        self,
        fps: Fraction,
        format: VideoFormat = "mp4",
        *,
        frames_expected: int,
        origin: Origin,
        audio: Audio | None = None,
    ) -> None:
        self._writer = VideoWriter(fps, format, origin=origin, audio=audio)
        self._content_type = CONTENT_TYPES[format]
        self._fps = fps
        self._frames_expected = frames_expected
        self._overview = Overview()
        self._middle: Pixels | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="video")
        self._waiting: deque[Future[None]] = deque()
        self.frames = 0

    @property
    def duration_ms(self) -> int:
        return frames_ms(self.frames, self._fps)

    def add(self, frame: Pixels) -> None:
        self.add_made(lambda: frame)

    def add_made(self, make: Callable[[], Pixels]) -> None:
        """Append the frame that ``make`` returns on the other thread."""
        self._wait(_WAITING_MAX)
        self._waiting.append(self._thread.submit(self._encode, make))
        self.frames += 1

    def _wait(self, left: int) -> None:
        """Wait until at most ``left`` frames wait, and raise the exceptions of the others."""
        while self._waiting and (len(self._waiting) > left or self._waiting[0].done()):
            self._waiting.popleft().result()

    def _encode(self, make: Callable[[], Pixels]) -> None:
        frame = make()
        if self._middle is None or self._writer.frames <= self._frames_expected // 2:
            self._middle = encode.thumbnail(frame)
        self._writer.add(frame)
        self._overview.add(frame)

    def finish(self) -> tuple[list[Medium], list[File]]:
        self._wait(0)
        assert self._middle is not None
        sheet = self._overview.spritesheet()
        files = [File(self._content_type, self._writer.finish())]
        width, height = self._writer.size
        media = [
            Medium(
                "video",
                blob=0,
                content_type=self._content_type,
                width=width,
                height=height,
                duration_ms=self.duration_ms,
                fps=round(self._fps),
            )
        ]
        for blob, (role, pixels) in enumerate(
            (("thumbnail", self._middle), ("spritesheet", sheet)), start=1
        ):
            data = encode.image(pixels, "webp", quality=_STILL_QUALITY)
            files.append(File(CONTENT_TYPES["webp"], data))
            media.append(
                Medium(
                    "image",
                    blob=blob,
                    role="thumbnail" if role == "thumbnail" else "spritesheet",
                    content_type=CONTENT_TYPES["webp"],
                    width=pixels.shape[1],
                    height=pixels.shape[0],
                )
            )
        return media, files

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._writer.close()
