"""Everything in this folder needs a CUDA device: ``pytest -m gpu tests/workers/gpu``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.workers.diffusion.checkpoints import make_checkpoint as make_pictures
from tests.workers.llm.checkpoints import make_checkpoint as make_chat


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda:0")


@pytest.fixture(scope="session")
def chat_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            # Head sizes that the kernels of a GPU support: multiples of 8, here 16 to 256.
            shape = {"head_dim": 256} if family == "gemma3" else {}
            made[family] = make_chat(family, tmp_path_factory.mktemp(family), **shape)
        return made[family]

    return make


@pytest.fixture(scope="session")
def picture_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_pictures(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make
