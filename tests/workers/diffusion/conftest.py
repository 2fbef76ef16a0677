from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.workers.diffusion.checkpoints import make_checkpoint
from workers.engines import cooperative_batching

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each turn execute a whole batch, however slow the machine is, since tests count them."""
    monkeypatch.setattr(cooperative_batching, "SLICE_S", math.inf)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("pipeline"))
        return made[name]

    return make
