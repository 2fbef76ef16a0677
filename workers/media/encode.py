"""Pixels as files that clients get: pictures, clips, and small views of clips.

Every file says in its own metadata what made it (``Origin``), in the fields where common tools
look: PNG text, EXIF, XMP with the IPTC's digital source type, the comment of an MP4.
"""

from __future__ import annotations

import io
import itertools
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self
from xml.sax.saxutils import quoteattr

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import OutputContainer
from PIL import Image, PngImagePlugin

from workers.contract.media import ImageFormat, VideoFormat
from workers.media.pixels import Audio, Pixels
from workers.pulse import PULSE

SOFTWARE: Final = "Tollgate"
CONTENT_TYPES: Final = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "mp4": "video/mp4",
}
"""By format; a clip as WebP is an ``image/webp`` too."""
SHEET_FRAMES: Final = 16
_SHEET_COLUMNS: Final = 4
_DESCRIPTION, _SOFTWARE = 0x010E, 0x0131
_NAMESPACE: Final = "urn:x-tollgate:1.0:"
_SOURCE_TYPES: Final = "http://cv.iptc.org/newscodes/digitalsourcetype/"
_FRAME_SAMPLES: Final = 1024
"""Of AAC, in each channel."""
_AUDIO_BITRATE: Final = 128_000


@dataclass(frozen=True, slots=True)
class Origin:
    """What made a file. ``source`` is a term of the IPTC's digital source types."""

    model: str
    request_id: str
    seed: int | None = None
    source: Literal["trainedAlgorithmicMedia", "algorithmicallyEnhanced"] = (
        "trainedAlgorithmicMedia"
    )

    def fields(self) -> dict[str, str]:
        found = {"software": SOFTWARE, "model": self.model, "request_id": self.request_id}
        return found if self.seed is None else {**found, "seed": str(self.seed)}

    def xmp(self) -> bytes:
        """A packet of Adobe's XMP."""
        own = "".join(
            f" tollgate:{name}={quoteattr(value)}"
            for name, value in self.fields().items()
            if name != "software"
        )
        return (
            '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
            '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
            '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
            '<rdf:Description rdf:about="" xmlns:xmp="http://ns.adobe.com/xap/1.0/"'
            ' xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/"'
            f' xmlns:tollgate="{_NAMESPACE}" xmp:CreatorTool="{SOFTWARE}"'
            f' Iptc4xmpExt:DigitalSourceType="{_SOURCE_TYPES}{self.source}"{own}/>'
            '</rdf:RDF></x:xmpmeta><?xpacket end="r"?>'
        ).encode()

    def exif(self) -> bytes:
        exif = Image.Exif()
        exif[_SOFTWARE] = SOFTWARE
        exif[_DESCRIPTION] = json.dumps(self.fields())
        return exif.tobytes()


def image(
    pixels: Pixels, format: ImageFormat, *, quality: int = 90, origin: Origin | None = None
) -> bytes:
    """Encode ``(H, W, 3 | 4)``. ``quality`` is of JPEG and WebP, 1 to 100; JPEG has no alpha."""
    drawn = Image.fromarray(pixels)
    out = io.BytesIO()
    said = {} if origin is None else {"exif": origin.exif(), "xmp": origin.xmp()}
    if format == "png":
        drawn.save(out, "PNG", compress_level=4, pnginfo=_text(origin))
    elif format == "jpeg":
        # Chroma at half the resolution would smear edges that were just made sharp.
        drawn.convert("RGB").save(out, "JPEG", quality=quality, subsampling="4:4:4", **said)
    else:
        drawn.save(out, "WEBP", quality=quality, method=4, **said)
    return out.getvalue()


def _text(origin: Origin | None) -> PngImagePlugin.PngInfo | None:
    if origin is None:
        return None
    text = PngImagePlugin.PngInfo()
    for name, value in origin.fields().items():
        text.add_text("Software" if name == "software" else name, value)
    text.add_itxt("XML:com.adobe.xmp", origin.xmp().decode())
    return text


# --- Clips ---------------------------------------------------------------------------------------


