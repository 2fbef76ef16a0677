"""Portraits and recordings for tests, and a driver of the talking-head engine."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import av
import msgspec
import numpy as np
import numpy.typing as npt
import torch

from training.talking import faces
from training.talking.utterances import RATE, Utterance, utter
from workers.contract.jobs import Job, RequestId, Usage
from workers.contract.media import TalkingInput
from workers.contract.models import ModelSpec
from workers.engines.talking.engine import TalkingEngine
from workers.media import encode
from workers.media.audio import encode_audio
from workers.media.pixels import Audio, Pixels

CHECKPOINT: Final = Path("workers/pocket/talking")
HELD_OUT: Final = 987_654


def person(seed: int = 1, *, side: int = 160) -> tuple[Pixels, npt.NDArray[np.float32]]:
    """A portrait with its mouth shut ``(side, side, 3)``, and its points in pixels ``(5, 2)``."""
    people = faces.choose(torch.Generator().manual_seed(HELD_OUT + seed), 1, near=(0.6, 0.85))
    shut = torch.zeros(1, 4)
    drawn, _ = faces.draw(people, shut, faces.grid(1, side))
    pixels = (drawn[0].permute(1, 2, 0) * 255).round().byte().numpy()
    points = (faces.points(people, shut)[0] + 1) * side / 2
    return pixels, points.numpy()


def png(pixels: Pixels) -> bytes:
    return encode.image(pixels, "png")


def speech(seconds: float = 1.0, seed: int = 1) -> Utterance:
    return utter(np.random.default_rng(HELD_OUT + seed), seconds=seconds)


def wav(samples: npt.NDArray[np.float32], rate: int = RATE) -> bytes:
    return encode_audio(Audio(np.atleast_2d(samples), rate), "wav")


def engine_of(*, limits: Any = None, **options: Any) -> TalkingEngine:
    spec = ModelSpec(
        name="pocket-talking",
        task="talking-head",
        engine="talking",
        checkpoint=str(CHECKPOINT),
        options={"device": "cpu", "threads": 1, **options},
        limits=limits or {},
    )
    engine = TalkingEngine(spec)
    engine.load()
    return engine


def job(name: str, *, held_ms: int = 0, **asked: Any) -> Job:
    value = msgspec.to_builtins(TalkingInput(**asked))
    limits = Usage(video_ms=held_ms)
    id = RequestId(name)
    return Job(id, "1", "pocket-talking", "talking-head", value, limits=limits, stream=True)


def frames_of(data: bytes) -> Pixels:
    """``(T, H, W, 3)``."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([one.to_ndarray(format="rgb24") for one in container.decode(video=0)])
