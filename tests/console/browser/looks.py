"""What pages look like: pictures of them, kept beside the tests, and how far others differ.

The pictures are of one Chromium with one set of fonts, of which ``looks/made_with.json`` is the
record. Another version of either draws the same page differently.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Browser

FOLDER: Final = Path(__file__).parent / "looks"
MADE_WITH: Final = FOLDER / "made_with.json"
DIFFERENCE_MAX: Final = 0.005
"""Mean absolute difference of all channels of all pixels, as a share of the largest."""
BYTES_MAX: Final = 40_000
FONTS: Final = (
    *("LiberationSans-Regular", "LiberationSans-Bold"),
    *("LiberationMono-Regular", "LiberationMono-Bold", "DejaVuSans"),
)
"""Files of fonts; the last one has the signs of states, which the others lack."""
FONT_FOLDERS: Final = (Path("/usr/share/fonts"), Path("/usr/local/share/fonts"))
FONT_CONFIGURATION: Final = """\
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
{folders}
<cachedir>{cache}</cachedir>
<selectfont>
  <rejectfont><glob>*.*</glob></rejectfont>
{accepted}
</selectfont>
<match target="pattern">
  <test name="family"><string>monospace</string></test>
  <edit name="family" mode="assign" binding="same"><string>Liberation Mono</string></edit>
</match>
<match target="pattern">
  <edit name="family" mode="append"><string>Liberation Sans</string></edit>
  <edit name="antialias" mode="assign"><bool>true</bool></edit>
  <edit name="hinting" mode="assign"><bool>false</bool></edit>
  <edit name="rgba" mode="assign"><const>none</const></edit>
</match>
</fontconfig>
"""


@dataclass(frozen=True)
class Means:
    """What pictures were made with: the Chromium's major version, and a digest of the fonts."""

    chromium: int
    fonts: str

    def __str__(self) -> str:
        return f"Chromium {self.chromium}, fonts {self.fonts}"


def means_of(browser: Browser) -> Means:
    """Return what pictures by this browser are made with."""
    digest = hashlib.sha256()
    for path in _font_files():
        digest.update(path.read_bytes())
    return Means(int(browser.version.partition(".")[0]), digest.hexdigest()[:12])


def recorded_means() -> Means | None:
    return Means(**json.loads(MADE_WITH.read_text())) if MADE_WITH.exists() else None


def record(means: Means) -> None:
    MADE_WITH.write_text(json.dumps(asdict(means)) + "\n")


def font_configuration(directory: Path) -> Path:
    """Write a configuration of fontconfig by which every text is in one of the fonts."""
    files = _font_files()
    folders = "\n".join(f"<dir>{each}</dir>" for each in sorted({file.parent for file in files}))
    accepted = "\n".join(f"  <acceptfont><glob>{each}</glob></acceptfont>" for each in files)
    path = directory / "fonts.conf"
    path.write_text(
        FONT_CONFIGURATION.format(folders=folders, accepted=accepted, cache=directory / "cache")
    )
    return path


def _font_files() -> list[Path]:
    """Return the files of the fonts, without those that are missing."""
    found = [[*each.rglob(f"{name}.ttf")] for name in FONTS for each in FONT_FOLDERS]
    return [min(paths) for paths in found if paths]


def encoded(png: bytes) -> bytes:
    """Encode a screenshot without loss or, if that is too large, with fewer colours."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    kept = _webp(picture)
    for colours in (128, 64, 32, 16):
        if len(kept) <= BYTES_MAX:
            break
        few = picture.quantize(colours, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        kept = _webp(few.convert("RGB"))
    return kept


def _webp(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "WEBP", lossless=True, quality=100, method=4)
    return file.getvalue()


def difference(one: bytes, other: bytes) -> float:
    """Return the mean absolute difference of two pictures, from 0 to 1; 1 if their sizes differ."""
    before, now = (Image.open(io.BytesIO(each)).convert("RGB") for each in (one, other))
    if before.size != now.size:
        return 1.0
    found = ImageStat.Stat(ImageChops.difference(before, now)).mean
    return sum(found) / len(found) / 255
