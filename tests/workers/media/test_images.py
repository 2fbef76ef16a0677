"""Images are encoded and decoded; hostile ones are refused with a reason."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import zlib
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image, ImageCms

from workers.contract.media import ImageFormat
from workers.media import decode, encode
from workers.media.encode import Origin
from workers.media.pixels import MediaError, Pixels

FORMATS: tuple[ImageFormat, ...] = get_args(ImageFormat)
ORIGIN = Origin("a <model> & more", "req_1", seed=7)


def _picture(width: int = 40, height: int = 30, channels: int = 3) -> Pixels:
    """Smooth, so that every format keeps it closely."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    planes = [x, y, 255 - x, (x + y) / 2]
    return np.stack(planes[:channels], axis=-1).astype(np.uint8)


def _saved(image: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims to be large and has no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + header + struct.pack(">I", 0) + b"IDAT" + b"\x35\xaf\x06\x1e"


@pytest.mark.parametrize("format", FORMATS)
def test_image_round_trip(format: ImageFormat) -> None:
    picture = _picture()

    found = decode.read_image(encode.image(picture, format, quality=95, origin=ORIGIN))

    assert found.shape == picture.shape
    assert np.abs(found.astype(int) - picture).max() <= (0 if format == "png" else 12)


@pytest.mark.parametrize("format", ["png", "webp"])
def test_alpha_is_kept_or_composited_on_white(format: ImageFormat) -> None:
    picture = _picture(channels=4)
    picture[:10, :, 3] = 0

    data = encode.image(picture, format, quality=100)

    kept, flat = decode.read_image(data, alpha=True), decode.read_image(data)
    assert (kept.shape[2], flat.shape[2]) == (4, 3)
    assert (kept[:10, :, 3] == 0).all()
    assert (flat[:10] == 255).all()


@pytest.mark.parametrize("format", FORMATS)
def test_image_names_its_origin(format: ImageFormat) -> None:
    with Image.open(io.BytesIO(encode.image(_picture(), format, origin=ORIGIN))) as found:
        found.load()
        xmp = found.info["XML:com.adobe.xmp" if format == "png" else "xmp"]
        packet = found.getxmp()["xmpmeta"]["RDF"]["Description"]
        exif = found.getexif()

    assert packet["model"] == "a <model> & more", xmp
    assert (packet["seed"], packet["request_id"]) == ("7", "req_1")
    assert packet["DigitalSourceType"].endswith("/trainedAlgorithmicMedia")
    if format == "png":
        assert found.info["Software"] == "Tollgate"
        assert (found.info["model"], found.info["seed"]) == ("a <model> & more", "7")
    else:
        assert exif[0x0131] == "Tollgate"


@pytest.mark.parametrize("turn", range(1, 9))
def test_rotated_photo_is_decoded_upright(turn: int) -> None:
    upright = Image.fromarray(_picture())
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's transpositions, inverted
    stored = upright.transpose(Image.Transpose(back[turn])) if turn > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = turn

    found = decode.read_image(_saved(stored, "PNG", exif=exif))

    np.testing.assert_array_equal(found, np.asarray(upright))


def test_only_the_first_frame_of_an_animation_is_decoded() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]

    for format in ("GIF", "WEBP", "PNG"):
        data = _saved(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)

        assert (decode.read_image(data) == (255, 0, 0)).all(), format


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "I;16"])
def test_any_kind_of_pixel_becomes_rgb(mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((6, 9), 0x8000, np.uint16))
    elif mode == "P":
        image = Image.new("RGB", (9, 6), (128, 128, 128)).quantize(4)
    else:
        image = Image.new("RGB", (9, 6), (128, 128, 128)).convert(mode)

    data = _saved(image, "JPEG" if mode == "CMYK" else "PNG")

    found = decode.read_image(data)
    assert found.shape == (6, 9, 3)
    assert mode == "1" or np.abs(found.astype(int) - 128).max() <= 2


