"""Encodes images and videos for clients, and thumbnails and spritesheets of videos.

Every file names its ``Origin`` in metadata that common tools read: PNG text, EXIF, XMP with the
IPTC's digital source type, the comment of an MP4.
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
"""Content types by format; an animated WebP is an ``image/webp`` too."""
SHEET_FRAMES: Final = 16
_SHEET_COLUMNS: Final = 4
_DESCRIPTION, _SOFTWARE = 0x010E, 0x0131
_NAMESPACE: Final = "urn:x-tollgate:1.0:"
_SOURCE_TYPES: Final = "http://cv.iptc.org/newscodes/digitalsourcetype/"
_FRAME_SAMPLES: Final = 1024
"""Samples per channel in a frame of AAC."""
_AUDIO_BITRATE: Final = 128_000


@dataclass(frozen=True, slots=True)
class Origin:
    """How a file was made. ``source`` is one of the IPTC's digital source types."""

    model: str
    request_id: str
    seed: int | None = None
    source: Literal["trainedAlgorithmicMedia", "algorithmicallyEnhanced"] = (
        "trainedAlgorithmicMedia"
    )

    def fields(self) -> dict[str, str]:
        fields = {"software": SOFTWARE, "model": self.model, "request_id": self.request_id}
        return fields if self.seed is None else {**fields, "seed": str(self.seed)}

    def xmp(self) -> bytes:
        """Return an XMP packet."""
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
    """Encode ``(H, W, 3 | 4)``. ``quality`` of JPEG and WebP is 1 to 100; JPEG drops alpha."""
    pil_image = Image.fromarray(pixels)
    out = io.BytesIO()
    metadata = {} if origin is None else {"exif": origin.exif(), "xmp": origin.xmp()}
    if format == "png":
        pil_image.save(out, "PNG", compress_level=4, pnginfo=_png_text(origin))
    elif format == "jpeg":
        # Subsampled chroma would blur edges that were just upscaled.
        pil_image.convert("RGB").save(out, "JPEG", quality=quality, subsampling="4:4:4", **metadata)
    else:
        pil_image.save(out, "WEBP", quality=quality, method=4, **metadata)
    return out.getvalue()


def _png_text(origin: Origin | None) -> PngImagePlugin.PngInfo | None:
    if origin is None:
        return None
    text = PngImagePlugin.PngInfo()
    for name, value in origin.fields().items():
        text.add_text("Software" if name == "software" else name, value)
    text.add_itxt("XML:com.adobe.xmp", origin.xmp().decode())
    return text


# --- Videos --------------------------------------------------------------------------------------


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


def frames_ms(frames: int, fps: Fraction) -> int:
    """Return the duration of a number of frames."""
    return round(frames * 1000 / fps)


