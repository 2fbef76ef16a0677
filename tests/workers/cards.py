"""Checks of the directory of every shipped model."""

from __future__ import annotations

import hashlib
from pathlib import Path


def check_card(directory: Path, *, most: int, weights: str = "*.safetensors") -> None:
    """Check the total size, and that the weights are those of the model card."""
    card = (directory / "README.md").read_text()
    found = list(directory.rglob(weights))

    assert sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) <= most
    assert found
    for file in found:
        assert hashlib.sha256(file.read_bytes()).hexdigest() in card
