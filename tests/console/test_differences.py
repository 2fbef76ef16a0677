"""How far two pictures differ."""

from __future__ import annotations

import io
import random

from PIL import Image

from tests.console.browser.looks import BYTES_MAX, DIFFERENCE_MAX, FOLDER, difference, encoded


def picture(*, grey: int = 0, size: tuple[int, int] = (100, 100)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (grey, grey, grey)).save(file, "PNG")
    return file.getvalue()


def test_difference_is_the_mean_share_of_all_channels() -> None:
    assert difference(picture(), picture()) == 0
    assert difference(picture(), picture(grey=255)) == 1
    assert difference(picture(), picture(grey=51)) == 0.2
    assert difference(picture(), picture(size=(100, 101))) == 1


def test_part_of_a_page_that_moves_is_a_difference() -> None:
    with Image.open(FOLDER / "requests-light-1280.webp") as page:
        moved = page.copy()
        box = (200, 300, 1280, 780)
        moved.paste(page.crop(box), (200, 312))
    file = io.BytesIO()
    moved.save(file, "PNG")

    kept = (FOLDER / "requests-light-1280.webp").read_bytes()
    assert difference(kept, file.getvalue()) > DIFFERENCE_MAX


def test_picture_is_kept_without_loss_or_small() -> None:
    plain = picture(grey=200)
    noise = Image.frombytes("RGB", (200, 200), random.Random(7).randbytes(200 * 200 * 3))
    file = io.BytesIO()
    noise.save(file, "PNG")

    assert difference(encoded(plain), plain) == 0
    assert len(encoded(file.getvalue())) <= BYTES_MAX
