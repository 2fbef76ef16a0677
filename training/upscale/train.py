"""Trains ``pocket-upscale``, a compact network that upscales four times, on rendered scenes.

    python -m training.upscale.train --minutes 25 --out workers/pocket/upscale

Targets are scenes rendered at 256 pixels. Inputs are reduced by area, bicubic or Lanczos, or
rendered small, and then degraded by a little noise, JPEG or WebP. ``score`` compares with bicubic
upscaling on held-out scenes.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from copy import deepcopy
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from training.common import scenes
from workers.engines.upscale.compact import Compact

SCALE: Final = 4
LOW: Final = 64
WIDTH: Final = 32
DEPTH: Final = 11
HELD_OUT_SEED: Final = 987_654
HELD_OUT: Final = 96
_CROP: Final = 24
_BATCH: Final = 8
"""Small, for many steps: about 900 a minute on one core."""
_PLAIN: Final = 0.02
"""Standard deviation of a crop's colours below which it is too plain to learn from."""
_POOL: Final = 384
"""Number of scenes in the pool; each step replaces some."""
_FRESH: Final = 1
_WAYS: Final = ("area", "bicubic", "lanczos", "drawn")


def draw_pair(r: random.Random, *, way: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Render a scene small and large: ``(3, 64, 64)`` and ``(3, 256, 256)`` from 0 to 1."""
    scene = scenes.scene(r)
    high = (scenes.draw([scene], LOW * SCALE)[0] + 1) / 2
    return shrink(high, scene, way or r.choice(_WAYS)), high


def shrink(high: torch.Tensor, scene: scenes.Scene, way: str) -> torch.Tensor:
    """Reduce an image; the way ``drawn`` renders its scene small instead."""
    if way == "drawn":
        return (scenes.draw([scene], LOW)[0] + 1) / 2
    if way == "area":
        return F.avg_pool2d(high, SCALE)
    filters = {"bicubic": Image.Resampling.BICUBIC, "lanczos": Image.Resampling.LANCZOS}
    return from_image(to_image(high).resize((LOW, LOW), filters[way]))


def degrade(low: torch.Tensor, r: random.Random) -> torch.Tensor:
    """Apply a little noise, a lossy file format, or nothing."""
    kind = r.random()
    if kind < 0.3:
        generator = torch.Generator().manual_seed(r.randrange(2**31))
        noise = torch.randn(low.shape, generator=generator)
        return (low + noise * r.uniform(0.002, 0.012)).clamp(0, 1)
    if kind < 0.55:
        out = io.BytesIO()
        to_image(low).save(out, r.choice(("JPEG", "WEBP")), quality=r.randint(75, 96))
        return from_image(Image.open(out))
    return low


def to_image(picture: torch.Tensor) -> Image.Image:
    pixels = (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
    return Image.fromarray(pixels.contiguous().numpy())


def from_image(image: Image.Image) -> torch.Tensor:
    pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def bicubic(low: torch.Tensor) -> torch.Tensor:
    """Upscale without a model, as the baseline: ``(3, H, W)`` to ``(3, 4 H, 4 W)``."""
    image = to_image(low)
    size = (image.width * SCALE, image.height * SCALE)
    return from_image(image.resize(size, Image.Resampling.BICUBIC))


def psnr(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the PSNR of 8-bit pixels, in decibels."""
    error = F.mse_loss((found.clamp(0, 1) * 255).round(), truth * 255)
    return float(10 * torch.log10(255**2 / error.clamp(min=1e-3)))


def score(model: Compact, *, count: int = HELD_OUT) -> dict[str, tuple[float, float]]:
    """Return the mean PSNR of bicubic and of the model on held-out scenes, by way of reduction."""
    found: dict[str, tuple[float, float]] = {}
    for way in _WAYS:
        r = random.Random(HELD_OUT_SEED)
        pairs = [draw_pair(r, way=way) for _ in range(count // len(_WAYS))]
        with torch.inference_mode():
            ours = [psnr(model(low[None])[0], high) for low, high in pairs]
        usual = [psnr(bicubic(low), high) for low, high in pairs]
        found[way] = (sum(usual) / len(usual), sum(ours) / len(ours))
    usual_mean, ours_mean = (sum(row) / len(row) for row in zip(*found.values(), strict=True))
    return {**found, "all": (usual_mean, ours_mean)}


def contact_sheet(model: Compact, path: Path, *, rows: int = 5) -> None:
    """Save a page of held-out scenes: input, bicubic, model, target."""
    r = random.Random(HELD_OUT_SEED + 1)
    cells = []
    for row in range(rows):
        low, high = draw_pair(r, way=_WAYS[row % len(_WAYS)])
        with torch.inference_mode():
            ours = model(low[None])[0]
        small = F.interpolate(low[None], scale_factor=SCALE, mode="nearest")[0]
        cells += [small, bicubic(low), ours.clamp(0, 1), high]
    page = scenes.sheet(torch.stack(cells) * 2 - 1, columns=4)
    Image.fromarray(page.numpy()).save(path, optimize=True)


def train(*, minutes: float, seed: int, out: Path) -> Compact:
    """Train for a number of minutes, and save the averaged weights in ``out``."""
    torch.manual_seed(seed)
    r = random.Random(seed)
    model = fresh()
    average = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0, betas=(0.9, 0.99))
    pool = [draw_pair(r) for _ in range(_POOL)]
    began, step, shown, loss_mean = time.monotonic(), 0, 0.0, 0.0
    while (spent := (time.monotonic() - began) / 60) < minutes:
        for _ in range(_FRESH):
            pool[r.randrange(_POOL)] = draw_pair(r)
        rate = 1.2e-3 * min(1, step / 100, 0.02 + (1 - spent / minutes) * 1.4)
        for group in optimizer.param_groups:
            group["lr"] = rate
        low, high = _crops(pool, r)
        loss = torch.sqrt((model(low) - high) ** 2 + 1e-6).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        step += 1
        keep = min(0.998, step / (step + 20))
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 1 - keep)
        now = float(loss.detach())
        loss_mean = now if step == 1 else loss_mean + (now - loss_mean) * 0.02
        if spent - shown > 1:
            shown = spent
            usual, ours = score(average, count=16)["all"]
            print(
                f"{spent:5.1f} min, step {step}: loss {loss_mean:.5f}, bicubic {usual:.2f} dB, "
                f"ours {ours:.2f} dB",
                flush=True,
            )
            save(average, out)
    save(average, out)
    print(f"{step} steps of {_BATCH} crops")
    return average


def fresh() -> Compact:
    """Create an untrained model: nearly identity layers, and a last layer that adds nothing.

    So all layers are useful from the start. From random weights, the network would spend its first
    thousand steps on learning to change nothing where nothing needs to change.
    """
    model = Compact(width=WIDTH, depth=DEPTH, scale=SCALE)
    for place, layer in enumerate(model.body):
        if isinstance(layer, nn.PReLU):
            nn.init.constant_(layer.weight, 0.7)
        elif isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, a=0.25)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            if layer.in_channels == layer.out_channels:
                layer.weight.data.mul_(0.15)
                layer.weight.data[:, :, 1, 1] += torch.eye(WIDTH)
            elif place:
                nn.init.zeros_(layer.weight)
    return model


