"""Text grows by whole characters, and a stop string is never emitted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.llm.text import TextStream, ThoughtReader


def _bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=60))
def test_emitted_parts_add_up_to_the_text(text: str) -> None:
    stream = TextStream(_bytes, ())

    pieces = [stream.push(byte) for byte in text.encode()]
    pieces.append(stream.flush())

    assert "".join(pieces) == text


def test_each_token_is_decoded_about_once() -> None:
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return _bytes(ids)

    stream = TextStream(decode, ())
    text = "a" * 400

    assert "".join(map(stream.push, text.encode())) == text
    assert len(decoded) < 1.2 * len(text)
    assert max(decoded) <= 10


@given(st.lists(st.sampled_from(["▁a", "▁b", "c", "▁", "d"]), max_size=40))
def test_spaces_between_words_survive_a_decoder_that_strips_the_first(words: list[str]) -> None:
    def decode(ids: Sequence[int]) -> str:
        joined = "".join(words[one] for one in ids).replace("▁", " ")
        return joined.removeprefix(" ")

    stream = TextStream(decode, ())
    pieces = [stream.push(number) for number in range(len(words))]

    assert "".join([*pieces, stream.flush()]) == decode(range(len(words)))


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


MARKS = ("<think>", "</think>")


def _read(text: str, cuts: Sequence[int], *, inside: bool = False) -> tuple[str, str]:
    """Push a text in pieces; return all thoughts and the answer."""
    reader = ThoughtReader(MARKS, inside=inside)
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[start:stop] for start, stop in itertools.pairwise(places)]
    read = [*(reader.push(piece) for piece in pieces), reader.flush()]
    return "".join(one[0] for one in read), "".join(one[1] for one in read)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nHm.\n\nYes.\n</think>\n\nSix.\n", False, ("Hm.\n\nYes.", "Six.\n")),
        ("\nHm.\n</think>\n\nSix.", True, ("Hm.", "Six.")),
        ("\n <think>a < b</think>c", False, ("a < b", "c")),
        ("<think>\n\n</think>\n\nSix.", False, ("", "Six.")),
        ("\n\nSix <think>x</think>", False, ("", "\n\nSix <think>x</think>")),
        ("<thin ice", False, ("", "<thin ice")),
        ("  ", False, ("", "  ")),
        ("<think>Never done</thi", False, ("Never done</thi", "")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
    ],
)
def test_thoughts_are_separated_however_the_text_arrives(
    text: str, inside: bool, expected: tuple[str, str]
) -> None:
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
        assert _read(text, cuts, inside=inside) == expected
