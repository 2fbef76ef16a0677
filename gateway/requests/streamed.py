"""Computes from an event log what was delivered, if no worker can report it.

A job that crashed its workers, or whose worker was lost before the deadline, ends without an
outcome or with one that knows only its own attempt. Its event log is then the record. Events that
did not reach the log, and logs that the queue server lost, are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.ledger.closed import Output
from workers.contract.delivered import NOTHING, Tally, combine_attempts, preview_media
from workers.contract.jobs import BlobRef, Choice, Preview, SentEvent, Tokens, Usage


@dataclass(frozen=True, slots=True)
class Streamed:
    """Usage delivered by all attempts (``NOTHING`` if none), and the content, if the log is
    complete."""

    usage: Usage
    output: Output | None = None


NOT_STREAMED: Final = Streamed(NOTHING)


def read_streamed(events: Iterable[SentEvent]) -> Streamed:
    """Add up the events of a log in order."""
    tallies: defaultdict[int, Tally] = defaultdict(Tally)
    texts: defaultdict[int, _Text] = defaultdict(_Text)
    shown: dict[int, BlobRef] = {}
    for sent in events:
        event = sent.event
        tallies[sent.attempt].record(event)
        texts[sent.attempt].note(sent)
        if isinstance(event, Preview) and event.full:
            shown[event.output] = event.blob
    usage = combine_attempts(tally.usage() for tally in tallies.values())
    if not usage.requests:
        return NOT_STREAMED
    if shown:
        media, blobs = preview_media(shown)
        return Streamed(usage, Output({"media": media}, blobs))
    longest = max(texts.values(), key=lambda text: text.tokens)
    return Streamed(usage, longest.output())


def either(one: Streamed, other: Streamed) -> Streamed:
    """Combine two records of a request, of which ``one`` is more exact. The content is that of the
    larger."""
    if not one.usage.requests or not other.usage.requests:
        return one if one.usage.requests else other
    larger = one if one.usage.output_tokens >= other.usage.output_tokens else other
    output = larger.output or one.output or other.output
    return Streamed(combine_attempts((other.usage, one.usage)), output)


class _Text:
    """Choices of one attempt, unless one of its events is missing."""

    def __init__(self) -> None:
        self.tokens = 0
        self._next = 1
        self._choices: dict[int, Choice] = {}

    def note(self, sent: SentEvent) -> None:
        whole = sent.seq == self._next
        self._next = sent.seq + 1 if whole else 0
        event = sent.event
        if not isinstance(event, Tokens):
            return
        self.tokens += event.count
        known = self._choices.get(event.index) or Choice(event.index, "", "length")
        self._choices[event.index] = msgspec.structs.replace(
            known,
            text=known.text + event.text,
            reasoning=known.reasoning + event.reasoning,
            tool_calls=known.tool_calls + event.tool_calls,
            finish_reason=event.finish_reason or known.finish_reason,
        )

    def output(self) -> Output | None:
        if not self._next or not self._choices:
            return None
        choices = [self._choices[index] for index in sorted(self._choices)]
        return Output({"choices": msgspec.to_builtins(choices)})
