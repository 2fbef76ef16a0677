"""``tollgate demo``: refuses an installation in use, then fills it and proves its books."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, func, select

from gateway.accounts.accounts import list_accounts
from gateway.accounts.pepper import read_pepper
from gateway.billing.reconciliation import prove_here, run_reconciliation
from gateway.billing.usage.minutes import floor_hour
from gateway.billing.usage.rollups import (
    DAYS_MAX,
    HOURS_MAX,
    build_due,
    build_due_days,
    built_range,
)
from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import Catalog, CatalogEntry
from gateway.demo.door import Door
from gateway.demo.history import History
from gateway.demo.people import DEMO, Opened, open_accounts, set_bounds
from gateway.demo.script import Script, read_script
from gateway.demo.traffic import OrderEnd, Traffic
from gateway.operations import credit
from gateway.operations.credit import RefundBody
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.tables.core import transfers

READY_S: Final = 180.0
POLL_S: Final = 0.25
FIRST_CREDIT: Final = "starting credit"
"""Reason of the only transfer that a new installation has."""


class NotMade(Exception):
    """The demonstration was not made, and why."""


@dataclass(frozen=True)
class Demo:
    settings: Settings
    days: int
    """Number of older days."""
    beside: bool
    """Whether other accounts with bookings are admitted."""
    report: Callable[[str], None]

    def make(self) -> None:
        """Make the demonstration. Raise ``NotMade`` if it cannot be made here."""
        script, catalog = read_script(), load_catalog(self.settings.catalog)
        with _running(self.settings, self.report) as door:
            database = Database(self.settings.sql_url, prepare=self.settings.database_prepare)
            try:
                self._fill(database, door, script, catalog)
            finally:
                asyncio.run(database.close())

    def _fill(self, database: Database, door: Door, script: Script, catalog: Catalog) -> None:
        entries = {
            entry.name: entry for entry in catalog.models if entry.name in _models_of(script)
        }
        if not entries:
            raise NotMade("the catalog has none of the pocket models, which the demo uses")
        with database.transaction() as connection:
            _check_unused(connection, script, beside=self.beside)
            opened = self._people(connection, script, entries, catalog)
        if not door.knows(_any_secret(opened)):
            raise NotMade(
                f"the gateway at {door.url} does not know the keys of this installation; set "
                "TOLLGATE_HOME, DATABASE_URL and TOLLGATE_PEPPER as they are set for it"
            )
        models = _wait_for_models(door, _any_secret(opened), list(entries), self.report)
        self.report("ordering today's requests, by the models of this machine")
        ended = Traffic(door, script, opened, models, self.report).run()
        with database.transaction() as connection:
            self._give_back(connection, script, ended)
        self._prove(database)

    def _people(
        self,
        connection: Connection,
        script: Script,
        entries: Mapping[str, CatalogEntry],
        catalog: Catalog,
    ) -> dict[str, Opened]:
        now = datetime.now(UTC)
        ends_at = floor_hour(now)
        starts_at = ends_at - timedelta(days=self.days)
        pepper = read_pepper(self.settings)
        sealed = built_range(connection)
        past = self.days > 0 and sealed is None
        opened = open_accounts(
            connection, script, entries, pepper=pepper, starts_at=starts_at if past else None
        )
        self.report(f"opened {', '.join(opened)}, with members, keys and credit")
        if past:
            rates = catalog.expense_rates(self.settings.gpu_hour_nanos)
            history = History(connection, script, entries, rates=rates)
            history.begin(starts_at, now)
            booked = history.book([*opened.values()], starts_at, ends_at)
            self.report(f"booked {booked} requests of {self.days} older days")
        elif self.days:
            self.report("left out older days: hours of this installation are sealed already")
        set_bounds(connection, script, opened, entries, now)
        return opened

    def _give_back(self, connection: Connection, script: Script, ended: list[OrderEnd]) -> None:
        wanted = script.refund
        charged = (
            one.request_id
            for one in ended
            if (one.order.account, one.order.model) == (wanted.account, wanted.model)
            and one.cost != "0"
        )
        if (request_id := next(charged, None)) is not None:
            body = RefundBody.model_validate({"reason": wanted.reason, "reference": "demo"})
            made = credit.refund(connection, DEMO, request_id, body)
            self.report(f"refunded ${made['amount']} of {request_id}")

    def _prove(self, database: Database) -> None:
        """Seal the hours that are over, and prove the books. Raise ``NotMade`` if they differ."""
        built = HOURS_MAX
        while built == HOURS_MAX:
            with database.transaction() as connection:
                built = build_due(connection, datetime.now(UTC))
        built = DAYS_MAX
        while built == DAYS_MAX:
            with database.transaction() as connection:
                built = build_due_days(connection)

        async def prove() -> int:
            found = await run_reconciliation(database, author=DEMO, whole=True, prove=prove_here)
            return len(found.findings)

        if findings := asyncio.run(prove()):
            raise NotMade(f"the books do not agree, in {findings} findings: tollgate reconcile")
        self.report("proved the books: they agree")


def _models_of(script: Script) -> set[str]:
    return {*script.kinds, *(order.model for order in script.orders)}


def _any_secret(opened: Mapping[str, Opened]) -> str:
    return next(iter(next(iter(opened.values())).secrets.values()))


def _check_unused(connection: Connection, script: Script, *, beside: bool) -> None:
    """Raise ``NotMade`` if the demonstration, or the money of others, is here already."""
    known = {account.name: account.id for account in list_accounts(connection)}
    if made := [each.name for each in script.accounts if each.name in known]:
        raise NotMade(
            f"the demo was made here already: the account {made[0]!r} exists; for another one, use "
            "an empty TOLLGATE_HOME"
        )
    if beside:
        return
    others = select(func.count()).where(transfers.c.reason != FIRST_CREDIT)
    if booked := connection.execute(others).scalar_one():
        raise NotMade(
            f"this installation has {booked} bookings of other accounts, beside which the demo "
            "would stand for ever; use an empty TOLLGATE_HOME, or --beside"
        )


def _wait_for_models(
    door: Door, secret: str, names: list[str], report: Callable[[str], None]
) -> list[str]:
    """Wait until workers serve the models; return those that are served in time."""
    deadline = time.monotonic() + READY_S
    missing = names
    while missing and time.monotonic() < deadline:
        missing = [name for name in missing if not door.is_served(secret, name)]
        if missing:
            time.sleep(POLL_S)
    if missing:
        report(f"left out, because no worker serves them: {', '.join(missing)}")
    return [name for name in names if name not in missing]


@contextlib.contextmanager
def _running(settings: Settings, report: Callable[[str], None]) -> Iterator[Door]:
    """Use the gateway that runs, or run ``tollgate up`` meanwhile."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    with Door(f"http://{host}:{settings.port}") as door:
        if door.is_live:
            yield door
            report(f"look at {door.url}/console; `tollgate console link` lets you in")
            return
        report("starting `tollgate up`, because no gateway answers")
        command = [sys.executable, "-m", "gateway", "up", "--no-console-link"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _wait_until_live(door, process)
            yield door
            report("stopping `tollgate up`; start it again to look at the demo in /console")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def _wait_until_live(door: Door, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while not door.is_live:
        if process.poll() is not None or time.monotonic() > deadline:
            raise NotMade("`tollgate up` does not start; run it to see why")
        time.sleep(POLL_S)
