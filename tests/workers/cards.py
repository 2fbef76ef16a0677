"""What holds of the directory of every model that is shipped."""

from __future__ import annotations

import hashlib
from pathlib import Path


def check_card(directory: Path, *, most: int, weights: str = "*.safetensors") -> None:
    """It has at most so many bytes in all, and its weights are those on the card."""
    card = (directory / "README.md").read_text()
    found = list(directory.rglob(weights))

    assert sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) <= most
    assert found
    for file in found:
        assert hashlib.sha256(file.read_bytes()).hexdigest() in card
