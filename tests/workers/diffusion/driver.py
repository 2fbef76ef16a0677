"""Replaces the step loop for one image engine."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.workers.driving import EngineDriver
from workers.contract.jobs import Job, RequestId
from workers.contract.models import ModelSpec
from workers.engines.diffusion.engine import DiffusionEngine
from workers.protocol.engine import Admission

SIZE = 32


def spec(path: Path, task: str = "text-to-image", *also: str, **options: Any) -> ModelSpec:
    return ModelSpec(
        "painter",
        task,
        engine="diffusion",
        checkpoint=str(path),
        options={"steps": 4, **options},
        also=also,
    )


def picture(seed: int = 0, size: tuple[int, int] = (48, 40)) -> bytes:
    pixels = np.random.RandomState(seed).randint(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def opened(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.int16)


class Driver(EngineDriver[DiffusionEngine]):
    def __init__(self, of: ModelSpec) -> None:
        super().__init__(DiffusionEngine(of))
        self.task = of.task

    def admit(
        self,
        name: str,
        files: Sequence[bytes] = (),
        *,
        task: str | None = None,
        priority: int = 0,
        **asked: Any,
    ) -> Admission:
        given = {"prompt": "a red circle", "width": SIZE, "height": SIZE, "images": len(files)}
        if asked.get("mask"):
            given["images"] = len(files) - 1
        job = Job(
            RequestId(name), "acct", "painter", task or self.task, given | asked, priority=priority
        )
        return self.take(job, files)
