"""Checkpoints, created once for all tests of a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers.speech.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("speech") / name)
        return made[name]

    return make
