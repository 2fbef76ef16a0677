"""A YAML document with the position of each value. Knows nothing of catalogs.

YAML allows repeated keys, which hide the first value, and values that contain themselves. Both are
reported as flaws here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import yaml
from yaml.reader import ReaderError

Place: TypeAlias = tuple[str | int, ...]

_MERGE: Final = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Line and column, counted from 1."""

    line: int = 1
    column: int = 1


@dataclass(frozen=True, slots=True)
class Flaw:
    """A part of the document that cannot be read, or not as intended."""

    position: Position
    message: str


class Unreadable(Exception):
    """The text cannot be parsed."""

    def __init__(self, position: Position, message: str) -> None:
        super().__init__(message)
        self.flaw = Flaw(position, message)


class Document:
    """The values of a text, None if it is empty, and their positions."""

    def __init__(self, text: str) -> None:
        """Raise ``Unreadable``."""
        try:
            loader = yaml.SafeLoader(text)
            self._root = loader.get_single_node()
            # Before construction, which merges `<<` into the nodes.
            self.repeated_keys = tuple(_repeated_keys(self._root, frozenset(), set()))
            self.value: Any = None if self._root is None else loader.construct_document(self._root)
        except ReaderError as error:
            before = text[: error.position]
            position = Position(before.count("\n") + 1, error.position - before.rfind("\n"))
            raise Unreadable(position, f"invalid YAML: {error.reason}") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            position = _position(mark) if mark else Position()
            raise Unreadable(position, f"invalid YAML: {error.problem}") from None
        except ValueError as error:
            raise Unreadable(Position(), f"a value cannot be read: {error}") from None
        except RecursionError:
            raise Unreadable(Position(), "nested too deeply") from None

    def position(self, place: Place) -> Position:
        """Return the position of a value, or of its nearest existing ancestor. The position of a
        member is that of its key."""
        if self._root is None:
            return Position()
        node, position = self._root, _position(self._root.start_mark)
        for part in place:
            child = _child(node, part)
            if child is None:
                break
            node, position = child
        return position


def _repeated_keys(node: yaml.Node | None, above: frozenset[int], seen: set[int]) -> Iterator[Flaw]:
    """Yield repeated keys. Visit every node once, even if several aliases refer to it."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return
    if id(node) in above:
        raise Unreadable(_position(node.start_mark), "this value contains itself")
    if id(node) in seen:
        return
    seen.add(id(node))
    above |= {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item, above, seen)
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
            name = (key.tag, key.value)
            if name in lines:
                message = f"{key.value!r} is already set on line {lines[name]}"
                yield Flaw(_position(key.start_mark), message)
            lines.setdefault(name, key.start_mark.line + 1)
        yield from _repeated_keys(value, above, seen)


def _child(node: yaml.Node, part: str | int) -> tuple[yaml.Node, Position] | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        item = node.value[part]
        return item, _position(item.start_mark)
    if isinstance(node, yaml.MappingNode):
        # Merged keys come first and are overridden by those written here.
        for key, value in reversed(node.value):
            if isinstance(key, yaml.ScalarNode) and key.value == part:
                return value, _position(key.start_mark)
    return None


def _position(mark: yaml.Mark) -> Position:
    return Position(mark.line + 1, mark.column + 1)