def _crops(
    pool: list[tuple[torch.Tensor, torch.Tensor]], r: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random crops of scenes, rotated and mirrored; few of them plain."""
    lows: list[torch.Tensor] = []
    highs: list[torch.Tensor] = []
    while len(lows) < _BATCH:
        low, high = pool[r.randrange(len(pool))]
        top, left = r.randint(0, LOW - _CROP), r.randint(0, LOW - _CROP)
        low = low[:, top : top + _CROP, left : left + _CROP]
        if float(low.std(dim=(1, 2)).max()) < _PLAIN and r.random() > 0.15:
            continue
        high = high[
            :,
            top * SCALE : (top + _CROP) * SCALE,
            left * SCALE : (left + _CROP) * SCALE,
        ]
        turns, flipped = r.randrange(4), r.random() < 0.5
        for part, parts in ((degrade(low, r), lows), (high, highs)):
            turned = torch.rot90(part, turns, (1, 2))
            parts.append(turned.flip(2) if flipped else turned)
    return torch.stack(lows), torch.stack(highs)


def save(model: Compact, out: Path) -> None:
    """Save the weights as safetensors in float32, with a configuration."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, out / "model.safetensors")
    config = {"architecture": "compact", "scale": SCALE, "width": WIDTH, "depth": DEPTH}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(path: Path) -> Compact:
    model = Compact.from_weights(load_file(path / "model.safetensors"))
    model.eval()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("workers/pocket/upscale"))
    parser.add_argument("--sheet", type=Path, help="file for a contact sheet")
    parser.add_argument("--only-score", action="store_true", help="score the existing weights")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.only_score:
        train(minutes=given.minutes, seed=given.seed, out=given.out)
    model = load(given.out)
    for way, (usual, ours) in score(model).items():
        print(f"{way:8} bicubic {usual:.2f} dB, ours {ours:.2f} dB")
    if given.sheet:
        contact_sheet(model, given.sheet)


if __name__ == "__main__":
    main()
