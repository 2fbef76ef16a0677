"""The tail of a list of requests: new ones as they are accepted, and changed ones as they end.

A page names what it follows by its filter, its zone, its columns and the newest request that it
shows. Pages with equal filters share one reading of the newest requests, several times a second. A
page gets each row once, and again when its status changes. If more rows come than one reading has,
its tail pauses: from then on it gets the number of requests since its own, counted each second.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias

import msgspec
from sqlalchemy import Connection

from gateway.accounts.accounts import account_names
from gateway.accounts.budgets import read_zone
from gateway.api.http.request import Services
from gateway.billing.usage.traffic import count_since
from gateway.console.guards import no_page
from gateway.console.live.topics import LiveSubject, Message, Reader, Topic
from gateway.console.queries import ROWS
from gateway.console.rendering import environment
from gateway.console.views.formats import Clock
from gateway.console.views.requests import COLUMNS, RequestRow, request_row
from gateway.console.visitors import Visitor
from gateway.ids import is_request_id
from gateway.ledger.closed import ClosedRequest
from gateway.requests.lists.origins import RequestOrigin, origins_of
from gateway.requests.lookup import RequestFilter, RequestPage
from gateway.tasks.submission import OpenRequest

INTERVAL_S: Final = 0.3
SLOW_INTERVAL_S: Final = 1.0
"""Interval if no index covers the filter, and on first pages."""
SEARCH_BACK: Final = timedelta(minutes=10)
"""Time before the tail began in which such a filter is searched."""
COUNT_S: Final = 1.0
JUST_ENDED: Final = timedelta(seconds=10)
"""Time in which a request may have ended after its page was read, and before its tail began."""
PLACES: Final = 9
"""Decimals for which columns of amounts have room, as new rows can have more than the old ones."""
GONE_MAX: Final = 200
LATEST: Final = 10


Shape: TypeAlias = Literal["list", "latest"]
"""The whole list, or the few newest requests on a first page."""
_TEMPLATES: Final[Mapping[Shape, str]] = {
    "list": "parts/list_rows.html",
    "latest": "parts/latest_rows.html",
}


class TailOf(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a page follows. ``hidden`` are columns that it leaves out."""

    zone: str
    since: str
    filter: dict[str, Any]
    hidden: tuple[str, ...] = ()
    shape: Shape = "list"


@dataclass(frozen=True, slots=True)
class _Look:
    """How a page shows rows."""

    shape: Shape
    zone: str
    hidden: tuple[str, ...]


@dataclass(slots=True)
class _Entry:
    """A row with the number of the reading in which it was new or changed."""

    row: RequestRow
    number: int
    is_told: bool
    """Whether it is for those who follow: it is new for one of them, or has changed."""


@dataclass(frozen=True, slots=True)
class ListTail:
    """The tail of a page: by which name it follows, and the newest request that it has."""

    name: str
    since: str


def latest_tail(latest: Sequence[OpenRequest | ClosedRequest], *, zone: str) -> ListTail | None:
    """Return the tail of the newest requests of all accounts; None without requests."""
    if not latest:
        return None
    since = latest[0].request_id
    name = tail_name(RequestFilter(None), zone=zone, hidden=(), since=since, shape="latest")
    return ListTail(name, since)


def tail_name(
    choice: RequestFilter,
    *,
    zone: str,
    hidden: Collection[str],
    since: str,
    shape: Shape = "list",
) -> str:
    """Return the name by which a page follows its list."""
    chosen = {
        field.name: value
        for field in fields(choice)
        if (value := getattr(choice, field.name)) not in (None, (), {})
    }
    tail = TailOf(zone, since, chosen, tuple(sorted(hidden)), shape)
    return f"tail/{base64.urlsafe_b64encode(msgspec.json.encode(tail)).decode().rstrip('=')}"