def video(
    frames: Iterable[Pixels],
    fps: Fraction | int,
    format: VideoFormat = "mp4",
    *,
    quality: int = 80,
    origin: Origin | None = None,
    audio: Audio | None = None,
) -> bytes:
    """Encode frames of ``(H, W, 3)``; see ``VideoWriter``. Raise ``ValueError`` without frames."""
    with VideoWriter(fps, format, quality=quality, origin=origin, audio=audio) as writer:
        for frame in frames:
            writer.add(frame)
        return writer.finish()


class VideoWriter:
    """Encodes a clip frame by frame, so that it never lies in memory uncompressed.

    MP4 is H.264 in 4:2:0 with its index in front and sound as AAC; an odd side gains one row or
    column, a repeated edge. Animated WebP has neither limit nor sound, and keeps its frames until
    it is finished. ``quality`` is 1 to 100. A context: what it wrote goes when it is left.
    """

    def __init__(
        self,
        fps: Fraction | int,
        format: VideoFormat = "mp4",
        *,
        quality: int = 80,
        origin: Origin | None = None,
        audio: Audio | None = None,
    ) -> None:
        self.frames = 0
        self._fps = Fraction(fps)
        self._quality = quality
        self._origin = origin
        self._encoder = (
            _Mp4(self._fps, quality, origin, audio)
            if format == "mp4"
            else _WebP(self._fps, quality, origin)
        )

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as encoded; (0, 0) before the first frame."""
        return self._encoder.size

    @property
    def duration_ms(self) -> int:
        return round(self.frames * 1000 / self._fps)

    def add(self, frame: Pixels) -> None:
        """Append ``(H, W, 3)``; all are of one size."""
        PULSE.beat()
        self._encoder.add(np.ascontiguousarray(frame), self.frames)
        self.frames += 1

    def finish(self) -> bytes:
        """End the clip and return it. Raise ``ValueError`` if it has no frame."""
        if not self.frames:
            raise ValueError("a video needs at least one frame")
        return self._encoder.finish()

    def close(self) -> None:
        """Drop everything; harmless after ``finish`` and when called again."""
        self._encoder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Mp4:
    """Written to a file, because the index can only be moved to the front of one."""

    def __init__(
        self, fps: Fraction, quality: int, origin: Origin | None, audio: Audio | None
    ) -> None:
        self.size = (0, 0)
        self._folder = tempfile.TemporaryDirectory(prefix="tollgate-video-")
        self._path = Path(self._folder.name) / "clip.mp4"
        self._container: OutputContainer = av.open(
            str(self._path), "w", format="mp4", options={"movflags": "+faststart"}
        )
        if origin is not None:
            self._container.metadata["comment"] = json.dumps(origin.fields())
        self._stream = self._container.add_stream("libx264", rate=fps)
        self._stream.pix_fmt = "yuv420p"
        # 18 is hardly told from the original and 35 the least that anybody wants to see.
        crf = 35 - (35 - 14) * quality / 100
        self._stream.options = {"crf": f"{crf:.1f}", "preset": "veryfast"}
        self._context = self._stream.codec_context
        self._context.time_base = 1 / fps
        self._context.colorspace = self._context.color_primaries = self._context.color_trc = 1
        self._context.color_range = 1
        self._fps = fps
        self._audio = audio
        self._sound: AudioStream | None = None
        if audio is not None:
            self._sound = self._container.add_stream("aac", rate=audio.rate)
            self._sound.layout = "mono" if len(audio.samples) == 1 else "stereo"
            self._sound.bit_rate = _AUDIO_BITRATE
        self._heard = 0

    def add(self, frame: Pixels, place: int) -> None:
        height, width = frame.shape[:2]
        if width % 2 or height % 2:
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if place == 0:
            self.size = self._stream.width, self._stream.height = frame.shape[1], frame.shape[0]
        drawn = av.VideoFrame.from_ndarray(frame, format="rgb24")
        planar = drawn.reformat(
            format="yuv420p",
            interpolation="LANCZOS",
            dst_colorspace="ITU709",
            dst_color_range="MPEG",
        )
        planar.pts, planar.time_base = place, 1 / self._fps
        self._container.mux(self._stream.encode(planar))
        self._hear(Fraction(place + 1) / self._fps)

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        if self._sound is not None:
            self._container.mux(self._sound.encode(None))
        self._container.close()
        return self._path.read_bytes()

    def close(self) -> None:
        self._container.close()
        self._folder.cleanup()

    def _hear(self, until: Fraction) -> None:
        """Sound up to a time in seconds, so that the two streams lie interleaved."""
        if self._audio is None or self._sound is None:
            return
        samples, rate = self._audio.samples, self._audio.rate
        end = min(round(until * rate), samples.shape[1])
        while self._heard < end:
            part = samples[:, self._heard : min(self._heard + _FRAME_SAMPLES, end)]
            block = np.ascontiguousarray(part.clip(-1, 1), np.float32)
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=self._sound.layout.name)
            frame.sample_rate, frame.pts = rate, self._heard
            frame.time_base = Fraction(1, rate)
            self._container.mux(self._sound.encode(frame))
            self._heard += block.shape[1]


class _WebP:
    def __init__(self, fps: Fraction, quality: int, origin: Origin | None) -> None:
        self.size = (0, 0)
        self._fps = fps
        self._quality = quality
        self._origin = origin
        self._kept: list[Image.Image] = []

    def add(self, frame: Pixels, place: int) -> None:
        self.size = frame.shape[1], frame.shape[0]
        self._kept.append(Image.fromarray(frame.copy()))

    def finish(self) -> bytes:
        origin = self._origin
        said = {} if origin is None else {"exif": origin.exif(), "xmp": origin.xmp()}
        ends = [round(place * 1000 / self._fps) for place in range(len(self._kept) + 1)]
        out = io.BytesIO()
        self._kept[0].save(
            out,
            "WEBP",
            save_all=True,
            append_images=self._kept[1:],
            duration=[end - start for start, end in itertools.pairwise(ends)],
            loop=0,
            quality=self._quality,
            method=2,
            **said,
        )
        return out.getvalue()

    def close(self) -> None:
        self._kept.clear()


# --- Small views ---------------------------------------------------------------------------------


def thumbnail(pixels: Pixels, *, side: int = 320) -> Pixels:
    """Scale a picture down until no side is longer than ``side``; a small one stays as it is."""
    height, width = pixels.shape[:2]
    longest = max(height, width)
    if longest <= side:
        return pixels
    size = (max(1, round(width * side / longest)), max(1, round(height * side / longest)))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def spritesheet(frames: Sequence[Pixels], *, side: int = 160) -> Pixels:
    """A grid, four in a row, of at most 16 frames that lie evenly over a clip, first to last."""
    count = min(len(frames), SHEET_FRAMES)
    places = np.linspace(0, len(frames) - 1, count).round().astype(int)
    cells = [thumbnail(frames[place], side=side) for place in places]
    columns = min(count, _SHEET_COLUMNS)
    rows = -(-count // columns)
    height, width, channels = cells[0].shape
    sheet = np.zeros((rows * height, columns * width, channels), np.uint8)
    for place, cell in enumerate(cells):
        top, left = place // columns * height, place % columns * width
        sheet[top : top + height, left : left + width] = cell
    return sheet


class Overview:
    """A few small frames of a clip of any length, which passes by once."""

    def __init__(self, *, side: int = 160) -> None:
        self._side = side
        self._every = 1
        self._seen = 0
        self._kept: list[Pixels] = []

    def add(self, frame: Pixels) -> None:
        """Keep every so manyth, of which half are dropped whenever they are many."""
        if self._seen % self._every == 0:
            self._kept.append(thumbnail(frame, side=self._side).copy())
            if len(self._kept) >= 4 * SHEET_FRAMES:
                self._kept = self._kept[::2]
                self._every *= 2
        self._seen += 1

    def spritesheet(self) -> Pixels:
        return spritesheet(self._kept, side=self._side)