class VideoWriter:
    """Encodes a video frame by frame, so that it is never in memory uncompressed.

    MP4 is H.264 in 4:2:0 with its index at the start and AAC audio; an odd side is padded by
    repeating its last row or column. Animated WebP needs no padding and has no audio; it keeps all
    frames until it is finished. ``quality`` is 1 to 100. A context manager that deletes temporary
    files.
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
        return frames_ms(self.frames, self._fps)

    def add(self, frame: Pixels) -> None:
        """Append ``(H, W, 3)``; all frames have the same size."""
        PULSE.beat()
        self._encoder.add(np.ascontiguousarray(frame), self.frames)
        self.frames += 1

    def finish(self) -> bytes:
        """Return the encoded video. Raise ``ValueError`` if it has no frame."""
        if not self.frames:
            raise ValueError("a video needs at least one frame")
        return self._encoder.finish()

    def close(self) -> None:
        """Release everything. Can be called after ``finish``, and repeatedly."""
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
    """Writes a temporary file, because moving the index to the start needs one."""

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
        # CRF 18 is visually almost lossless, 35 the lowest acceptable quality.
        crf = 35 - (35 - 14) * quality / 100
        self._stream.options = {"crf": f"{crf:.1f}", "preset": "veryfast"}
        self._context = self._stream.codec_context
        self._context.time_base = 1 / fps
        self._context.colorspace = self._context.color_primaries = self._context.color_trc = 1
        self._context.color_range = 1
        self._fps = fps
        self._audio = audio
        self._audio_stream: AudioStream | None = None
        if audio is not None:
            self._audio_stream = self._container.add_stream("aac", rate=audio.rate)
            self._audio_stream.layout = "mono" if len(audio.samples) == 1 else "stereo"
            self._audio_stream.bit_rate = _AUDIO_BITRATE
        self._audio_samples = 0

    def add(self, frame: Pixels, index: int) -> None:
        height, width = frame.shape[:2]
        if width % 2 or height % 2:
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if index == 0:
            self.size = self._stream.width, self._stream.height = frame.shape[1], frame.shape[0]
        rgb = av.VideoFrame.from_ndarray(frame, format="rgb24")
        planar = rgb.reformat(
            format="yuv420p",
            interpolation="LANCZOS",
            dst_colorspace="ITU709",
            dst_color_range="MPEG",
        )
        planar.pts, planar.time_base = index, 1 / self._fps
        self._container.mux(self._stream.encode(planar))
        self._encode_audio_until(Fraction(index + 1) / self._fps)

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        if self._audio_stream is not None:
            self._container.mux(self._audio_stream.encode(None))
        self._container.close()
        return self._path.read_bytes()

    def close(self) -> None:
        self._container.close()
        self._folder.cleanup()

    def _encode_audio_until(self, until: Fraction) -> None:
        """Encode audio up to a time in seconds, so that both streams are interleaved."""
        if self._audio is None or self._audio_stream is None:
            return
        samples, rate = self._audio.samples, self._audio.rate
        end = min(round(until * rate), samples.shape[1])
        while self._audio_samples < end:
            part = samples[:, self._audio_samples : min(self._audio_samples + _FRAME_SAMPLES, end)]
            block = np.ascontiguousarray(part.clip(-1, 1), np.float32)
            frame = av.AudioFrame.from_ndarray(
                block, format="fltp", layout=self._audio_stream.layout.name
            )
            frame.sample_rate, frame.pts = rate, self._audio_samples
            frame.time_base = Fraction(1, rate)
            self._container.mux(self._audio_stream.encode(frame))
            self._audio_samples += block.shape[1]


class _WebP:
    def __init__(self, fps: Fraction, quality: int, origin: Origin | None) -> None:
        self.size = (0, 0)
        self._fps = fps
        self._quality = quality
        self._origin = origin
        self._frames: list[Image.Image] = []

    def add(self, frame: Pixels, index: int) -> None:
        self.size = frame.shape[1], frame.shape[0]
        self._frames.append(Image.fromarray(frame.copy()))

    def finish(self) -> bytes:
        origin = self._origin
        metadata = {} if origin is None else {"exif": origin.exif(), "xmp": origin.xmp()}
        ends = [round(index * 1000 / self._fps) for index in range(len(self._frames) + 1)]
        out = io.BytesIO()
        self._frames[0].save(
            out,
            "WEBP",
            save_all=True,
            append_images=self._frames[1:],
            duration=[end - start for start, end in itertools.pairwise(ends)],
            loop=0,
            quality=self._quality,
            method=2,
            **metadata,
        )
        return out.getvalue()

    def close(self) -> None:
        self._frames.clear()


# --- Small views ---------------------------------------------------------------------------------


def thumbnail(pixels: Pixels, *, side: int = 320) -> Pixels:
    """Scale an image down so that no side exceeds ``side``; a smaller one is unchanged."""
    height, width = pixels.shape[:2]
    longest = max(height, width)
    if longest <= side:
        return pixels
    size = (max(1, round(width * side / longest)), max(1, round(height * side / longest)))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def spritesheet(frames: Sequence[Pixels], *, side: int = 160) -> Pixels:
    """Arrange at most 16 evenly spaced frames, first to last, in a grid of four columns."""
    count = min(len(frames), SHEET_FRAMES)
    places = np.linspace(0, len(frames) - 1, count).round().astype(int)
    cells = [thumbnail(frames[index], side=side) for index in places]
    columns = min(count, _SHEET_COLUMNS)
    rows = -(-count // columns)
    height, width, channels = cells[0].shape
    sheet = np.zeros((rows * height, columns * width, channels), np.uint8)
    for index, cell in enumerate(cells):
        top, left = index // columns * height, index % columns * width
        sheet[top : top + height, left : left + width] = cell
    return sheet


class Overview:
    """Collects evenly spaced thumbnails of a video of unknown length, in one pass."""

    def __init__(self, *, side: int = 160) -> None:
        self._side = side
        self._stride = 1
        self._count = 0
        self._frames: list[Pixels] = []

    def add(self, frame: Pixels) -> None:
        """Keep every n-th frame; when there are too many, drop half of them and double n."""
        if self._count % self._stride == 0:
            self._frames.append(thumbnail(frame, side=self._side).copy())
            if len(self._frames) >= 4 * SHEET_FRAMES:
                self._frames = self._frames[::2]
                self._stride *= 2
        self._count += 1

    def spritesheet(self) -> Pixels:
        return spritesheet(self._frames, side=self._side)
