"""Topics of the overview: its figures each second, and the curves of the last hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from sqlalchemy import Connection

from gateway.accounts.budgets import read_zone
from gateway.api.http.request import Services
from gateway.billing.reconciliation import Reconciliation, last_reconciliation
from gateway.billing.usage.report import Filters, Group, Span, total, usage
from gateway.billing.usage.traffic import OpenHolds, open_holds
from gateway.catalog.availability import availability
from gateway.console.guards import no_page
from gateway.console.live.topics import Latest, LiveSubject, Message, Topic, installation_topic
from gateway.console.views.formats import Clock
from gateway.console.views.money import SumRow, sum_total
from gateway.console.views.overview import Present, hour_curves, overview_texts
from gateway.console.visitors import Visitor

RECENT: Final = timedelta(minutes=5)
SETTLING: Final = timedelta(seconds=30)
"""Age below which receipts of a moment may not be committed yet."""
ADVANCE: Final = timedelta(seconds=60)
RECOUNT: Final = timedelta(minutes=10)


def present(
    services: Services,
    *,
    today: SumRow,
    holds: OpenHolds,
    proof: Reconciliation | None,
) -> Present:
    """Complete what was read from SQL by what the gateway knows, with traffic as last read."""
    now, health = datetime.now(UTC), services.requests.health
    entries = services.live.entries()
    return Present(
        per_second=services.traffic.per_second(now),
        recent=services.traffic.since(now - RECENT),
        today=today,
        holds=holds,
        healthy=health.healthy,
        loads={model: load for model, load in health.loads.items() if load.live},
        workers=health.announcements,
        available=sum(availability(entry, health.announcements) is None for entry in entries),
        offered=len(entries),
        proof=proof,
    )


@dataclass(frozen=True, slots=True)
class _Standing:
    today: SumRow
    holds: OpenHolds
    proof: Reconciliation | None


class _Figures:
    """Reads the figures of a zone. What was booked today is not summed anew each second: the sum
    moves along with time, and is counted again every ten minutes."""

    def __init__(self, services: Services, zone: str) -> None:
        self._services = services
        self._zone = zone
        self._base: list[Group] = []
        self._base_at: datetime | None = None
        self._counted_at = datetime.min.replace(tzinfo=UTC)

    async def read(self) -> Message:
        found = await self._services.database.report(self._standing, account_id=None)
        await self._services.traffic.refresh(only_new=True)
        state = present(self._services, today=found.today, holds=found.holds, proof=found.proof)
        return {"texts": overview_texts(state)}

    def _standing(self, connection: Connection) -> _Standing:
        return _Standing(
            self._today(connection, datetime.now(UTC)),
            open_holds(connection),
            last_reconciliation(connection),
        )

    def _today(self, connection: Connection, now: datetime) -> SumRow:
        zone, day = ZoneInfo(self._zone), Clock(self._zone, now).midnight
        edge = max(day, now - SETTLING)
        if self._base_at is None or self._base_at < day or now - self._counted_at > RECOUNT:
            self._base = usage(connection, Span(day, edge, zone), [], Filters(), units=False)
            self._base_at, self._counted_at = edge, now
        elif now - self._base_at > ADVANCE:
            gained = usage(connection, Span(self._base_at, edge, zone), [], Filters(), units=False)
            self._base, self._base_at = [total([*self._base, *gained])], edge
        latest = usage(connection, Span(self._base_at, now, zone), [], Filters(), units=False)
        return sum_total([*self._base, *latest])


async def _find(services: Services, visitor: Visitor, rest: str) -> LiveSubject:
    try:
        zone = read_zone(rest).key
    except ValueError:
        raise no_page() from None

    def feed() -> Latest:
        return Latest(_Figures(services, zone).read)

    return LiveSubject(("now", zone), "installation.read", None, feed)


async def _read_hour(services: Services) -> Message:
    await services.traffic.refresh()
    now, traffic = datetime.now(UTC), services.traffic
    curves = hour_curves(traffic.minutes(now), traffic.first_outputs(now))
    return {"texts": {curve.name: curve.points for curve in curves}}


TOPICS: Final[Sequence[Topic]] = (
    Topic("now", _find),
    installation_topic("hour", _read_hour, interval_s=5.0),
)
