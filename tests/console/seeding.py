"""Fills a ledger with a week of mixed traffic, through the ledger's own functions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from gateway.accounts.accounts import Account, create_account
from gateway.accounts.budgets import create_budget
from gateway.accounts.keys import KeyInfo, create_key
from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import CatalogEntry
from gateway.ids import first_id
from gateway.ledger.closed import Output, RequestError, Status
from gateway.ledger.expenses import ExpenseRates, RunRecord
from gateway.ledger.holds import HoldRequest, hold
from gateway.ledger.prices import put_in_force
from gateway.ledger.refunds import refund
from gateway.ledger.settle import Settlement, settle
from gateway.ledger.transfers import add_credit
from gateway.pricing import NANOS_PER_USD, quote
from gateway.sql.database import Database
from gateway.tables.core import holds, receipts
from tests.databases import Databases
from tests.stack import CATALOG
from workers.contract.jobs import Choice, Job, RequestId, Timings, Usage, encode

PEPPER = b"a pepper for tests, long enough"
DAYS = 6
RATES = ExpenseRates(hour_nanos=3 * NANOS_PER_USD)
HOSTILE = '<img src=x onerror="alert(1)">'
"""Text that users entered; every page shows it as text."""


@dataclass(frozen=True)
class Kind:
    """How requests of a model usually look; ``spread`` varies their sizes."""

    limits: Usage
    usage: Usage
    timings: Timings


TEXT = Kind(
    Usage(requests=1, input_tokens=400, output_tokens=512),
    Usage(requests=1, input_tokens=180, output_tokens=240, gpu_us=210_000),
    Timings(
        queue_us=704, preprocess_us=1_120, transfer_us=96, forward_us=161_000, postprocess_us=310,
        first_token_us=12_400, total_us=171_200, tokens=240, per_token_us=670, gap_us=8_100,
    ),
)  # fmt: skip
IMAGE = Kind(
    Usage(requests=1, images=4, attributes={"size": "1024x1024", "quality": "high"}),
    Usage(requests=1, images=2, steps=16, gpu_us=1_600_000,
          attributes={"size": "1024x1024", "quality": "high"}),
    Timings(
        queue_us=3_900, load_us=240_000, preprocess_us=2_000, transfer_us=400, forward_us=1_500_000,
        postprocess_us=88_000, total_us=1_910_000,
    ),
)  # fmt: skip
VIDEO = Kind(
    Usage(requests=1, video_ms=4_000, attributes={"resolution": "720p"}),
    Usage(requests=1, video_ms=4_000, steps=8, gpu_us=4_000_000, attributes={"resolution": "720p"}),
    Timings(queue_us=12_000, preprocess_us=5_000, forward_us=3_900_000, postprocess_us=420_000,
            total_us=4_410_000),
)  # fmt: skip
SPEECH = Kind(
    Usage(requests=1, characters=120, audio_ms=20_000),
    Usage(requests=1, characters=120, audio_ms=8_200, gpu_us=900_000),
    Timings(queue_us=1_200, preprocess_us=900, forward_us=870_000, postprocess_us=12_000,
            first_token_us=64_000, total_us=905_000),
)  # fmt: skip
KINDS: Mapping[str, Kind] = {
    "text-generation": TEXT,
    "text-to-image": IMAGE,
    "image-to-image": IMAGE,
    "text-to-video": VIDEO,
    "text-to-speech": SPEECH,
}


@dataclass(frozen=True)
class Seeded:
    """What was made; ``requests`` by account, oldest first."""

    accounts: Mapping[str, Account]
    keys: Mapping[str, KeyInfo]
    requests: Mapping[str, Sequence[str]]


class Seeder:
    def __init__(
        self, connection: Connection, catalog: Path, *, seed: int = 7, since: datetime | None = None
    ) -> None:
        self._connection = connection
        self._random = random.Random(seed)
        self._now = datetime.now(UTC)
        self._prices: dict[int, Any] = {}
        self._entries = [
            entry
            for entry in load_catalog(catalog).models
            if entry.task in KINDS and entry.selling_price.components
        ]
        start = since or self._now - timedelta(days=DAYS + 30)
        self._price_ids = {
            entry.name: put_in_force(connection, entry.name, entry.selling_price, start)
            for entry in load_catalog(catalog).models
            if entry.price
        }

    def account(self, name: str, credit: str, /, **key: Any) -> tuple[Account, KeyInfo]:
        account = create_account(self._connection, name)
        _, info = create_key(self._connection, account.id, pepper=PEPPER, **key)
        add_credit(
            self._connection,
            account.id,
            int(float(credit) * NANOS_PER_USD),
            kind="topup",
            key=f"topup:{name}",
            actor="marlene",
            reason="invoice 2026-118",
        )
        return account, info

    def moments(self, count: int) -> list[datetime]:
        """Return moments of the last days in order, most of them of the last one."""
        ages = [
            timedelta(hours=self._random.uniform(0, 20))
            if self._random.random() < 0.6
            else timedelta(days=self._random.uniform(0, DAYS))
            for _ in range(count)
        ]
        return sorted(self._now - age - timedelta(seconds=5) for age in ages)

    def request(self, account: Account, key: KeyInfo, at: datetime, **given: Any) -> str:
        """Accept a request, and end it unless it is to stay open."""
        entry = given.get("entry") or self._random.choice(self._entries)
        kind = KINDS[entry.task]
        webhook = given.get("webhook")
        request_id = self._accept(account, key, entry, kind, at, webhook=webhook)
        if not given.get("open"):
            self._end(entry, kind, request_id, at)
        return request_id

    def requests(self, account: Account, key: KeyInfo, count: int) -> None:
        """Accept and settle text requests together, as busy gateways do."""
        entry, at = self.entry("text-generation"), datetime.now(UTC)
        holds = [self._hold(account, key, entry, TEXT, at) for _ in range(count)]
        hold(self._connection, holds)
        for each in holds:
            self._end(entry, TEXT, each.request_id, at)

    def end(self, request_id: str) -> None:
        """End a text request that was left open."""
        self._end(self.entry("text-generation"), TEXT, request_id, datetime.now(UTC))

    def order(
        self, account: Account, key: KeyInfo, at: datetime, *, prompt: str = ""
    ) -> HoldRequest:
        """Return a text request that is not accepted yet."""
        made = self._hold(account, key, self.entry("text-generation"), TEXT, at)
        job = Job(
            made.request_id, str(account.id), made.model, made.task, {"prompt": prompt}, TEXT.limits
        )
        return msgspec.structs.replace(made, job=encode(job))

    def charge(self, order: HoldRequest, at: datetime, *, text: str = "Yes.") -> str:
        """Accept a text request, and charge it at exactly a moment."""
        hold(self._connection, [order])
        self._settle(
            Settlement(
                order.request_id,
                "succeeded",
                "completed",
                billable=True,
                usage=TEXT.usage,
                timings=TEXT.timings,
                output=Output({"choices": [msgspec.to_builtins(Choice(0, text, "stop"))]}),
            ),
            at,
        )
        return order.request_id

    def entry(self, task: str) -> CatalogEntry:
        return next(entry for entry in self._entries if entry.task == task)

    def _accept(
        self, account: Account, key: KeyInfo, entry: CatalogEntry, kind: Kind, at: datetime,
        *, webhook: str | None = None,
    ) -> str:  # fmt: skip
        made = self._hold(account, key, entry, kind, at, webhook=webhook)
        hold(self._connection, [made])
        return made.request_id

    def _hold(
        self, account: Account, key: KeyInfo, entry: CatalogEntry, kind: Kind, at: datetime,
        *, webhook: str | None = None,
    ) -> HoldRequest:  # fmt: skip
        digits = f"{self._random.getrandbits(76):020x}"
        stem = first_id("req_", at)
        request_id = RequestId(f"{stem}7{digits[1:4]}8{digits[5:20]}"[:36])
        job = Job(request_id, str(account.id), entry.name, entry.task, {}, kind.limits)
        bill = quote(entry.selling_price, kind.limits)
        tags = {"project": self._random.choice(["atlas", "web", "nightly"])}
        if self._random.random() < 0.05:
            tags["note"] = HOSTILE
        return HoldRequest(
            request_id=request_id,
            account_id=account.id,
            key_id=key.id,
            model=entry.name,
            task=entry.task,
            price_id=self._price_ids[entry.name],
            hold_nanos=bill.total_nanos,
            job=encode(job),
            accepted_at=at,
            deadline_at=at + timedelta(minutes=10),
            metadata=tags,
            webhook=webhook,
        )

    def _end(self, entry: CatalogEntry, kind: Kind, request_id: str, at: datetime) -> None:
        factor = self._random.uniform(0.2, 1.0)
        usage, timings = _scaled(kind, factor)
        status, reason, error = self._outcome()
        done = status == "succeeded"
        text = Choice(0, f"A queue holds what waits. {HOSTILE}", "stop")
        self._settle(
            Settlement(
                RequestId(request_id),
                status,
                reason,
                billable=done,
                usage=usage if done else Usage(),
                timings=timings,
                error=error,
                output=(
                    Output({"choices": [msgspec.to_builtins(text)]})
                    if done and entry.task == "text-generation"
                    else None
                ),
                run=RunRecord(worker="w-1", attempt=1, device="NVIDIA H200", dtype="bf16"),
            ),
            at + timedelta(microseconds=timings.total_us),
        )

    def _outcome(self) -> tuple[Status, str, RequestError | None]:
        dice = self._random.random()
        if dice < 0.9:
            return "succeeded", "completed", None
        if dice < 0.94:
            return "failed", "worker_lost", RequestError("worker_lost", "The worker was lost.")
        if dice < 0.96:
            message = f"The upstream answered: {HOSTILE}"
            return "failed", "upstream_error", RequestError("upstream_error", message)
        if dice < 0.98:
            return "expired", "deadline", RequestError("deadline_exceeded", "It took too long.")
        return "cancelled", "client", None

    def _settle(self, settlement: Settlement, at: datetime) -> None:
        settle(
            self._connection,
            [settlement],
            now=at,
            prices=self._prices,
            retention=timedelta(days=7),
            rates=RATES,
        )


def seeded_database(directory: Path, postgres: str, *, requests: int = 120) -> tuple[str, Seeded]:
    """Make a SQLite database with a week of traffic; return its URL."""
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    seeded = seed(database, catalog, requests=requests)
    database.dispose()
    return url, seeded


def seed(database: Database, catalog: Path, *, requests: int = 120, seed: int = 7) -> Seeded:
    """Make three accounts, with credit, keys, a budget, requests of all ends, and a refund."""
    with database.transaction() as connection:
        seeder = Seeder(connection, catalog, seed=seed)
        atlas, web = seeder.account("atlas", "25", name="web", spend_limit_nanos=5 * NANOS_PER_USD)
        zenith, main = seeder.account("zenith", "8.104", name="main")
        hostile, _ = seeder.account(f"b{HOSTILE}", "0.000000001", name=HOSTILE)
        create_key(connection, atlas.id, pepper=PEPPER, name="ci", scopes=("read",))
        create_budget(connection, atlas.id, 2 * NANOS_PER_USD, window="day", name="daily")
        made: dict[str, list[str]] = {"atlas": [], "zenith": []}
        for number, at in enumerate(seeder.moments(requests)):
            account, key = (zenith, main) if number % 4 == 3 else (atlas, web)
            made[account.name].append(seeder.request(account, key, at))
        text = seeder.entry("text-generation")
        ended = datetime.now(UTC)
        last = seeder.request(atlas, web, ended - timedelta(seconds=3), entry=text)
        made["atlas"].append(last)
        _give_back(connection, made["atlas"])
        for seconds in (2, 1):
            at = ended - timedelta(seconds=seconds)
            made["atlas"].append(seeder.request(atlas, web, at, entry=text, open=True))
        # Budgets have refused some.
        known = {*connection.scalars(select(receipts.c.request_id))}
        known |= {*connection.scalars(select(holds.c.request_id))}
        accepted = {name: [id for id in ids if id in known] for name, ids in made.items()}
    accounts = {"atlas": atlas, "zenith": zenith, "hostile": hostile}
    return Seeded(accounts, {"web": web, "main": main}, accepted)


def _give_back(connection: Connection, request_ids: Sequence[str]) -> None:
    """Refund a part of the first charge."""
    for request_id in request_ids:
        try:
            refund(
                connection, request_id, 1, key=f"refund:{request_id}", actor="marlene",
                reason="the answer was cut",
            )  # fmt: skip
        except Exception:
            continue
        return


def _scaled(kind: Kind, factor: float) -> tuple[Usage, Timings]:
    """Vary the tokens, characters and times of a kind; counts of pictures stay."""
    usage = kind.usage
    changed = msgspec.structs.replace(
        usage,
        input_tokens=int(usage.input_tokens * factor),
        output_tokens=int(usage.output_tokens * factor),
        gpu_us=int(usage.gpu_us * factor),
    )
    times = {
        name: int(value * factor) for name, value in msgspec.structs.asdict(kind.timings).items()
    }
    return changed, Timings(**times)
