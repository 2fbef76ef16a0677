"""Adds an entry to a catalog file as text, so that comments and layout stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gateway.catalog.editing.files import write_file
from gateway.catalog.loader import load_catalog


def entry_text(entry: Mapping[str, Any], indent: int = 2) -> str:
    """Return an entry as an item of a block list of YAML."""
    text = yaml.safe_dump(
        [dict(entry)], sort_keys=False, default_flow_style=None, allow_unicode=True, width=100
    )
    return "".join(f"{' ' * indent}{line}\n" for line in text.splitlines())


def insert_entry(text: str, entry: Mapping[str, Any]) -> str:
    """Return the text of a catalog with an entry behind the last one of ``models``.

    Raise ``ValueError`` if its models are not a list with a line for each item.
    """
    models = _models(yaml.compose(text, Loader=yaml.SafeLoader))
    if models is None or models.flow_style or not models.value:
        raise ValueError(
            "`models` is no list of entries, each on lines of its own; add the entry by hand"
        )
    end = _end(models)
    line = end.line + (end.column > 0)
    lines = text.splitlines(keepends=True)
    before = "".join(lines[:line])
    if not before.endswith("\n"):
        before += "\n"
    added = entry_text(entry, models.start_mark.column)
    return f"{before}\n{added}{''.join(lines[line:])}"


def add_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Write an entry into a catalog file, if the result is a valid catalog.

    Raise ``CatalogError`` if it is not, ``ValueError`` as ``insert_entry``.
    """
    text = insert_entry(path.resolve().read_text(encoding="utf-8"), entry)
    write_file(path, text.encode(), check=load_catalog)


def _models(root: yaml.Node | None) -> yaml.SequenceNode | None:
    if not isinstance(root, yaml.MappingNode):
        return None
    for key, value in root.value:
        if key.value == "models" and isinstance(value, yaml.SequenceNode):
            return value
    return None


def _end(node: yaml.Node) -> yaml.Mark:
    """Return where the last value of a node ends, without the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return node.end_mark
