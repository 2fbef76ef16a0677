"""Decodes images and masks from clients.

The bytes are untrusted. Nothing is decoded before its format and size are checked in the header,
only the formats listed here are tried, and every error becomes a ``MediaError`` with a sentence for
the client. Videos are decoded by ``video_decode``, behind ``read_video``.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from workers.media.pixels import DecodedVideo, MediaError, Pixels, Weights
from workers.media.video_decode import open_video

PIXELS_MAX: Final = 64_000_000
"""Maximum size of an image in pixels: larger than a camera's, and 256 MB with alpha."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_ACCEPTED: Final = "PNG, JPEG, WebP and GIF are accepted"
_SIDE_MAX: Final = 65_535
_SCANS_MAX: Final = 128
"""Maximum scans of a JPEG. Ten are usual; each is a pass over all pixels."""
_ORIENTATION: Final = 0x0112
_TRANSPOSITIONS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BROKEN: Final = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    TypeError,
    LookupError,
    OverflowError,
    struct.error,
    zlib.error,
)
"""What Pillow's decoders are known to raise for damaged files."""


def read_image(data: bytes, *, pixels_max: int = PIXELS_MAX, alpha: bool = False) -> Pixels:
    """Decode an upright image: ``(H, W, 3)``, or ``(H, W, 4)`` if ``alpha`` is set and it has one.

    Otherwise alpha is composited on white. Of an animation, only the first frame is decoded. Raise
    ``MediaError``.
    """
    with _open(data, pixels_max) as image:
        return np.asarray(_convert(image, alpha=alpha))


def read_mask(data: bytes, size: tuple[int, int], *, pixels_max: int = PIXELS_MAX) -> Weights:
    """Decode a mask as ``(H, W)`` from 0 (keep) to 1 (edit), scaled to ``size``: width and height.

    The area to edit is the transparent one, or the white one if nothing is transparent. Raise
    ``MediaError``, also if its aspect ratio is not that of ``size``.
    """
    width, height = size
    with _open(data, pixels_max) as image:
        if abs(image.width * height - width * image.height) > 0.02 * image.width * height:
            raise MediaError(
                f"The mask is {image.width}x{image.height} and the image {width}x{height}; both "
                "must have the same aspect ratio."
            )
        converted = _convert(image, alpha=True)
        opacity = converted.getchannel("A") if converted.mode == "RGBA" else None
        if opacity is None or opacity.getextrema() == (255, 255):
            mask = np.asarray(converted.convert("RGB").convert("L"), np.float32)
        else:
            mask = 255 - np.asarray(opacity, np.float32)
    if mask.shape != (height, width):
        scaled = Image.fromarray(mask).resize(size, Image.Resampling.BILINEAR)
        mask = np.asarray(scaled, np.float32)
    return np.asarray(mask / 255, np.float32)


def read_video(
    data: bytes,
    *,
    pixels_max: int = PIXELS_MAX,
    frames_max: int,
    seconds_max: float,
    audio: bool = False,
) -> DecodedVideo:
    """Decode a complete video, with its audio if ``audio`` is set. Raise ``MediaError``.

    ``pixels_max`` limits each frame. To decode without keeping all frames in memory, use
    ``open_video``.
    """
    source = open_video(
        data,
        pixels_max=pixels_max,
        frames_max=frames_max,
        seconds_max=seconds_max,
        audio=audio,
    )
    return DecodedVideo(np.stack(list(source.frames)), source.fps, source.audio)


@contextmanager
def _open(data: bytes, pixels_max: int) -> Iterator[Image.Image]:
    """Open an image and check its header; any error, also in the block, is a ``MediaError``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                _check(image, data, pixels_max)
                yield image
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaError(
            f"The image has too many pixels; at most {pixels_max} are allowed."
        ) from error
    except UnidentifiedImageError as error:
        raise MediaError(f"The file is not a supported image; {_ACCEPTED}.") from error
    except _BROKEN as error:
        raise MediaError("The image is damaged and cannot be decoded.") from error


def _check(image: Image.Image, data: bytes, pixels_max: int) -> None:
    width, height = image.size
    if not (0 < width <= _SIDE_MAX and 0 < height <= _SIDE_MAX):
        raise MediaError(
            f"The image is {width}x{height}; a side can be at most {_SIDE_MAX} pixels."
        )
    if width * height > pixels_max:
        raise MediaError(
            f"The image is {width}x{height}, {width * height} pixels; at most {pixels_max}."
        )
    if image.format == "JPEG" and data.count(b"\xff\xda") > _SCANS_MAX:
        raise MediaError(f"The JPEG has more than {_SCANS_MAX} scans; save it again.")


def _convert(image: Image.Image, *, alpha: bool) -> Image.Image:
    """Convert to upright RGB in sRGB, or to RGBA if the image has alpha and ``alpha`` is set."""
    image.load()
    transposition = _TRANSPOSITIONS.get(_orientation(image))
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    converted = image.convert("RGBA") if image.has_transparency_data else _to_srgb(image)
    if converted.mode == "RGBA" and not alpha:
        white = Image.new("RGBA", converted.size, "white")
        converted = Image.alpha_composite(white, converted).convert("RGB")
    return converted if transposition is None else converted.transpose(transposition)


def _to_srgb(image: Image.Image) -> Image.Image:
    """Convert to sRGB; an invalid colour profile is ignored."""
    profile = image.info.get("icc_profile")
    if profile and image.mode in ("RGB", "CMYK"):
        try:
            source_profile = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            srgb = ImageCms.createProfile("sRGB")
            if converted := ImageCms.profileToProfile(
                image, source_profile, srgb, outputMode="RGB"
            ):
                return converted
        except (ImageCms.PyCMSError, *_BROKEN):
            pass
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 if EXIF is missing or damaged."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except _BROKEN:
        return 1
