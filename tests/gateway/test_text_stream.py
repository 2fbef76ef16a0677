"""Text streams: every character, call and thought is sent once, whatever is repeated or missed."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.http.text_stream import TextDelta, TextStream
from gateway.api.openai.chat import ChunkWriter, TextWriter, completion_view
from gateway.api.openai.completions import CompletionWriter
from gateway.api.openai.responses_views import EventWriter, response_view
from gateway.errors import RequestFailed
from gateway.ledger.closed import ClosedRequest, Output
from gateway.tasks.submission import OpenRequest
from workers.contract.jobs import (
    Choice,
    RequestId,
    SentEvent,
    Started,
    Timings,
    Tokens,
    ToolCall,
    Usage,
)

ID = RequestId(f"req_{1:032x}")
NOW = datetime.now(UTC)


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
            _received(stream, SentEvent(ID, attempt, seq, event), event)
            for seq, event in enumerate(events[:ends], 1)
            if seq not in missed
        ]

    sent += stream.rest([Choice(0, text, "stop", tool_calls=CALLS, reasoning=reasoning)])

    deltas = [delta for delta in sent if delta is not None]
    assert "".join(delta.text for delta in deltas) == text
    assert "".join(delta.reasoning for delta in deltas) == reasoning
    assert tuple(call for delta in deltas for call in delta.calls) == CALLS
    assert [delta.is_first for delta in deltas] == [True] + [False] * (len(deltas) - 1)


def _received(stream: TextStream, sent: SentEvent, event: Tokens) -> TextDelta | None:
    """Receive an event as writers do."""
    if stream.appends(sent, event):
        return TextDelta(event.index, event.text)
    return stream.receive(sent)


def test_ordinary_event_is_sent_without_a_delta_and_counted_once() -> None:
    stream = TextStream(ID)
    first, second = Tokens(0, "one ", 1), Tokens(0, "two", 1)

    assert not stream.appends(SentEvent(ID, 1, 1, first), first)
    stream.receive(SentEvent(ID, 1, 1, first))
    assert stream.appends(SentEvent(ID, 1, 2, second), second)
    assert not stream.appends(SentEvent(ID, 1, 2, second), second)

    # The next attempt repeats the text, so it is compared.
    again = SentEvent(ID, 2, 1, first)
    assert not stream.appends(again, first)
    assert stream.receive(again) is None
    assert [delta.text for delta in stream.rest([Choice(0, "one two!", "stop")])] == ["!"]


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


def _closed(choice: Choice) -> ClosedRequest:
    return ClosedRequest(
        request_id=ID,
        account_id=1,
        model="m",
        task="text-generation",
        status="succeeded",
        outcome="charged",
        reason="completed",
        cost_nanos=1,
        hold_nanos=1,
        price_id=1,
        usage=Usage(requests=1, output_tokens=5),
        timings=Timings(),
        accepted_at=NOW,
        settled_at=NOW,
        output=Output({"choices": [msgspec.to_builtins(choice)]}),
    )


def test_chat_and_response_count_the_tokens_of_thoughts() -> None:
    closed = _closed(Choice(0, "6", "stop", reasoning="Hm", reasoning_tokens=4))

    chat = completion_view(closed)
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert chat["choices"][0]["message"]["reasoning_content"] == "Hm"
    response = response_view(closed, None)
    assert response["usage"] is not None
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    plain = completion_view(_closed(Choice(0, "6", "stop")))
    assert "completion_tokens_details" not in plain["usage"]


@pytest.mark.parametrize("missed", [False, True], ids=["streamed", "missed"])
def test_thoughts_are_an_item_of_their_own_in_a_response(missed: bool) -> None:
    opened = OpenRequest(ID, 1, "m", "text-generation", "running", 1, NOW, NOW)
    closed = _closed(Choice(0, "six", "stop", reasoning="Hm, x", reasoning_tokens=4))
    sent = [
        Tokens(0, "", 1, reasoning="Hm, "),
        Tokens(0, "", 1, reasoning="x"),
        Tokens(0, "six", 1),
    ]
    writer = EventWriter(opened, None)

    data = b""
    for number, event in enumerate([] if missed else [Started("w", 1), *sent]):
        data += writer.write(SentEvent(ID, 1, number, event))
    data += writer.finish(closed)

    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: ")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message"]
    assert done == events[-1]["response"]["output"]
    assert [event["output_index"] for event in events[:-1]] == sorted(
        event["output_index"] for event in events[:-1]
    )
    deltas = [event for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "Hm, x"
    assert {event["item_id"] for event in deltas} == {done[0]["id"]}


def test_answer_that_never_left_its_thoughts_has_no_empty_message() -> None:
    closed = _closed(Choice(0, "", "length", reasoning="Hm", reasoning_tokens=5))
    opened = OpenRequest(ID, 1, "m", "text-generation", "running", 1, NOW, NOW)

    data = EventWriter(opened, None).finish(closed)

    assert [item["type"] for item in response_view(closed, None)["output"]] == ["reasoning"]
    assert b'"type":"message"' not in data
