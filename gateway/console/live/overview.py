"""Topics of the overview: its figures each second, and the curves of the last hour."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection

from gateway.accounts.budgets import read_zone
from gateway.api.http.request import Services
from gateway.billing.reconciliation import Reconciliation, last_reconciliation
from gateway.billing.usage.traffic import OpenHolds, open_holds
from gateway.catalog.availability import availability
from gateway.console.guards import no_page
from gateway.console.live.topics import Latest, LiveSubject, Message, Topic, installation_topic
from gateway.console.views.money import SumRow, sum_total
from gateway.console.views.overview import Present, hour_curves, hour_texts, overview_texts
from gateway.console.visitors import Visitor

RECENT: Final = timedelta(minutes=5)


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


async def _read_now(services: Services, zone: str) -> Message:
    def read(connection: Connection) -> tuple[SumRow, OpenHolds, Reconciliation | None]:
        sums = services.today.read(connection, zone, datetime.now(UTC))
        today = sum_total(sums.by_model.values())
        return today, open_holds(connection), last_reconciliation(connection)

    today, holds, proof = await services.database.report(read, account_id=None)
    await services.traffic.refresh(only_new=True)
    return {"texts": overview_texts(present(services, today=today, holds=holds, proof=proof))}


async def _find(services: Services, visitor: Visitor, rest: str) -> LiveSubject:
    try:
        zone = read_zone(rest).key
    except ValueError:
        raise no_page() from None

    def feed() -> Latest:
        return Latest(lambda: _read_now(services, zone))

    return LiveSubject(("now", zone), "installation.read", None, feed)


async def _read_hour(services: Services) -> Message:
    await services.traffic.refresh()
    curves = hour_curves(services.traffic, datetime.now(UTC))
    points = {curve.name: curve.points for curve in curves}
    return {"texts": points | hour_texts(services.traffic)}


TOPICS: Final[Sequence[Topic]] = (
    Topic("now", _find),
    installation_topic("hour", _read_hour, interval_s=5.0),
)
