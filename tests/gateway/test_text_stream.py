"""Text streams: every character, call and thought is sent once, whatever is repeated or missed."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.http.text_stream import TextDelta, TextStream
from gateway.api.openai.chat import ChunkWriter, TextWriter
from gateway.api.openai.completions import CompletionWriter
from gateway.errors import RequestFailed
from workers.contract.jobs import Choice, RequestId, SentEvent, Started, Tokens, ToolCall

ID = RequestId(f"req_{1:032x}")


def test_reasoning_is_sent_once_beside_the_text() -> None:
    stream = TextStream(ID)
    events = [Started("w", 1), Tokens(0, "", 1, reasoning="Hm, "), Tokens(0, "6", 1, reasoning="x")]
    pieces = [stream.receive(SentEvent(ID, 1, seq, event)) for seq, event in enumerate(events, 1)]
    rest = list(stream.rest([Choice(0, "66", "stop", reasoning="Hm, x")]))

    sent = [piece for piece in (*pieces, *rest) if piece is not None]
    assert [(piece.text, piece.reasoning) for piece in sent] == [
        ("", "Hm, "),
        ("6", "x"),
        ("6", ""),
    ]


def test_missed_reasoning_is_sent_at_the_end() -> None:
    stream = TextStream(ID)

    (piece,) = stream.rest([Choice(0, "6", "stop", reasoning="Hm")])

    assert (piece.text, piece.reasoning, piece.is_first) == ("6", "Hm", True)


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("kind", [ChunkWriter, CompletionWriter])
@given(texts=st.lists(st.text(), min_size=2, max_size=2))
def test_events_of_text_are_those_of_the_encoder(
    kind: type[ChunkWriter], include_usage: bool, texts: list[str]
) -> None:
    ticket: Any = SimpleNamespace(request_id=ID, accepted_at=datetime.now(UTC), model='a "model"')
    writer: TextWriter = kind(ticket, include_usage=include_usage)
    for index, text in enumerate(texts * 2):
        assert writer._text_event(index % 2, text) == writer._write_text(index % 2, text)


CALLS = (ToolCall("1", "f", "{}"), ToolCall("2", "g", "{}"))


@given(data=st.data(), text=st.text(max_size=30), reasoning=st.text(max_size=10))
def test_attempts_that_repeat_and_miss_events_send_everything_once(
    data: st.DataObject, text: str, reasoning: str
) -> None:
    stream = TextStream(ID)
    sent: list[TextDelta | None] = []
    for attempt in (1, 2, 3):
        events = data.draw(_events(text, reasoning))
        missed = data.draw(st.sets(st.integers(1, len(events)), max_size=1))
        ends = data.draw(st.integers(0, len(events)))
        sent += [
            stream.receive(SentEvent(ID, attempt, seq, event))
            for seq, event in enumerate(events[:ends], 1)
            if seq not in missed
        ]

    sent += stream.rest([Choice(0, text, "stop", tool_calls=CALLS, reasoning=reasoning)])

    deltas = [delta for delta in sent if delta is not None]
    assert "".join(delta.text for delta in deltas) == text
    assert "".join(delta.reasoning for delta in deltas) == reasoning
    assert tuple(call for delta in deltas for call in delta.calls) == CALLS
    assert [delta.is_first for delta in deltas] == [True] + [False] * (len(deltas) - 1)


@st.composite
def _events(draw: st.DrawFn, text: str, reasoning: str) -> list[Tokens]:
    """One way to produce a text, some reasoning and both calls."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    half = draw(st.integers(0, len(reasoning)))
    thoughts = [reasoning[:half], reasoning[half:]]
    events = [Tokens(0, "", 1, reasoning=thought) for thought in thoughts]
    events += [Tokens(0, piece, 1) for piece in pieces]
    return [*events, *(Tokens(0, "", 1, tool_calls=(call,)) for call in CALLS)]


def test_an_attempt_with_a_different_text_ends_the_stream() -> None:
    stream = TextStream(ID)
    stream.receive(SentEvent(ID, 1, 1, Tokens(0, "one two", 2)))
    stream.receive(SentEvent(ID, 2, 1, Tokens(0, "one ", 1)))

    with pytest.raises(RequestFailed, match="produced a different text"):
        stream.receive(SentEvent(ID, 2, 2, Tokens(0, "three", 1)))
