"""Reads the words that a model understands from the tokenizer of its checkpoint.

So the catalog always lists what the engine knows, also after another training. On a machine without
the checkpoint, the words are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gateway.catalog.schema import CatalogEntry
from workers.contract.models import locate


class NoWords(ValueError):
    """A tokenizer file without whole words."""


def with_words(entry: CatalogEntry, root: Path) -> CatalogEntry:
    """Return an entry with the words of its vocabulary; without a vocabulary if its file is
    elsewhere.

    Paths are relative to ``root``. Raise ``NoWords``.
    """
    vocabulary = entry.vocabulary
    if vocabulary is None or vocabulary.file is None:
        return entry
    path = locate(root, entry.checkpoint or "") / vocabulary.file
    try:
        found = {*_words(path.read_bytes(), path), *vocabulary.words}
        known = vocabulary.model_copy(update={"words": tuple(sorted(found))})
    except OSError:
        known = None
    return entry.model_copy(update={"vocabulary": known})


def _words(text: bytes, path: Path) -> Iterator[str]:
    try:
        model: dict[str, Any] = msgspec.json.decode(text)["model"]
        kind, tokens = model["type"], model["vocab"]
    except (msgspec.DecodeError, LookupError, TypeError):
        raise NoWords(f"{path} is not a tokenizer file") from None
    if kind != "WordLevel" or not isinstance(tokens, dict):
        raise NoWords(f"{path} has parts of words ({kind}), so every word is understood")
    # Marks such as ``</s>`` and ``<tonic:c>`` are not words, and neither is punctuation.
    words = (word for word in tokens if not word.startswith("<"))
    return (word for word in words if any(map(str.isalnum, word)))
