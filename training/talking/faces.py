"""Portraits rendered from signed distances, with a mouth of any shape, at any place and resolution.

Faces, styles and lights are random from a seed; the landmarks are exact, and the same face can be
rendered with another mouth. No images of real people are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

POINTS: Final = ("left corner", "right corner", "chin", "left eye", "right eye")
"""Landmarks of a portrait; left is left in the image."""
MOUTH: Final = ("opening", "width", "teeth", "tongue")
"""Parameters of a mouth shape: from 0 to 1; the width from -1 (rounded) to 1 (spread)."""

_TEXTURE: Final = 24
_SKINS: Final = (
    (0.98, 0.86, 0.76),
    (0.94, 0.77, 0.64),
    (0.85, 0.65, 0.49),
    (0.68, 0.47, 0.33),
    (0.47, 0.31, 0.22),
    (0.33, 0.21, 0.15),
)
_INSIDE: Final = (0.24, 0.05, 0.06)
_TEETH: Final = (0.95, 0.93, 0.88)
_TONGUE: Final = (0.78, 0.33, 0.35)


@dataclass(frozen=True, slots=True)
class Faces:
    """Parameters of faces by name: ``number`` ``(B, 1, 1)`` and ``colour`` ``(B, 3, 1, 1)``.

    Lengths are in halves of a face's height; ``x``, ``y`` and ``size`` in halves of the image.
    """

    number: Mapping[str, torch.Tensor]
    colour: Mapping[str, torch.Tensor]
    texture: torch.Tensor
    """Variation of light and skin, and of the background: ``(B, 6, 24, 24)``."""

    def __len__(self) -> int:
        return len(self.texture)


def choose(
    generator: torch.Generator, count: int, *, near: tuple[float, float] = (0.3, 0.95)
) -> Faces:
    """Choose random faces; ``near`` is the range of a face's height relative to the image's."""

    def number(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    def maybe(chance: float) -> torch.Tensor:
        return (torch.rand(count, 1, 1, generator=generator) < chance).float()

    def colour(low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 3, 1, 1, generator=generator)

    size = number(*near)
    room = (1.05 - size).clamp(min=0.08)
    n = {
        "size": size,
        "x": room * number(-0.8, 0.8),
        "y": room * number(-0.8, 0.8),
        "turn": 0.16 * torch.randn(count, 1, 1, generator=generator).clamp(-2, 2),
        "wide": number(0.62, 0.88),
        "power": number(1.9, 2.6),
        "jaw": number(0.0, 0.32),
        "eye_x": number(0.27, 0.4),
        "eye_y": number(-0.22, 0.0),
        "eye_wide": number(0.08, 0.15),
        "eye_high": number(0.045, 0.12),
        "iris": number(0.4, 0.75),
        "brow_y": number(0.14, 0.24),
        "brow_slope": number(-0.25, 0.25),
        "brow_thick": number(0.015, 0.05),
        "nose_y": number(0.16, 0.3),
        "nose_wide": number(0.06, 0.13),
        "nose_style": number(0, 3).floor(),
        "mouth_x": number(-0.03, 0.03),
        "mouth_y": number(0.46, 0.62),
        "mouth_wide": number(0.19, 0.34),
        "mouth_high": number(0.8, 1.15),
        "curve": number(-0.07, 0.04),
        "upper": number(0.02, 0.06),
        "lower": number(0.03, 0.08),
        "bow": number(0.0, 0.5),
        "lips": (number(-0.25, 1.2)).clamp(0, 1),
        "seam": number(0.006, 0.028),
        "seam_dark": number(0.3, 0.9),
        "shade": number(0.0, 0.6) * maybe(0.75),
        "light_x": number(-0.9, 0.9),
        "light_y": number(-0.9, 0.3),
        "uneven": number(0.0, 0.12) * maybe(0.6),
        "soft": number(0.0, 0.5) * maybe(0.7),
        "outline": number(0.01, 0.035) * maybe(0.35),
        "hair": number(-0.62, -0.25),
        "hair_slope": number(-0.5, 0.5),
        "hair_size": number(1.04, 1.25),
        "hair_long": number(-0.2, 1.6),
        "bald": maybe(0.1),
        "ears": maybe(0.6),
        "beard": number(0.35, 0.95) * maybe(0.18),
        "moustache": number(0.4, 0.95) * maybe(0.14),
        "glasses": maybe(0.2),
        "blush": number(0.0, 0.35) * maybe(0.5),
        "grey": maybe(0.1),
        "gain": number(0.75, 1.12),
        "gradient": number(-1, 1),
        "plain": maybe(0.5),
    }
    skins = torch.tensor(_SKINS)[torch.randint(len(_SKINS), (count,), generator=generator)]
    skin = (skins[:, :, None, None] + colour(-0.06, 0.06)).clamp(0.08, 1)
    # Drawn faces sometimes have any colour.
    odd = maybe(0.06)[:, None]
    skin = odd * colour(0.35, 1.0) + (1 - odd) * skin
    red = torch.tensor((0.72, 0.2, 0.24))[None, :, None, None] + colour(-0.12, 0.12)
    lipstick = number(0.05, 0.85)[:, None]
    grey_hair = colour(0.05, 0.35) + number(0, 0.6)[:, None]
    c = {
        "skin": skin,
        "lips": (skin * (1 - lipstick) * 0.85 + red * lipstick * skin.mean(1, keepdim=True) * 1.1),
        "hair": torch.where(maybe(0.85)[:, None] > 0, grey_hair, colour()).clamp(0.02, 0.95),
        "iris": colour(0.05, 0.6),
        "cloth": colour(),
        "ground": colour(),
        "ground2": colour(),
        "line": skin * number(0.05, 0.4)[:, None],
        "glasses": colour(0.0, 0.5),
    }
    texture = torch.randn(count, 6, _TEXTURE, _TEXTURE, generator=generator)
    return Faces(n, c, texture)


def points(faces: Faces, mouths: torch.Tensor) -> torch.Tensor:
    """Return the landmarks ``POINTS``: ``(B, 5, 2)`` as x and y, in image coordinates from -1 to 1.

    ``mouths`` is ``(B, 4)``, as ``MOUTH``.
    """
    n = {name: value[:, 0, 0] for name, value in faces.number.items()}
    half = _half_width(faces, mouths)[:, 0, 0]
    corner_y = n["mouth_y"] + n["curve"]
    zero = torch.zeros_like(half)
    x = torch.stack(
        [n["mouth_x"] - half, n["mouth_x"] + half, zero, -n["eye_x"], n["eye_x"]], dim=1
    )
    chin = 1 + _jaw(faces, mouths)[:, 0, 0]
    y = torch.stack([corner_y, corner_y, chin, n["eye_y"], n["eye_y"]], dim=1)
    cos, sin = torch.cos(n["turn"])[:, None], torch.sin(n["turn"])[:, None]
    turned = torch.stack([cos * x - sin * y, sin * x + cos * y], dim=2)
    return turned * n["size"][:, None, None] + torch.stack([n["x"], n["y"]], dim=1)[:, None]


def grid(count: int, side: int) -> torch.Tensor:
    """Return the pixel centres of images: ``(B, side, side, 2)``."""
    line = (torch.arange(side) + 0.5) * 2 / side - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], dim=2).expand(count, side, side, 2)


def draw(
    faces: Faces,
    mouths: torch.Tensor,
    places: torch.Tensor,
    *,
    mouthless: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Render faces at the pixel centres ``places`` ``(B, H, W, 2)``.

    Return images ``(B, 3, H, W)`` from 0 to 1, and the coverage of each pixel by the inside of the
    mouth, ``(B, 1, H, W)``. If ``mouthless`` ``(B, 1, 1)`` is 1, there is skin instead of a mouth.
    """
    return _Drawing(faces, mouths, places, mouthless).finish()


