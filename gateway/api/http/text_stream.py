"""Turns token events into text deltas: nothing is sent twice, nothing is left out.

After a crash the next attempt repeats the same text, because every job carries its seed: text that
was already sent is skipped. Missed events are made up for from the final output. Knows no dialect;
each of them writes the deltas in its own shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypedDict

import msgspec

from gateway.errors import RequestFailed
from gateway.ledger.closed import ClosedRequest
from gateway.ledger.extend import CUT_REASONS
from workers.contract.jobs import Choice, SentEvent, TokenLogprob, Tokens, ToolCall


class TokenView(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class LogprobView(TokenView):
    top_logprobs: list[TokenView]


class TextDelta(msgspec.Struct, frozen=True):
    """New text and new tool calls of one choice."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    calls: tuple[ToolCall, ...] = ()
    first_call: int = 0
    """Index of the first of ``calls`` among all calls of the choice."""
    is_first: bool = False
    """Whether this is the choice's first delta."""
    reasoning: str = ""
    """New reasoning text, which upstreams report separately from the answer."""


@dataclass(slots=True)
class _Amount:
    """How much of a choice there was: characters, calls, characters of reasoning."""

    text: int = 0
    calls: int = 0
    reasoning: int = 0


@dataclass(slots=True)
class _Sent(_Amount):
    """What was sent of a choice, of which the text must not change afterwards."""

    pieces: list[str] = field(default_factory=list)

    def after(self, place: int) -> str:
        """Return the text that was sent after a place in it."""
        if place == self.text:
            return ""
        self.pieces = ["".join(self.pieces)]
        return self.pieces[0][place:]


class TextStream:
    """Turns events into deltas, for one client of one request."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._attempt = 0
        self._next_seq = 1
        self._complete = True
        self._received: defaultdict[int, _Amount] = defaultdict(_Amount)
        """What this attempt has produced; never more than was sent."""
        self._sent: dict[int, _Sent] = {}

    def appends(self, sent: SentEvent, event: Tokens) -> bool:
        """Whether an event adds its text and nothing else, to a choice of which something was sent.

        It then counts as sent. Any other event is for ``receive``.
        """
        before = self._sent.get(event.index)
        if (
            before is None
            or sent.seq != self._next_seq
            or sent.attempt != self._attempt
            or not self._complete
            or not event.text
            or event.logprobs is not None
            or event.tool_calls
            or event.reasoning
        ):
            return False
        received = self._received[event.index]
        if received.text != before.text:  # it repeats what an earlier attempt has sent
            return False
        self._next_seq += 1
        before.pieces.append(event.text)
        before.text = received.text = received.text + len(event.text)
        return True

    def receive(self, sent: SentEvent) -> TextDelta | None:
        """Return what an event adds to the text sent so far, or None.

        Raise ``RequestFailed``, then and each time that it is called again with the same event, if
        the event contradicts what was sent.
        """
        if sent.attempt < self._attempt:
            return None
        if sent.attempt > self._attempt:
            self._attempt, self._next_seq, self._complete = sent.attempt, 1, True
            self._received.clear()
        if sent.seq != self._next_seq:
            self._complete = False
        event = sent.event
        if not self._complete or not isinstance(event, Tokens):
            self._next_seq = sent.seq + 1
            return None
        received = self._received[event.index]
        delta = self._advance(
            event.index, received, event.text, event.tool_calls, event.logprobs, event.reasoning
        )
        self._next_seq = sent.seq + 1
        received.text += len(event.text)
        received.calls += len(event.tool_calls)
        received.reasoning += len(event.reasoning)
        return delta

    def rest(self, choices: Sequence[Choice]) -> Iterator[TextDelta]:
        """Yield the parts of the final output that were not sent yet."""
        for choice in choices:
            delta = self._advance(
                choice.index, _NOTHING, choice.text, choice.tool_calls, None, choice.reasoning
            )
            if delta is not None:
                yield delta

    def _advance(
        self,
        index: int,
        before: _Amount,
        text: str,
        calls: tuple[ToolCall, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        reasoning: str,
    ) -> TextDelta | None:
        """Return what is new in a part of a choice that begins after ``before``."""
        sent = self._sent.get(index)
        is_first = sent is None
        if sent is None:
            sent = self._sent[index] = _Sent()
        repeated = sent.after(before.text)
        if not text.startswith(repeated) and not repeated.startswith(text):
            raise RequestFailed(
                "stream_diverged",
                "The worker failed and its successor produced a different text; fetch the "
                "complete answer by the request's id.",
                request_id=self._request_id,
            )
        new_text = text[len(repeated) :]
        new_calls, first_call = calls[sent.calls - before.calls :], sent.calls
        # An upstream that is called again produces different reasoning: skip as many characters as
        # were sent.
        new_reasoning = reasoning[sent.reasoning - before.reasoning :]
        if not is_first and not new_text and not new_calls and not new_reasoning:
            return None
        sent.pieces.append(new_text)
        sent.text += len(new_text)
        sent.calls += len(new_calls)
        sent.reasoning += len(new_reasoning)
        return TextDelta(
            index,
            new_text,
            logprobs if new_text else None,
            new_calls,
            first_call,
            is_first,
            new_reasoning,
        )


_NOTHING: Final = _Amount()


def cut_reason(closed: ClosedRequest) -> str | None:
    """Return the finish reason of a text that was cut off but is delivered; None for any other.

    A deadline is reported as ``length``, which every client knows; the receipt has the reason
    ``deadline``.
    """
    if closed.reason in CUT_REASONS:
        return closed.reason
    delivered = closed.status == "expired" and closed.output is not None
    return "length" if delivered else None


def choices_of(closed: ClosedRequest) -> Sequence[Choice]:
    """Return the choices of a request, or none if its output has expired."""
    if closed.output is None:
        return ()
    return msgspec.convert(closed.output.value.get("choices", ()), tuple[Choice, ...])


def reasoning_tokens(choices: Sequence[Choice]) -> int:
    """Return how many output tokens were thoughts, as far as that was counted."""
    return sum(choice.reasoning_tokens for choice in choices)


def logprob_view(token: TokenLogprob) -> LogprobView:
    """Return a token's log probability in OpenAI's shape."""
    return {
        **_token(token.text, token.logprob),
        "top_logprobs": [_token(text, logprob) for text, logprob in token.top],
    }


def _token(text: str, logprob: float) -> TokenView:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