def test_colours_of_another_profile_are_converted() -> None:
    lab = ImageCms.createProfile("LAB")  # not for RGB: as good as none
    profile = ImageCms.ImageCmsProfile(lab).tobytes()

    for given in (profile, b"no profile"):
        data = _saved(Image.fromarray(_picture()), "PNG", icc_profile=given)

        np.testing.assert_array_equal(decode.read_image(data), _picture())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a supported image; PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a supported image"),
        (_saved(Image.new("RGB", (4, 4)), "TIFF"), "not a supported image"),
        (_saved(Image.new("RGB", (4, 4)), "BMP"), "not a supported image"),
        (_png_header(60_000, 60_000), "too many pixels|3600000000 pixels; at most"),
        (_png_header(9_000, 9_000), "9000x9000, 81000000 pixels; at most 64000000"),
        (_png_header(70_000, 4), "at most 65535 pixels"),
        (_png_header(30, 30), "damaged"),
        (_saved(Image.fromarray(_picture()), "PNG")[:100], "damaged"),
        (_saved(Image.fromarray(_picture()), "JPEG")[:400], "damaged"),
        (_saved(Image.fromarray(_picture()), "WEBP")[:100], "damaged|not a supported"),
    ],
)
def test_invalid_image_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(MediaError, match=said):
        decode.read_image(data)


def test_too_large_image_is_refused_before_it_is_decoded() -> None:
    header = _saved(Image.new("RGB", (200, 100)), "JPEG")[:630]

    with pytest.raises(MediaError, match="200x100, 20000 pixels; at most 19999"):
        decode.read_image(header, pixels_max=19_999)


def test_a_jpeg_of_endless_scans_is_refused() -> None:
    data = _saved(Image.fromarray(_picture()), "JPEG", progressive=True)
    scan = data.index(b"\xff\xda")

    with pytest.raises(MediaError, match="more than 128 scans"):
        decode.read_image(data[:scan] + data[scan:-2] * 60 + data[-2:])


def test_a_compressed_text_that_explodes_is_refused() -> None:
    body = b"zTXtbomb\0\0" + zlib.compress(b"\0" * 100_000_000)
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    data = _saved(Image.fromarray(_picture()), "PNG")

    with pytest.raises(MediaError):
        decode.read_image(data[:33] + chunk + data[33:])


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_damage_always_raises_a_media_error(format: str) -> None:
    whole = _saved(Image.fromarray(_picture()), format, exif=ORIGIN.exif())
    r = random.Random(4)

    for _ in range(150):
        data = bytearray(whole)
        for _ in range(r.randint(1, 8)):
            data[r.randrange(len(data))] = r.randrange(256)
        with contextlib.suppress(MediaError):  # and nothing else
            decode.read_image(bytes(data), pixels_max=1_000_000)


def test_transparent_area_of_a_mask_is_edited() -> None:
    mask = _picture(channels=4)
    mask[..., 3] = 255
    mask[:15, :, 3] = 0

    found = decode.read_mask(encode.image(mask, "png"), (40, 30))

    assert found.shape == (30, 40)
    assert (found[:15] == 1).all()
    assert (found[15:] == 0).all()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_white_area_of_an_opaque_mask_is_edited(channels: int) -> None:
    mask = np.zeros((30, 40, channels), np.uint8)
    mask[:, :10] = 255
    if channels == 4:
        mask[..., 3] = 255

    data = _saved(Image.fromarray(mask.squeeze()), "PNG")

    found = decode.read_mask(data, (80, 60))
    assert found.shape == (60, 80)
    assert (found[:, :18] == 1).all()
    assert (found[:, 22:] == 0).all()


def test_mask_of_another_aspect_ratio_is_refused() -> None:
    with pytest.raises(MediaError, match="The mask is 40x30 and the image 40x40"):
        decode.read_mask(encode.image(_picture(), "png"), (40, 40))
