"""Text grows by whole characters, and a stop string is never emitted."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from workers.engines.llm.text import TextStream


def _bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=60))
def test_emitted_parts_add_up_to_the_text(text: str) -> None:
    stream = TextStream(_bytes, ())

    pieces = [stream.push(byte) for byte in text.encode()]
    pieces.append(stream.flush())

    assert "".join(pieces) == text


def test_incomplete_character_is_never_emitted() -> None:
    stream = TextStream(_bytes, ())

    assert [stream.push(byte) for byte in "ä☂".encode()] == ["", "ä", "", "", "☂"]


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_from_a_stop_string_on_is_never_emitted(text: str, stops: list[str]) -> None:
    stream = TextStream(_bytes, stops)

    shown = ""
    for byte in text.encode():
        shown += stream.push(byte)
        if stream.stopped:
            break
    shown += stream.flush()

    ends = [
        text[:end] for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stops)
    ]
    if not ends:
        assert shown == text
        return
    first = ends[0]
    cuts = {first[: first.index(stop)] for stop in stops if stop in first}
    assert stream.stopped
    assert shown == min(cuts, key=len)
