"""Replaces the step loop for one music engine."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.workers.driving import EngineDriver
from workers.contract.jobs import AudioChunk, Completed, Job, RequestId, Usage
from workers.contract.models import ModelSpec
from workers.engines.music.engine import TASK, MusicEngine
from workers.protocol.engine import Admission, Admitted


def spec(path: Path, *also: str, task: str = TASK, **options: Any) -> ModelSpec:
    return ModelSpec(
        "band",
        task,
        engine="music",
        checkpoint=str(path),
        options={"threads": 1, "slots": 3, **options},
        limits={"seconds": 40},
        also=also,
    )


def samples(data: bytes, rate: int = 48_000) -> np.ndarray:
    """``(2, n)`` of any file, at some rate."""
    resampler = av.AudioResampler("flt", "stereo", rate)
    with av.open(io.BytesIO(data)) as container:
        frames = [one for frame in container.decode(audio=0) for one in resampler.resample(frame)]
    whole = [frame.to_ndarray() for frame in (*frames, *resampler.resample(None))]
    return np.concatenate(whole, axis=1).reshape(-1, 2).T


class Driver(EngineDriver[MusicEngine]):
    def __init__(self, of: ModelSpec) -> None:
        super().__init__(MusicEngine(of))

    def admit(
        self, name: str, *, stream: bool = False, limits: Usage | None = None, **asked: Any
    ) -> Admission:
        given = {"format": "wav", "prompt": "at 180 bpm in 3/4", "duration_ms": 3000, **asked}
        job = Job(
            RequestId(name),
            "acct",
            "band",
            asked.get("task", TASK),
            {field: value for field, value in given.items() if field != "task"},
            limits=limits or Usage(),
            stream=stream,
        )
        return self.take(job)

    def make(self, **asked: Any) -> Completed:
        """What one request alone gets."""
        name = f"alone-{len(self.outcomes)}"
        assert self.admit(name, **asked) == Admitted()
        self.finish()
        return self.completed(name)

    def completed(self, name: str) -> Completed:
        outcome = self.outcomes[name]
        assert isinstance(outcome, Completed), outcome
        return outcome

    def streamed(self, name: str) -> bytes:
        pieces = [event for event in self.events[name] if isinstance(event, AudioChunk)]
        whole = b""
        for piece in pieces:
            assert piece.start == len(whole)
            whole += piece.data
        return whole
