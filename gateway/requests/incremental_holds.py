"""Incremental holds: the hold of a stream without a token limit is extended slice by slice.

Holding for the longest possible answer would lock up an account's credit for answers that are
short. So one slice is held at first, and the next before it is used up. If no more can be held, the
stream is cut and what was delivered is charged.
"""

from __future__ import annotations

import math
from collections import defaultdict

import msgspec

from gateway import metrics
from gateway.ledger.extend import Ended, Extended, Extension, cut_reason, mark_cut
from gateway.ledger.writer import LedgerWriter
from gateway.pricing import Price, UnpricedUsage, charge_nanos, clip, quote
from gateway.requests.cancellation import Cancellation
from gateway.sql.database import Database
from workers.contract.jobs import RequestId, SentEvent, Tokens, Usage


class IncrementalHold:
    """Counts the tokens of a stream and decides when its hold must be extended."""

    def __init__(self, price: Price, limits: Usage, slice_tokens: int) -> None:
        """``limits`` are the request's; ``slice_tokens`` covers all its choices together."""
        self._price = price
        self._limits = limits
        self._slice = slice_tokens
        self._attempt = 0
        self._produced: defaultdict[int, int] = defaultdict(int)
        self._patience = slice_tokens // 2
        self.covered = min(slice_tokens, limits.output_tokens)
        """Output tokens that the hold covers."""
        self.shortage: str | None = None
        """Reason for which the last extension was refused."""

    @property
    def hold_nanos(self) -> int:
        """The amount of the first hold."""
        return self._quote(self.covered)

    @property
    def used_up(self) -> bool:
        """Whether an extension was refused and all tokens that are held for have been produced."""
        return self.shortage is not None and sum(self._produced.values()) >= self.covered

    @property
    def is_due(self) -> bool:
        """Whether an extension is due: once half of the last slice is used up or, after a refusal,
        half of what was left."""
        left = self.covered - sum(self._produced.values())
        return self.covered < self._limits.output_tokens and left <= self._patience

    def count(self, sent: SentEvent) -> None:
        """Count the tokens of an event. A new attempt starts from zero."""
        if sent.attempt != self._attempt:
            self._attempt = sent.attempt
            self._produced.clear()
        if isinstance(sent.event, Tokens):
            self._produced[sent.event.index] += sent.event.count

    def next(self, request_id: RequestId) -> Extension | None:
        """Return the extension that is due, if any."""
        if not self.is_due:
            return None
        produced = sum(self._produced.values())
        # The worker may be more than one slice ahead of the events received so far.
        slices = 1 + math.ceil(max(produced - self.covered, 0) / self._slice)
        covered = min(self.covered + slices * self._slice, self._limits.output_tokens)
        return Extension(request_id, self._quote(covered), covered)

    def extended(self, extension: Extension) -> None:
        self.covered = extension.held_tokens
        self._patience = self._slice // 2
        self.shortage = None

    def refused(self, shortage: str) -> None:
        self._patience //= 2
        self.shortage = shortage

    def _quote(self, tokens: int) -> int:
        limits = msgspec.structs.replace(self._limits, output_tokens=tokens)
        return quote(self._price, limits).total_nanos


class CostSoFar:
    """Counts the tokens of a stream and prices them: what it costs if it ends now. Never falls, and
    is never more than the quote of its limits."""

    def __init__(self, price: Price, limits: Usage) -> None:
        self._price = price
        self._limits = limits
        self._attempt = 0
        self._read = Usage()
        self._produced = 0
        self.nanos = 0

    @property
    def tokens(self) -> int:
        """Output tokens of this attempt."""
        return self._produced

    @property
    def most_nanos(self) -> int:
        """The most that the stream can cost."""
        return quote(self._price, self._limits).total_nanos

    def count(self, sent: SentEvent) -> None:
        """Count the tokens of an event. A new attempt starts from zero and repeats the earlier
        one."""
        if sent.attempt != self._attempt:
            self._attempt, self._produced = sent.attempt, 0
        event = sent.event
        if not isinstance(event, Tokens):
            return
        self._produced += event.count
        if event.usage is not None:
            self._read = event.usage
        self.nanos = max(self.nanos, so_far(self._price, self._limits, self._read, self._produced))


def so_far(price: Price, limits: Usage, read: Usage, tokens: int) -> int:
    """Return the charge of a stream that ends now: ``read`` is the usage that it reported first,
    and ``tokens`` its output since then and before."""
    usage = msgspec.structs.replace(
        read, requests=1, output_tokens=max(tokens, read.output_tokens), steps=0, gpu_us=0
    )
    try:
        return charge_nanos(price, clip(usage, limits)[0])
    except UnpricedUsage:
        return 0


class HoldExtender:
    """Extends the holds of streams, and cuts those that cannot be extended."""

    def __init__(
        self, ledger: LedgerWriter, database: Database, cancellation: Cancellation
    ) -> None:
        self._ledger = ledger
        self._database = database
        self._cancellation = cancellation

    async def extend(self, hold: IncrementalHold, extension: Extension) -> None:
        """Extend a hold, or record in it why that is refused."""
        answer = await self._ledger.extend(extension)
        if isinstance(answer, Extended):
            hold.extended(extension)
        elif not isinstance(answer, Ended):
            hold.refused(cut_reason(answer))

    async def cut(self, model: str, request_id: RequestId, why: str) -> None:
        """Stop a stream whose hold cannot be extended."""
        await self._database.write(lambda connection: mark_cut(connection, request_id, why))
        metrics.CUT.labels(model, why).inc()
        await self._cancellation.cancel(model, request_id)