def _half_width(faces: Faces, mouths: torch.Tensor) -> torch.Tensor:
    opening, width = mouths[:, 0, None, None], mouths[:, 1, None, None]
    return faces.number["mouth_wide"] * (1 + 0.24 * width - 0.08 * opening)


def _drop(faces: Faces, mouths: torch.Tensor) -> torch.Tensor:
    """Return the distance between the lips in the middle."""
    n = faces.number
    return mouths[:, 0, None, None] * n["mouth_high"] * n["mouth_wide"]


def _jaw(faces: Faces, mouths: torch.Tensor) -> torch.Tensor:
    return 0.3 * _drop(faces, mouths)


def _rise(value: torch.Tensor) -> torch.Tensor:
    value = value.clamp(0, 1)
    return value * value * (3 - 2 * value)


class _Drawing:
    """Images being rendered; each layer covers those before it."""

    def __init__(
        self,
        faces: Faces,
        mouths: torch.Tensor,
        places: torch.Tensor,
        mouthless: torch.Tensor | None,
    ) -> None:
        self.n, self.c, self.faces = faces.number, faces.colour, faces
        self.mouths = mouths
        self.mouthless = mouthless
        n = self.n
        self.places = places
        spacing = (places[:, 0, 1] - places[:, 0, 0]).norm(dim=1)[:, None, None]
        self.pixel = spacing / n["size"]
        """Size of a pixel in face lengths."""
        x = (places[..., 0] - n["x"]) / n["size"]
        y = (places[..., 1] - n["y"]) / n["size"]
        cos, sin = torch.cos(n["turn"]), torch.sin(n["turn"])
        self.x, self.y = cos * x + sin * y, cos * y - sin * x
        self.image = torch.zeros(len(faces), 3, *self.x.shape[1:])

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        n = self.n
        self._ground()
        self._body()
        still = self.y
        # Everything on the jaw is rendered at its place before the jaw dropped.
        self.y = still - self._sunk()
        self._head()
        self.y = still
        self._hair()
        self._eyes()
        self._nose()
        inside = self._mouth()
        image = self.image * n["gain"][:, None]
        grey = image.mean(1, keepdim=True)
        image = torch.where(n["grey"][:, None] > 0, grey, image)
        return image.clamp(0, 1), inside

    # --- Primitives -------------------------------------------------------------------------------

    def _cover(self, distance: torch.Tensor) -> torch.Tensor:
        cover: torch.Tensor = 0.5 - distance / self.pixel
        return cover.clamp(0, 1)

    def _put(self, cover: torch.Tensor, colour: torch.Tensor) -> None:
        cover = cover[:, None]
        self.image = self.image * (1 - cover) + colour * cover

    def _oval(
        self,
        x: torch.Tensor | float,
        y: torch.Tensor | float,
        wide: torch.Tensor | float,
        high: torch.Tensor | float,
    ) -> torch.Tensor:
        """Return the approximate distance to an ellipse, mirrored at x = 0."""
        dx, dy = (self.x.abs() - x) / wide, (self.y - y) / high
        far = (dx * dx + dy * dy).sqrt()
        return (far - 1) * torch.minimum(torch.as_tensor(wide), torch.as_tensor(high))

    def _glow(
        self, x: float | torch.Tensor, y: float | torch.Tensor, radius: float
    ) -> torch.Tensor:
        far = (self.x.abs() - x) ** 2 + (self.y - y) ** 2
        return torch.exp(-far / (radius * radius))

    def _textured(self, at_x: torch.Tensor, at_y: torch.Tensor, part: slice) -> torch.Tensor:
        places = torch.stack([at_x, at_y], dim=3) * 0.8
        return F.grid_sample(
            self.faces.texture[:, part],
            places,
            mode="bilinear",
            padding_mode="reflection",
            align_corners=False,
        )

    def _sunk(self) -> torch.Tensor:
        """Return how far the jaw has moved each place down."""
        n = self.n
        under = _rise((self.y - n["mouth_y"]) / (1 - n["mouth_y"]))
        fading = 1 - _rise((self.y - 1.15) / 0.4)
        aside = torch.exp(-((self.x / n["wide"]) ** 4))
        return _jaw(self.faces, self.mouths) * under * fading * aside

    # --- Layers -----------------------------------------------------------------------------------

    def _ground(self) -> None:
        n, c = self.n, self.c
        along = (self.places[..., 0] * n["gradient"] + self.places[..., 1])[:, None] / 4 + 0.5
        flat = n["plain"][:, None]
        uneven = self._textured(self.places[..., 0], self.places[..., 1], slice(3, 6))
        self.image = c["ground"] + (1 - flat) * (
            (c["ground2"] - c["ground"]) * along.clamp(0, 1) + 0.16 * uneven
        )

    def _body(self) -> None:
        n, c = self.n, self.c
        if_hair = 1 - n["bald"]
        back = self._oval(0.0, -0.1, n["wide"] * n["hair_size"], n["hair_size"])
        long = torch.maximum(self.x.abs() - n["wide"] * n["hair_size"], self.y - n["hair_long"])
        long = torch.maximum(long, -0.1 - self.y)
        has_long = (n["hair_long"] > 0.2).float()
        cover = torch.maximum(self._cover(back), self._cover(long) * has_long) * if_hair
        self._put(cover, c["hair"] * 0.85)
        shoulders = torch.maximum(self._oval(0.0, 2.05, 1.55, 0.85), 1.1 - self.y)
        neck = torch.maximum(self.x.abs() - n["wide"] * 0.55, (self.y - 0.7).abs() - 0.7)
        self._put(self._cover(neck), c["skin"] * 0.85)
        self._put(self._cover(shoulders), c["cloth"])
        ears = self._oval(n["wide"] * 0.99, 0.05, 0.1, 0.18)
        self._put(self._cover(ears) * n["ears"], c["skin"] * 0.95)

    def _head(self) -> None:
        n, c = self.n, self.c
        wide = n["wide"] * (1 - n["jaw"] * self.y.clamp(min=0) ** 2)
        r = ((self.x / wide).abs() ** n["power"] + self.y.abs() ** n["power"] + 1e-6) ** (
            1 / n["power"]
        )
        distance = (r - 1) * n["wide"]
        lit = torch.sqrt((1 - r * r).clamp(min=0))
        towards = self.x / n["wide"] * n["light_x"] + self.y * n["light_y"] + lit * 0.9
        shade = 1 - n["shade"] * (0.75 - towards.clamp(min=-0.2)).clamp(min=0)
        uneven = self._textured(self.x, self.y, slice(0, 3))
        uneven = 0.3 * uneven + 0.7 * uneven.mean(1, keepdim=True)
        skin = c["skin"] * shade[:, None] * (1 + n["uneven"][:, None] * uneven)
        sockets = self._glow(n["eye_x"], n["eye_y"], 0.2) + 0.7 * self._glow(0.0, 0.72, 0.13)
        skin = skin * (1 - 0.3 * n["soft"] * sockets)[:, None]
        cheeks = (self._glow(0.38, 0.28, 0.2) * n["blush"])[:, None]
        skin = skin * (1 - cheeks) + cheeks * torch.tensor((0.9, 0.4, 0.4))[None, :, None, None]
        # A beard grows beside and below the mouth.
        edge = 0.2 + 0.35 * (1 - (self.x / n["wide"]).abs())
        beard = _rise((self.y - edge) / 0.12) * n["beard"]
        skin = skin * (1 - beard[:, None]) + c["hair"] * beard[:, None]
        self._put(self._cover(distance), skin)
        line = self._cover(distance.abs() - n["outline"]) * (n["outline"] > 0).float()
        self._put(line, c["line"])

    def _hair(self) -> None:
        n, c = self.n, self.c
        edge = n["hair"] + n["hair_slope"] * self.x + 0.55 * self.x**2
        top = torch.maximum(self.y - edge, self._oval(0.0, -0.02, n["wide"] * 1.04, 1.06))
        self._put(self._cover(top) * (1 - n["bald"]), c["hair"])

    def _eyes(self) -> None:
        n, c = self.n, self.c
        white = self._cover(self._oval(n["eye_x"], n["eye_y"], n["eye_wide"], n["eye_high"]))
        self._put(white, torch.tensor((0.96, 0.96, 0.95))[None, :, None, None])
        radius = torch.minimum(n["eye_wide"], n["eye_high"] * 1.2) * n["iris"].sqrt()
        iris = self._cover(self._oval(n["eye_x"], n["eye_y"], radius, radius))
        self._put(torch.minimum(iris, white), c["iris"])
        pupil = self._cover(self._oval(n["eye_x"], n["eye_y"], radius * 0.5, radius * 0.5))
        self._put(torch.minimum(pupil, white), torch.full((1, 3, 1, 1), 0.03))
        slope = (self.x.abs() - n["eye_x"]) * n["brow_slope"]
        away = (self.y - (n["eye_y"] - n["brow_y"] + slope)).abs() - n["brow_thick"]
        brow = torch.maximum(away, (self.x.abs() - n["eye_x"]).abs() - n["eye_wide"] * 1.25)
        self._put(self._cover(brow), c["hair"] * 0.8)
        rim = self._oval(n["eye_x"], n["eye_y"], n["eye_wide"] * 1.55, n["eye_wide"] * 1.35)
        frame = torch.minimum(
            rim.abs() - 0.012,
            torch.maximum(
                (self.y - n["eye_y"]).abs() - 0.012,
                (self.x.abs() - 0.05).abs() - (n["eye_x"] - n["eye_wide"] * 1.55 - 0.02).abs(),
            ),
        )
        self._put(self._cover(frame) * n["glasses"], c["glasses"])

    def _nose(self) -> None:
        n, c = self.n, self.c
        style, wide, tip = n["nose_style"], n["nose_wide"], n["nose_y"]
        shadow = self._glow(0.0, tip + 0.02, 0.11)
        nostrils = self._cover(self._oval(wide * 0.5, tip, 0.028, 0.02))
        self._put(0.35 * shadow * (style == 0), c["line"])
        self._put(0.8 * nostrils * (style < 2), c["line"])
        bend = (self.y - tip - 0.3 * (self.x / wide) ** 2 * -wide).abs() - 0.012
        line = self._cover(torch.maximum(bend, self.x.abs() - wide))
        self._put(line * (style == 2), c["line"])
        lip = (self.y - (n["mouth_y"] - 0.13) - 0.5 * self.x**2).abs() - 0.05
        moustache = torch.maximum(lip, self.x.abs() - n["mouth_wide"] * 1.05)
        self._put(self._cover(moustache) * n["moustache"], c["hair"])

    def _mouth(self) -> torch.Tensor:
        n, c = self.n, self.c
        width, teeth, tongue = (self.mouths[:, i, None, None] for i in (1, 2, 3))
        half, drop = _half_width(self.faces, self.mouths), _drop(self.faces, self.mouths)
        u = (self.x - n["mouth_x"]) / half
        v = self.y - n["mouth_y"]
        bulge = (1 - u * u).clamp(min=0)
        bulging = bulge + 1e-4
        seam = n["curve"] * u * u
        inner = bulging**0.7
        top, bottom = seam - 0.3 * drop * inner, seam + 0.7 * drop * inner
        full = 1 - 0.35 * width
        bow = 1 - n["bow"] * torch.exp(-((u / 0.2) ** 2))
        lip_top = top - n["upper"] * full * bulging**0.5 * bow
        lip_bottom = bottom + n["lower"] * full * bulging**0.6
        there = torch.ones_like(u) if self.mouthless is None else 1 - self.mouthless
        ends = self._cover((u.abs() - 1) * half)
        lips = torch.minimum(self._cover(lip_top - v), self._cover(v - lip_bottom)) * ends
        self._put(lips * n["lips"] * there, c["lips"])
        shine = torch.exp(-(((v - bottom) / n["lower"] - 0.45) ** 2) * 9) * lips
        self._put(0.18 * shine * n["soft"] * n["lips"] * there, torch.ones(1, 3, 1, 1))
        between = torch.maximum(top - v, v - bottom)
        line = self._cover(between.abs() - n["seam"] * (0.4 + 0.6 * inner)) * ends
        self._put(line * n["seam_dark"] * there, c["line"])
        inside = self._cover(between + 0.3 * self.pixel) * ends * there
        inside = inside * (drop > 1e-3).float()
        light = 0.35 + 0.65 * c["skin"].mean(1, keepdim=True)
        paint = self._inside(u, v, top, bottom, teeth, tongue, light)
        self._put(inside, paint)
        return inside[:, None]

    def _inside(
        self,
        u: torch.Tensor,
        v: torch.Tensor,
        top: torch.Tensor,
        bottom: torch.Tensor,
        teeth: torch.Tensor,
        tongue: torch.Tensor,
        light: torch.Tensor,
    ) -> torch.Tensor:
        """Render the inside of the mouth: dark, with teeth above and a tongue below."""
        dark, white, pink = (
            torch.tensor(one)[None, :, None, None] * light for one in (_INSIDE, _TEETH, _TONGUE)
        )
        high = bottom - top
        lies = self._cover(bottom - high * 0.65 * tongue * (1 - 0.6 * u * u) - v)
        hang = self._cover(v - top - 0.3 * self.n["mouth_wide"] * teeth) * (u.abs() < 0.86)
        hang = hang * (teeth > 0.02)
        lies = lies * (tongue > 0.02)
        paint = dark * (1 - lies[:, None]) + pink * lies[:, None]
        return paint * (1 - hang[:, None]) + white * hang[:, None]