async def _find(services: Services, visitor: Visitor, rest: str) -> LiveSubject:
    try:
        tail = msgspec.json.decode(base64.urlsafe_b64decode(f"{rest}==="), type=TailOf)
        choice = msgspec.convert({"account_id": None, **tail.filter}, RequestFilter)
        look = _Look(tail.shape, read_zone(tail.zone).key, tail.hidden)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise no_page() from None
    if tail.since and not is_request_id(tail.since):
        raise no_page()
    return LiveSubject(
        ("tail", msgspec.json.encode(tail.filter, order="sorted")),
        "requests.read",
        choice.account_id,
        lambda: Tail(services, choice),
        lambda feed: feed.reader_of(look, tail.since),
    )


class Tail:
    """The newest requests of a filter."""

    def __init__(self, services: Services, choice: RequestFilter) -> None:
        self._services = services
        self._choice = choice
        if choice.searched:
            back = datetime.now(UTC) - SEARCH_BACK
            self._choice = replace(choice, starts_at=max(choice.starts_at or back, back))
        self._entries: dict[str, _Entry] = {}
        self._names: dict[int, str] = {}
        self._origins: dict[str, RequestOrigin] = {}
        self._readers: weakref.WeakSet[_TailReader] = weakref.WeakSet()
        self._html: dict[tuple[_Look, str], tuple[int, str]] = {}
        self._looks: set[_Look] = set()
        self._since = ""
        self._gone: dict[str, int] = {}
        self._counted_at = 0.0
        self.number = 0
        """Number of readings."""
        self._shown = 0
        """The last reading whose rows are rendered."""
        self.missed = 0
        """The last reading that did not reach back to the one before."""
        self.counts: Mapping[str, int] = {}

    @property
    def interval_s(self) -> float:
        lists = any(reader.look.shape == "list" for reader in self._readers)
        return INTERVAL_S if lists and not self._choice.searched else SLOW_INTERVAL_S

    def reader(self) -> Reader:
        return self.reader_of(_Look("list", "UTC", ()), "")

    def reader_of(self, look: _Look, since: str) -> Reader:
        reader = _TailReader(self, look, since)
        self._readers.add(reader)
        return reader

    async def sample(self) -> bool:
        lookup = self._services.requests.lookup
        found = await lookup.list(self._choice, limit=ROWS, cursor=None)
        await self._learn(found)
        changed = self._take(found)
        readers = list(self._readers)
        looks = {reader.look for reader in readers}
        since = min((reader.since for reader in readers), default="")
        if changed or not looks <= self._looks or since < self._since:
            await asyncio.to_thread(self._render, looks, since)
            changed = True
        self._shown = self.number
        return await self._count() or changed

    def has(self, look: _Look, since: str) -> bool:
        """Whether the rows of a page are rendered, which happens after a reading was taken."""
        return self._shown == self.number and look in self._looks and self._since <= since

    def news(self, look: _Look, number: int, since: str) -> list[tuple[str, str]]:
        """Return the rows that have come since a reading by their ids, the oldest first."""
        return sorted(
            (id, self._html[look, id][1])
            for id, entry in self._entries.items()
            if entry.number > number and (entry.is_told or id > since)
        )

    def gone(self, number: int) -> list[str]:
        """Return the ids of requests that no longer fit the filter, since a reading."""
        return [id for id, left in self._gone.items() if left > number]

    def _take(self, page: RequestPage) -> bool:
        """Note the newest requests; return whether one is new or has changed."""
        before, first = self._entries, self.number == 0
        self.number += 1
        recent = datetime.now(UTC) - JUST_ENDED
        found: dict[str, _Entry] = {}
        for one in page.items:
            row, known = request_row(one, self._names, self._origins), before.get(one.request_id)
            if known is not None and _state(known.row) == _state(row):
                found[row.id] = known
            else:
                ended = isinstance(one, ClosedRequest) and one.settled_at > recent
                found[row.id] = _Entry(row, self.number, not first or ended)
        if page.next_cursor is None:
            self._gone |= dict.fromkeys(before.keys() - found.keys(), self.number)
        elif before and not before.keys() & found.keys():
            self.missed = self.number
        for id in [*self._gone][:-GONE_MAX]:
            del self._gone[id]
        self._entries = found
        return any(entry.number == self.number for entry in found.values()) or (
            self.number in self._gone.values()
        )

    def _render(self, looks: set[_Look], since: str) -> None:
        """Render what any reader can get, once for all that show it alike."""
        html: dict[tuple[_Look, str], tuple[int, str]] = {}
        for look in looks:
            for id, entry in self._entries.items():
                if not (entry.is_told or id > since):
                    continue
                known = self._html.get((look, id))
                if known is None or known[0] != entry.number:
                    known = entry.number, self._rendered(look, entry.row)
                html[look, id] = known
        self._html, self._looks, self._since = html, looks, since

    def _rendered(self, look: _Look, row: RequestRow) -> str:
        return str(
            environment()
            .get_template(_TEMPLATES[look.shape])
            .render(
                rows=[row],
                clock=Clock(look.zone, datetime.now(UTC)),
                account=self._choice.account_id,
                with_account=self._choice.account_id is None,
                wide=PLACES,
                shows=COLUMNS.shown(look.hidden).shows,
                hold_places=PLACES,
                charge_places=PLACES,
                cancels=False,
            )
        )

    async def _count(self) -> bool:
        """Count each second for pages whose tail pauses."""
        wanted = {reader.since for reader in self._readers if reader.paused_at}
        now = time.monotonic()
        if not wanted or now - self._counted_at < COUNT_S:
            return False
        self._counted_at = now

        def count(connection: Connection) -> Mapping[str, int]:
            return {since: count_since(connection, self._choice, since) for since in wanted}

        counts = await self._services.database.report(count, account_id=None)
        changed, self.counts = counts != self.counts, counts
        return changed

    async def _learn(self, page: RequestPage) -> None:
        """Read names of accounts and origins of requests that are new."""
        accounts = {one.account_id for one in page.items} - self._names.keys()
        new = {one.request_id for one in page.items} - self._origins.keys()
        if not new:
            return

        def read(connection: Connection) -> tuple[Mapping[int, str], Mapping[str, RequestOrigin]]:
            names = account_names(connection, accounts) if accounts else {}
            return names, origins_of(connection, new)

        names, origins = await self._services.database.read(read)
        self._names.update(names)
        shown = {one.request_id for one in page.items}
        kept = {id: origin for id, origin in self._origins.items() if id in shown}
        self._origins = {**kept, **origins}


