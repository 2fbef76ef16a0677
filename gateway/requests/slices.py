"""Slices: a stream that named no length is held for piece by piece while it runs.

Holding for the longest possible answer would lock an account's credit away for answers that are
short. So a first slice is held, and each further one before the last is used up. Where no more can
be held the stream is cut, and what was delivered is charged.
"""

from __future__ import annotations

import math
from collections import defaultdict

import msgspec

from gateway.ledger.extend import Extension
from gateway.pricing import Price, quote
from workers.contract.jobs import RequestId, SentEvent, Tokens, Usage


class Slices:
    """Counts what a stream has produced, and says when more must be held for it."""

    def __init__(self, price: Price, limits: Usage, slice_tokens: int) -> None:
        """``limits`` are the request's own; ``slice_tokens`` is for all its choices together."""
        self._price = price
        self._limits = limits
        self._slice = slice_tokens
        self._attempt = 0
        self._produced: defaultdict[int, int] = defaultdict(int)
        self.covered = min(slice_tokens, limits.output_tokens)
        """Output tokens that the hold covers."""

    @property
    def hold_nanos(self) -> int:
        """What is to be held for the tokens covered so far."""
        limits = msgspec.structs.replace(self._limits, output_tokens=self.covered)
        return quote(self._price, limits).total_nanos

    def count(self, sent: SentEvent) -> None:
        """Take note of what a worker says; a new attempt begins from nothing."""
        if sent.attempt != self._attempt:
            self._attempt = sent.attempt
            self._produced.clear()
        if isinstance(sent.event, Tokens):
            self._produced[sent.event.index] += sent.event.count

    def next(self, request_id: RequestId) -> Extension | None:
        """Say what must be held next, once half of the last slice is used up."""
        produced = sum(self._produced.values())
        if self.covered >= self._limits.output_tokens or self.covered - produced > self._slice / 2:
            return None
        # A worker may be ahead of what has been heard of it by more than one slice.
        slices = 1 + math.ceil(max(produced - self.covered, 0) / self._slice)
        self.covered = min(self.covered + slices * self._slice, self._limits.output_tokens)
        return Extension(request_id, self.hold_nanos, self.covered)
