"""What can be sent on now of a text that is being written: nothing twice, nothing left out.

After a crash the next attempt says the same again, because every job carries its seed: what was
already sent is passed over. Whatever events were missed is made up from the final output. Knows no
dialect; each of them writes the pieces in its own shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

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


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text and new calls of one choice."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    calls: tuple[ToolCall, ...] = ()
    first_call: int = 0
    """The number of the first of these calls among all of the choice."""
    is_first: bool = False
    """Whether nothing was sent of this choice before."""
    reasoning: str = ""
    """New text of the reasoning that an upstream keeps apart from the answer."""


class TextStream:
    """Turns events into pieces, for one reader of one request."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._attempt = 0
        self._next_seq = 1
        self._complete = True
        self._received: dict[int, tuple[str, tuple[ToolCall, ...]]] = {}
        self._sent: dict[int, tuple[str, int]] = {}
        self._reasoning: dict[int, str] = {}
        self._reasoning_sent: dict[int, int] = {}

    def receive(self, sent: SentEvent) -> TextDelta | None:
        """Give what an event brings that was not sent yet."""
        if sent.attempt < self._attempt:
            return None
        if sent.attempt > self._attempt:
            self._attempt, self._next_seq, self._complete = sent.attempt, 1, True
            self._received.clear()
            self._reasoning.clear()
        if sent.seq != self._next_seq:
            self._complete = False
        self._next_seq = sent.seq + 1
        event = sent.event
        if not self._complete or not isinstance(event, Tokens):
            return None
        text, calls = self._received.get(event.index, ("", ()))
        text, calls = text + event.text, (*calls, *event.tool_calls)
        self._received[event.index] = text, calls
        reasoning = ""
        if event.reasoning:
            reasoning = self._reasoning.get(event.index, "") + event.reasoning
            self._reasoning[event.index] = reasoning
        return self._advance(event.index, text, calls, event.logprobs, reasoning)

    def rest(self, choices: Sequence[Choice]) -> Iterator[TextDelta]:
        """Give what was not sent yet of the final output."""
        for choice in choices:
            delta = self._advance(
                choice.index, choice.text, choice.tool_calls, None, choice.reasoning
            )
            if delta is not None:
                yield delta

    def _advance(
        self,
        index: int,
        text: str,
        calls: tuple[ToolCall, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        reasoning: str,
    ) -> TextDelta | None:
        is_first = index not in self._sent
        sent, called = self._sent.get(index, ("", 0))
        if not text.startswith(sent) and not sent.startswith(text):
            raise RequestFailed(
                "stream_diverged",
                "The worker was lost and its successor gave another text; fetch the whole "
                "answer by the request's id.",
                request_id=self._request_id,
            )
        new_text, new_calls = text[len(sent) :], calls[called:]
        # An upstream that is asked again thinks anew: what was sent of it is passed over by length.
        reasoning = reasoning[self._reasoning_sent.get(index, 0) :]
        if not is_first and not new_text and not new_calls and not reasoning:
            return None
        self._sent[index] = sent + new_text, called + len(new_calls)
        if reasoning:
            self._reasoning_sent[index] = self._reasoning_sent.get(index, 0) + len(reasoning)
        return TextDelta(
            index, new_text, logprobs if new_text else None, new_calls, called, is_first, reasoning
        )


def cut_reason(closed: ClosedRequest) -> str | None:
    """The finish reason of a text that ended early but properly; None of any other.

    A deadline ends a text as a limit on its length does, so every client knows what to make of it;
    the receipt gives ``deadline`` as the reason.
    """
    if closed.reason in CUT_REASONS:
        return closed.reason
    delivered = closed.status == "expired" and closed.output is not None
    return "length" if delivered else None


def choices_of(closed: ClosedRequest) -> Sequence[Choice]:
    """The answers of a request, unless they have been kept for their time and dropped."""
    if closed.output is None:
        return ()
    return msgspec.convert(closed.output.value.get("choices", ()), tuple[Choice, ...])


def logprob_view(token: TokenLogprob) -> LogprobView:
    """OpenAI's shape of one token's log-probability."""
    return {
        **_token(token.text, token.logprob),
        "top_logprobs": [_token(text, logprob) for text, logprob in token.top],
    }


def _token(text: str, logprob: float) -> TokenView:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