class _TailReader:
    """What one page has got."""

    def __init__(self, tail: Tail, look: _Look, since: str) -> None:
        self._tail = tail
        self.look = look
        self.since = since
        self.paused_at = ""
        self._number = 0
        self._total = -1

    def __call__(self) -> Message | None:
        tail, got = self._tail, self._number
        if self.paused_at:
            total = tail.counts.get(self.since, self._total)
            if total == self._total:
                return None
            self._total = total
            return {"total": total, "paused": self.paused_at}
        if got == tail.number or not tail.has(self.look, self.since):
            return None
        self._number = tail.number
        rows, gone = tail.news(self.look, got, self.since), tail.gone(got) if got else []
        if self.look.shape == "latest":
            return {"rows": rows[-LATEST:]} if rows else None
        # A page that begins to follow may be older than the oldest row of a reading.
        missed = tail.missed > got if got else len(rows) >= ROWS and rows[0][0] > self.since
        if missed:
            now = datetime.now(UTC)
            self.paused_at = f"{Clock(self.look.zone, now).local(now):%H:%M:%S}"
            return {"rows": rows, "paused": self.paused_at}
        return {"rows": rows, "gone": gone} if rows or gone else None


def _state(row: RequestRow) -> tuple[str, str, int | None]:
    return row.status, row.made, row.charged_nanos


TOPICS: Final[Sequence[Topic]] = (Topic("tail", _find),)
