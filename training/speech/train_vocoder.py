"""Trains the vocoder of ``pocket-speech`` on the teacher's speech.

    python -m training.speech.train_vocoder --samples /tmp/samples --minutes 10 --out DIR

The loss compares magnitude spectra at three resolutions.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from training.common.loop import Mean, adam, clock, set_rate, step
from training.speech.samples import StoredSample, read
from workers.engines.speech.source_filter_vocoder import (
    SourceFilterVocoder,
    read_source_filter_vocoder,
)
from workers.engines.speech.spectra import HOP, magnitudes

WIDTH: Final = 112
DEPTH: Final = 4
_FRAMES: Final = 48
_BATCH: Final = 12
_WINDOWS: Final = (2048, 1024, 512)


def crops(known: list[StoredSample], r: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose crops: frames ``(B, 48, 82)`` and their audio ``(B, 48 * HOP)``."""
    frames: list[torch.Tensor] = []
    sounds: list[torch.Tensor] = []
    while len(frames) < _BATCH:
        one = r.choice(known).sample
        most = len(one.audio) // HOP - _FRAMES
        if most < 1:
            continue
        at = r.randrange(most)
        frames.append(one.features[at : at + _FRAMES])
        sounds.append(one.audio[at * HOP : (at + _FRAMES) * HOP])
    return torch.stack(frames), torch.stack(sounds)


def distance(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the distance of log magnitudes plus the relative distance of magnitudes."""
    total = torch.zeros(())
    for window in _WINDOWS:
        a, b = (magnitudes(one, window, window // 4) for one in (made, truth))
        total = total + (torch.log(a + 1e-3) - torch.log(b + 1e-3)).abs().mean()
        total = total + (a - b).norm() / b.norm().clamp(min=1e-3)
    return total / len(_WINDOWS)


def train(folder: Path, *, minutes: float, seed: int, out: Path, go_on: bool) -> None:
    torch.manual_seed(seed)
    r = random.Random(seed)
    model = (
        read_source_filter_vocoder(out) if go_on else SourceFilterVocoder(width=WIDTH, depth=DEPTH)
    )
    optimizer = adam((model.parameters(), 1e-3 if go_on else 2e-3))
    mean = Mean(list(model.parameters()), keep=0.995)
    known = read(sorted(folder.glob("*.pt"))[:4], sound=True)
    turns, shown = 0, 0.0
    for done in clock(minutes):
        set_rate(optimizer, done)
        frames, sounds = crops(known, r)
        loss = distance(model(frames), sounds)
        step(optimizer, model.parameters(), loss)
        mean.update()
        turns += 1
        shown += (float(loss.detach()) - shown) * max(0.02, 1 / turns)
        if turns % 100 == 0:
            print(f"vocoder {done:.2f} step {turns} loss {shown:.4f}", flush=True)
            mean.swap()
            save(model, out)
            mean.swap()
    mean.swap()
    save(model, out)
    print(f"{turns} steps, loss {shown:.4f}")


def save(model: SourceFilterVocoder, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file({k: v.bfloat16() for k, v in model.state_dict().items()}, out / "model.safetensors")
    config = {"model_type": "excited", "width": WIDTH, "depth": DEPTH}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("workers/pocket/speech/vocoder"))
    parser.add_argument("--go-on", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    train(given.samples, minutes=given.minutes, seed=given.seed, out=given.out, go_on=given.go_on)


if __name__ == "__main__":
    main()
