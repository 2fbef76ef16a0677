"""The text of a stream, with the reasoning that an upstream keeps apart."""

from __future__ import annotations

from gateway.api.http.text_stream import TextStream
from workers.contract.jobs import Choice, RequestId, SentEvent, Started, Tokens

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


def test_reasoning_that_was_missed_comes_with_the_end() -> None:
    stream = TextStream(ID)

    (piece,) = stream.rest([Choice(0, "6", "stop", reasoning="Hm")])

    assert (piece.text, piece.reasoning, piece.is_first) == ("6", "Hm", True)
