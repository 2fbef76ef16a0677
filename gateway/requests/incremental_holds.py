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


class IncrementalHold:
    """Counts what a stream has produced, and says when more must be held for it."""

    def __init__(self, price: Price, limits: Usage, slice_tokens: int) -> None:
        """``limits`` are the request's own; ``slice_tokens`` is for all its choices together."""
        self._price = price
        self._limits = limits
        self._slice = slice_tokens
        self._attempt = 0
        self._produced: defaultdict[int, int] = defaultdict(int)
        self._patience = slice_tokens // 2
        self.covered = min(slice_tokens, limits.output_tokens)
        """Output tokens that the hold covers."""
        self.shortage: str | None = None
        """Why the last extension was refused."""

    @property
    def hold_nanos(self) -> int:
        """What is to be held at first."""
        return self._quote(self.covered)

    @property
    def used_up(self) -> bool:
        """Whether more was refused, and what is held has been produced."""
        return self.shortage is not None and sum(self._produced.values()) >= self.covered

    def count(self, sent: SentEvent) -> None:
        """Take note of what a worker says; a new attempt begins from nothing."""
        if sent.attempt != self._attempt:
            self._attempt = sent.attempt
            self._produced.clear()
        if isinstance(sent.event, Tokens):
            self._produced[sent.event.index] += sent.event.count

    def next(self, request_id: RequestId) -> Extension | None:
        """Say what should be held next: once half of the last slice is used up, and after each
        refusal once half of what was left then is."""
        produced = sum(self._produced.values())
        if self.covered >= self._limits.output_tokens or self.covered - produced > self._patience:
            return None
        # A worker may be ahead of what has been heard of it by more than one slice.
        slices = 1 + math.ceil(max(produced - self.covered, 0) / self._slice)
        covered = min(self.covered + slices * self._slice, self._limits.output_tokens)
        return Extension(request_id, self._quote(covered), covered)

    def held(self, extension: Extension) -> None:
        """More is held."""
        self.covered = extension.held_tokens
        self._patience = self._slice // 2
        self.shortage = None

    def refused(self, shortage: str) -> None:
        """Nothing more could be held, for now."""
        self._patience //= 2
        self.shortage = shortage

    def _quote(self, tokens: int) -> int:
        limits = msgspec.structs.replace(self._limits, output_tokens=tokens)
        return quote(self._price, limits).total_nanos
