"""Books older days: requests that were accepted, ended and charged before the installation existed.

By the ledger's own holds, settlements and refunds at times in the past, so that the books prove
them like all others. Allowed only while no hour is sealed, because a sealed hour never changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from msgspec.structs import asdict, replace
from sqlalchemy import Connection

from gateway.catalog.schema import CatalogEntry
from gateway.demo.people import DEMO, Opened
from gateway.demo.script import DemoKind, Script
from gateway.ids import first_id
from gateway.ledger.closed import RequestError, Status
from gateway.ledger.expenses import ExpenseRates, RunRecord
from gateway.ledger.holds import Held, HoldRequest, hold
from gateway.ledger.periods import booking_time
from gateway.ledger.prices import PriceCache, in_force, read_price, set_price
from gateway.ledger.refunds import refund
from gateway.ledger.settle import Settlement, settle
from gateway.operations import prices
from gateway.pricing import charge, quote
from workers.contract.jobs import Job, RequestId, Timings, Usage, encode

REFUNDED: Final = 1 / 120
"""Share of requests that are refunded."""
NIGHT: Final = range(6)
"""Hours with less traffic, in UTC; weekends have less, too."""
QUIET: Final = 0.6
_ENDS: Final[Sequence[tuple[float, Status, str, RequestError | None]]] = (
    (0.945, "succeeded", "completed", None),
    (0.96, "failed", "worker_lost", RequestError("worker_lost", "Three workers were lost.")),
    (0.975, "failed", "out_of_memory", RequestError("engine_error", "The device was full.")),
    (0.99, "cancelled", "client", None),
    (1.0, "expired", "deadline", RequestError("deadline_exceeded", "It waited too long.")),
)


@dataclass(frozen=True)
class Past:
    """A request of an older day."""

    at: datetime
    account: Opened
    entry: CatalogEntry


class History:
    def __init__(
        self,
        connection: Connection,
        script: Script,
        entries: Mapping[str, CatalogEntry],
        *,
        rates: ExpenseRates,
        seed: int = 7,
    ) -> None:
        self._connection = connection
        self._script = script
        self._entries = {name: entries[name] for name in script.kinds if name in entries}
        self._random = random.Random(seed)
        self._rates = rates
        self._prices: PriceCache = {}

    def begin(self, starts_at: datetime, now: datetime) -> None:
        """Put the prices of the catalog in force from the first of the older days."""
        for entry in self._entries.values():
            self._put(entry, None, starts_at, "first price list")
        for earlier in self._script.earlier_prices:
            until = now - timedelta(days=earlier["until_days_ago"])
            sold = self._entries.get(earlier["model"])
            if sold is not None and until > starts_at + timedelta(days=1):
                self._put(sold, earlier["price"], starts_at + timedelta(days=1), earlier["reason"])
                self._put(sold, None, until, "end of the introductory price")

    def book(self, opened: Sequence[Opened], starts_at: datetime, ends_at: datetime) -> int:
        """Book the requests of a span, oldest first; return their number."""
        traffic = sorted(self._traffic(opened, starts_at, ends_at), key=lambda past: past.at)
        return sum(map(self._request, traffic))

    def _put(
        self, entry: CatalogEntry, components: object, starts_at: datetime, reason: str
    ) -> None:
        price = entry.selling_price
        if components is not None:
            price = prices.read(entry, components, None)
        set_price(
            self._connection,
            entry.name,
            price,
            starts_at=starts_at,
            actor=DEMO.name,
            reason=reason,
        )

    def _traffic(
        self, opened: Sequence[Opened], starts_at: datetime, ends_at: datetime
    ) -> Iterator[Past]:
        span = ends_at - starts_at
        for account in opened:
            weights = {
                name: weight for name, weight in account.of.models.items() if name in self._entries
            }
            if not weights:
                continue
            for _ in range(round(account.of.history * (span / timedelta(days=1)))):
                # More at the end than at the beginning.
                at = starts_at + span * self._random.random() ** 0.75
                quiet = at.weekday() >= 5 or at.hour in NIGHT
                if quiet and self._random.random() < QUIET:
                    continue
                (name,) = self._random.choices([*weights], [*weights.values()])
                yield Past(at, account, self._entries[name])

    def _request(self, past: Past) -> bool:
        """Book one request; False if the account's credit does not cover it."""
        entry, kind = past.entry, self._script.kinds[past.entry.name]
        price_id = in_force(self._connection, past.at)[entry.name]
        price = read_price(self._connection, price_id, self._prices)
        stem = first_id("req_", past.at)
        digits = f"{self._random.getrandbits(72):018x}"
        request_id = RequestId(f"{stem}7{digits[:3]}8{digits[3:]}0"[:36])
        job = Job(request_id, str(past.account.id), entry.name, entry.task, {}, kind.limits)
        request = HoldRequest(
            request_id=request_id,
            account_id=past.account.id,
            key_id=self._random.choice(past.account.usable_keys),
            model=entry.name,
            task=entry.task,
            price_id=price_id,
            hold_nanos=quote(price, kind.limits).total_nanos,
            job=encode(job),
            accepted_at=past.at,
            deadline_at=past.at + timedelta(minutes=10),
            metadata={"project": self._random.choice(self._script.tags)},
        )
        (answer,) = hold(self._connection, [request])
        if not isinstance(answer, Held):
            return False
        usage, timings = _scaled(kind, self._random.uniform(0.3, 1.0))
        dice = self._random.random()
        _, status, reason, error = next(each for each in _ENDS if dice <= each[0])
        done = status == "succeeded"
        ended_at = past.at + timedelta(microseconds=timings.total_us)
        settlement = Settlement(
            request_id,
            status,
            reason,
            billable=done,
            usage=usage if done else Usage(),
            timings=timings,
            error=error,
            run=RunRecord(worker="demo", attempt=3 if reason == "worker_lost" else 1, device="CPU"),
        )
        settle(
            self._connection,
            [settlement],
            now=booking_time(self._connection, lambda: ended_at),
            prices=self._prices,
            retention=timedelta(0),
            rates=self._rates,
        )
        if done and charge(price, usage).total_nanos and self._random.random() < REFUNDED:
            self._refund(request_id, ended_at + timedelta(milliseconds=1))
        return True

    def _refund(self, request_id: RequestId, at: datetime) -> None:
        refund(
            self._connection,
            request_id,
            key=f"refund:{request_id}:demo",
            actor=DEMO.name,
            reason="the answer was cut",
            clock=lambda: at,
        )


def _scaled(kind: DemoKind, factor: float) -> tuple[Usage, Timings]:
    """Vary the sizes and times of a kind; counts of requests and pictures stay."""
    usage = kind.usage
    changed = replace(
        usage,
        input_tokens=int(usage.input_tokens * factor),
        output_tokens=int(usage.output_tokens * factor),
        audio_ms=int(usage.audio_ms * factor),
        characters=int(usage.characters * factor),
        gpu_us=int(usage.gpu_us * factor),
    )
    return changed, Timings(**{name: int(us * factor) for name, us in asdict(kind.timings).items()})
