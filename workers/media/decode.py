"""Pictures and masks that clients send, as pixels.

The bytes are hostile until proven otherwise. Nothing is decoded before its header has said what it
is and how large, only the formats named here are tried, and whatever is wrong becomes one
exception with a sentence for the client. Clips are in ``footage``, behind ``read_video``.
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

from workers.media.pixels import Clip, MediaError, Pixels, Weights
from workers.media.video_decode import open_video

PIXELS_MAX: Final = 64_000_000
"""Of one picture: more than a camera's, and 256 MB with alpha."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_ACCEPTED: Final = "PNG, JPEG, WebP and GIF are accepted"
_SIDE_MAX: Final = 65_535
_SCANS_MAX: Final = 128
"""Of a JPEG. Usual are ten; each costs a pass over all pixels, however few bytes it has."""
_ORIENTATION: Final = 0x0112
_TURNS: Final = {
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
"""What Pillow's readers are known to raise at damaged bytes."""


def read_image(data: bytes, *, pixels_max: int = PIXELS_MAX, alpha: bool = False) -> Pixels:
    """Decode a picture, upright: ``(H, W, 3)``, or ``(H, W, 4)`` if it has alpha that is wanted.

    Of an animation the first frame; alpha that is not wanted lies on white. Raise ``MediaError``.
    """
    with _opened(data, pixels_max) as image:
        return np.asarray(_coloured(image, alpha=alpha))


def read_mask(data: bytes, size: tuple[int, int], *, pixels_max: int = PIXELS_MAX) -> Weights:
    """Decode a mask as ``(H, W)`` from 0 (keep) to 1 (may change), scaled to ``size``: W and H.

    If anything in it is transparent, that may change; otherwise what is white. Raise
    ``MediaError``, also where its proportions are not those of ``size``.
    """
    width, height = size
    with _opened(data, pixels_max) as image:
        if abs(image.width * height - width * image.height) > 0.02 * image.width * height:
            raise MediaError(
                f"The mask is {image.width}x{image.height} and the picture {width}x{height}; both "
                "must have the same proportions."
            )
        found = _coloured(image, alpha=True)
        opacity = found.getchannel("A") if found.mode == "RGBA" else None
        if opacity is None or opacity.getextrema() == (255, 255):
            mask = np.asarray(found.convert("RGB").convert("L"), np.float32)
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
) -> Clip:
    """Decode a whole clip, with its sound if wanted. Raise ``MediaError``.

    ``pixels_max`` is of one frame. Where all frames would be too much at once, iterate over
    ``footage.open_video``.
    """
    footage = open_video(
        data,
        pixels_max=pixels_max,
        frames_max=frames_max,
        seconds_max=seconds_max,
        audio=audio,
    )
    return Clip(np.stack(list(footage.frames)), footage.fps, footage.audio)


@contextmanager
def _opened(data: bytes, pixels_max: int) -> Iterator[Image.Image]:
    """Read the header and check it; whatever fails from there on is a ``MediaError``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                _check(image, data, pixels_max)
                yield image
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaError(f"The picture has too many pixels; at most {pixels_max}.") from error
    except UnidentifiedImageError as error:
        raise MediaError(f"This is no picture that can be read; {_ACCEPTED}.") from error
    except _BROKEN as error:
        raise MediaError("The picture is damaged and cannot be read.") from error


def _check(image: Image.Image, data: bytes, pixels_max: int) -> None:
    width, height = image.size
    if not (0 < width <= _SIDE_MAX and 0 < height <= _SIDE_MAX):
        raise MediaError(f"The picture is {width}x{height}; no side may exceed {_SIDE_MAX}.")
    if width * height > pixels_max:
        raise MediaError(
            f"The picture is {width}x{height}, {width * height} pixels; at most {pixels_max}."
        )
    if image.format == "JPEG" and data.count(b"\xff\xda") > _SCANS_MAX:
        raise MediaError(f"The JPEG has more than {_SCANS_MAX} scans; save it anew.")


def _coloured(image: Image.Image, *, alpha: bool) -> Image.Image:
    """As RGB, or RGBA if it has alpha that is wanted; in sRGB and upright."""
    image.load()
    turn = _TURNS.get(_orientation(image))
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    found = image.convert("RGBA") if image.has_transparency_data else _in_srgb(image)
    if found.mode == "RGBA" and not alpha:
        white = Image.new("RGBA", found.size, "white")
        found = Image.alpha_composite(white, found).convert("RGB")
    return found if turn is None else found.transpose(turn)


def _in_srgb(image: Image.Image) -> Image.Image:
    """Colours as sRGB has them; a profile that cannot be read is as good as none."""
    profile = image.info.get("icc_profile")
    if profile and image.mode in ("RGB", "CMYK"):
        try:
            given = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            srgb = ImageCms.createProfile("sRGB")
            if found := ImageCms.profileToProfile(image, given, srgb, outputMode="RGB"):
                return found
        except (ImageCms.PyCMSError, *_BROKEN):
            pass
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """As EXIF says; damaged EXIF says nothing."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except _BROKEN:
        return 1
