"""The lines of a batch's file do not depend on the chunks in which it is read."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batches.lines import CHUNK_BYTES, BatchLine, pages

texts = st.lists(st.binary(max_size=12).filter(lambda text: b"\n" not in text), max_size=20)


class Pieces(io.BytesIO):
    """A file that gives a few bytes at a time."""

    def __init__(self, content: bytes, size: int) -> None:
        super().__init__(content)
        self._size = size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(self._size)


def lines_of(content: bytes, *, size: int = CHUNK_BYTES, bytes_max: int = 100) -> list[BatchLine]:
    return [line for page in pages(Pieces(content, size), bytes_max) for line in page]


@settings(deadline=None)
@given(texts, st.integers(1, 30), st.booleans())
def test_lines_do_not_depend_on_chunk_sizes(content: list[bytes], size: int, ends: bool) -> None:
    whole = b"\n".join(content) + (b"\n" if ends else b"")

    found = lines_of(whole, size=size)

    assert found == [
        BatchLine(number, text) for number, text in enumerate(content, start=1) if text.strip()
    ]


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(11, 200), st.booleans())
def test_too_long_line_is_reported_and_the_others_are_read(
    size: int, length: int, ends: bool
) -> None:
    content = b"first\n" + b"x" * length + (b"\nlast\n" if ends else b"")

    found = lines_of(content, size=size, bytes_max=10)

    assert found[:2] == [BatchLine(1, b"first"), BatchLine(2, None)]
    assert found[2:] == ([BatchLine(3, b"last")] if ends else [])
