"""Replaces the step loop for one speech engine."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.workers.driving import EngineDriver
from tests.workers.speech.checkpoints import RATE
from workers.contract.jobs import AudioChunk, Job, RequestId, Usage
from workers.contract.models import ModelSpec
from workers.engines.speech.engine import SpeechEngine
from workers.protocol.engine import Admission, Admitted

NO_LIMITS = Usage()


def spec(path: Path, task: str = "text-to-speech", *also: str, **options: Any) -> ModelSpec:
    return ModelSpec(
        "talker",
        task,
        engine="speech",
        checkpoint=str(path),
        options={"sentence_seconds": 0.5, "threads": 1, **options},
        also=also,
    )


def samples(data: bytes) -> np.ndarray:
    """Of a WAV."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    return np.concatenate(frames, axis=1).reshape(-1).astype(np.float32) / 32_768


class Driver(EngineDriver[SpeechEngine]):
    def __init__(self, of: ModelSpec) -> None:
        super().__init__(SpeechEngine(of))
        self.task = of.task

    def admit(
        self,
        name: str,
        files: Sequence[bytes] = (),
        *,
        task: str | None = None,
        stream: bool = False,
        priority: int = 0,
        limits: Usage = NO_LIMITS,
        **asked: Any,
    ) -> Admission:
        given: dict[str, Any] = {"format": "wav", "recording": bool(files)}
        given |= {"text": "Hello there."} if (task or self.task) != "text-to-music" else {}
        job = Job(
            RequestId(name),
            "acct",
            "talker",
            task or self.task,
            given | asked,
            stream=stream,
            priority=priority,
            limits=limits,
        )
        return self.take(job, files)

    def file(self, name: str) -> bytes:
        return self.files(name)[0]

    def streamed(self, name: str) -> bytes:
        pieces = [event for event in self.events[name] if isinstance(event, AudioChunk)]
        whole = b""
        for piece in pieces:
            assert piece.start == len(whole)
            whole += piece.data
        return whole


def speak(of: ModelSpec | Driver, **asked: Any) -> np.ndarray:
    """What one request alone gets."""
    driver = of if isinstance(of, Driver) else Driver(of)
    name = f"alone-{len(driver.outcomes)}"
    assert driver.admit(name, **asked) == Admitted()
    driver.finish()
    return samples(driver.file(name))


__all__ = ["RATE", "Driver", "samples", "speak", "spec"]
