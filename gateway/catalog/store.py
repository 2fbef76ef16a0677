"""The catalog of this process, and the price of each model at any moment.

A reload replaces the catalog atomically or, if the file is invalid, keeps the old one. A changed
price becomes a new price version that starts a little later, so that every gateway knows it before
it applies: in every process, a request's price is the one in force when it was accepted. Requests
that were accepted earlier keep their price. A load by somebody is followed by every other gateway
whose file has the same text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias, TypeVar

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError, NoResultFound

from gateway import metrics
from gateway.aside import Aside
from gateway.audit_log import Author, record
from gateway.catalog.advice import log_findings
from gateway.catalog.editing.files import save_file, write_file
from gateway.catalog.loader import read_catalog
from gateway.catalog.problems import CatalogError, CatalogProblem
from gateway.catalog.reloads import Follower, announce_load, digest_of, note_refusal, read_announced
from gateway.catalog.schema import Catalog, CatalogEntry
from gateway.catalog.selling.batch_prices import BatchPrice, due
from gateway.catalog.selling.terms import (
    NO_TERMS,
    OwnPrices,
    Terms,
    TermsReading,
    own_prices,
    read_terms,
)
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest, Unavailable
from gateway.ledger.discounts import discount_in_force, put_discount_in_force
from gateway.ledger.expenses import NO_RATES
from gateway.ledger.prices import (
    LIST,
    OPERATOR_NOTICE_S,
    PriceCache,
    PriceChange,
    put_in_force,
    read_catalog_change,
    read_price,
    read_prices,
    read_version,
    store_price,
)
from gateway.pricing import Price, ServiceClass, Unbookable, discounted
from gateway.sql.database import Database
from gateway.sql.outages import SQL_OUTAGE
from gateway.supervision import Beat, no_beat
from gateway.tables.core import price_periods

log = logging.getLogger(__name__)

T = TypeVar("T")

REFRESH_S: Final = 1.0
NOTICE_S: Final = 3.0
"""Time from a price change to its start, in which every gateway must read it. A gateway whose last
successful read is older accepts nothing, because it could miss a change. Clock differences must be
much smaller than this."""
NOTICE_ALONE_S: Final = 0.5
"""The same for a single gateway: time to commit the change."""
ATTEMPTS: Final = 3
_UNREADABLE: Final = (LookupError, TypeError, ValueError, NoResultFound)

BatchPrices: TypeAlias = dict[BatchPrice, tuple[int, Price] | None]
"""Batch price and its id, by price and discount; None if the model is not sold in batches."""


class LiveCatalog:
    def __init__(
        self, path: Path, database: Database, *, hour_nanos: int | None, shared: bool
    ) -> None:
        self.path: Final = path
        self.content = b""
        """The text of the catalog in force."""
        self._database = database
        self._alone = database.engine.dialect.name == "sqlite" and not shared
        self._reloading = asyncio.Lock()
        self._entries: Mapping[str, CatalogEntry] = {}
        self._aliases: Mapping[str, str] = {}
        self._spellings: Mapping[str, str] = {}
        """Names and aliases by their lower case, except those that differ by case alone."""
        self._at_prices: dict[tuple[str, int], CatalogEntry] = {}
        """Entries at prices other than those of the file, by name and price id."""
        self.expense_rates = NO_RATES
        """What the operator pays for upstreams and devices."""
        self._hour_nanos = hour_nanos
        self._advised: Mapping[str, CatalogEntry] | None = None
        self._follower = Follower()
        self._terms = NO_TERMS
        self._batch_prices: BatchPrices = {}
        self._unreadable: set[int] = set()
        self._read_at = -NOTICE_S
        self._aside = Aside(database)
        self.names_ever: tuple[str, ...] = ()
        """Models that are or were on sale; their requests can still be running."""
        self.prices: PriceCache = {}
        """All price rows that this process has read; rows are immutable."""

    @classmethod
    async def open(
        cls, path: Path, database: Database, *, hour_nanos: int | None = None, shared: bool = False
    ) -> Self:
        """Read the catalog and put its prices in force. Raise ``CatalogError`` or ``OSError``.

        ``hour_nanos`` is the operator's price of a device hour, unless the catalog has another.
        With ``shared``, other processes accept requests, also on SQLite.
        """
        live = cls(path, database, hour_nanos=hour_nanos, shared=shared)
        # Before the file is read: a later load is followed.
        live._follower.note((await database.read(read_announced)).loads)
        content = await asyncio.to_thread(path.read_bytes)
        await live._put_on_sale(read_catalog(content, path), content, None)
        # Putting prices in force can take longer than they are valid without a refresh.
        await live.refresh()
        return live

    async def reload(self, author: Author) -> tuple[CatalogProblem, ...]:
        """Read the file again. If it has problems, change nothing and return them.

        When this returns, changed prices are in force, and the act of ``author`` is recorded,
        refused or not.
        """
        async with self._reloading:
            try:
                content = await asyncio.to_thread(self.path.read_bytes)
                catalog = await asyncio.to_thread(read_catalog, content, self.path)
            except CatalogError as error:
                problems = error.problems
            except OSError as error:
                unread = f"cannot be read: {error.strerror}"
                problems = (CatalogProblem(str(self.path), 1, 1, "", unread),)
            else:
                await self._put_on_sale(catalog, content, author)
                return ()
            await self._database.write(lambda each: note_refusal(each, author, problems))
            return problems

    async def save(
        self, content: bytes, expected_sha256: str, author: Author, *, kept: Path
    ) -> tuple[CatalogProblem, ...]:
        """Replace the file, and put its prices in force. If the text has problems, change nothing
        and return them. ``kept`` is the directory of earlier texts.

        Raise ``FileChanged`` unless the file has the expected digest, ``NotWritable``.
        """
        async with self._reloading:
            try:
                catalog = await asyncio.to_thread(read_catalog, content, self.path)
            except CatalogError as error:
                return error.problems
            before = await asyncio.to_thread(
                save_file, self.path, content, expected_sha256, kept=kept
            )
            try:
                await self._put_on_sale(catalog, content, author, act="catalog.save")
            except Exception:
                await asyncio.to_thread(write_file, self.path, before)
                raise
            return ()

    async def keep_fresh(self, beat: Beat = no_beat) -> None:
        """Apply prices that other processes put in force, until cancelled.

        Follow the loads of other gateways. Log once for each catalog what is wrong with it.
        """
        following: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.try_refresh()
                # Both beside this loop: one waits until prices are in force, one computes for long.
                if self._follower.is_behind and (following is None or following.done()):
                    following = tasks.create_task(self._follow())
                if self._advised is not self._entries:
                    self._advised = self._entries
                    tasks.create_task(asyncio.to_thread(log_findings, self.in_file()))
                beat()
                await asyncio.sleep(REFRESH_S)

    async def _follow(self) -> None:
        """Load the catalog that another gateway has loaded, if the file here has the same text."""
        async with self._reloading:
            follower, announced = self._follower, self._follower.announced
            if announced.sha256 == digest_of(self.content):
                follower.note(announced.loads)
            if not follower.is_behind:
                return
            try:
                content = await asyncio.to_thread(follower.read, self.path)
                if content is None:
                    return
                catalog = await asyncio.to_thread(read_catalog, content, self.path)
                await self._put_on_sale(catalog, content, None)
            except (CatalogError, OSError) as error:
                log.error("catalog not reloaded: %s", error)
            except SQL_OUTAGE as error:
                log.warning("catalog not reloaded yet: %s", type(error).__name__)
                return
            follower.note(announced.loads)

    async def try_refresh(self) -> None:
        """Read changed prices, unless the database does not answer."""
        try:
            await self.refresh()
        except SQL_OUTAGE as error:
            log.warning("could not refresh prices: %s", type(error).__name__)

    async def refresh(self) -> None:
        """Read the prices that any process has put in force: one row, if nothing has changed."""
        started = time.monotonic()
        found = await self._database.read(self._read_new)
        if found is not None and self._unmade(found):
            self._add(await self._write(lambda connection: self._make(connection, found)))
        self._apply(self._terms if found is None else found.terms, started)
        for price_id in tuple(self._unreadable):
            await self._aside.note("price", str(price_id), "The price row cannot be read.")

    def priced(
        self,
        name: str,
        now: datetime,
        account_id: int = LIST,
        service_class: ServiceClass = "standard",
    ) -> tuple[int, Price]:
        """Return an account's price of a model at a moment, and its id.

        Raise ``InvalidRequest`` if the model is not sold in the class, ``Unavailable`` if its price
        is unknown.
        """
        if time.monotonic() - self._read_at > (OPERATOR_NOTICE_S if self._alone else NOTICE_S):
            raise Unavailable(
                "prices_unknown",
                "The prices in force could not be read for some seconds; no request is accepted.",
                retry_after_s=2,
            )
        price_id = self._price_id(name, now, account_id)
        if price_id is None or price_id not in self.prices:
            raise Unavailable("no_price", f"{name} has no price in force; it is not for sale.")
        if service_class == "batch":
            price_id = self._batch_price_id(name, now, price_id)
        return price_id, self.prices[price_id]

    def spelling(self, name: str) -> str:
        """Return a model's name, or an alias, as the catalog spells it; any other name unchanged.

        Case matters only between names that differ in nothing else.
        """
        if name in self._entries or name in self._aliases:
            return name
        return self._spellings.get(name.lower(), name)

    def spellings(self) -> Iterator[str]:
        """Yield all names and aliases."""
        yield from self._entries
        yield from self._aliases

    def resolve(self, name: str) -> str:
        """Return the model of a name or an alias in any case; any other name unchanged."""
        spelled = self.spelling(name)
        return self._aliases.get(spelled, spelled)

    def find(self, name: str) -> CatalogEntry | None:
        """Return the entry of a model or of an alias, at its price in the catalog file."""
        entry = self._entries.get(name)
        return entry if entry is not None else self._entries.get(self.resolve(name))

    def at_price(self, entry: CatalogEntry, account_id: int = LIST) -> CatalogEntry:
        """Return an entry at the price in force now for an account."""
        return self._at_price(entry, datetime.now(UTC), account_id)

    def entry(self, name: str, account_id: int = LIST) -> CatalogEntry | None:
        """Return an entry at the price now in force for an account."""
        entry = self._entries.get(name)
        return None if entry is None else self._at_price(entry, datetime.now(UTC), account_id)

    def entries(self, account_id: int = LIST) -> tuple[CatalogEntry, ...]:
        """Return all entries, with the prices now in force for an account."""
        now = datetime.now(UTC)
        return tuple(self._at_price(entry, now, account_id) for entry in self._entries.values())

    def in_file(self) -> tuple[CatalogEntry, ...]:
        """Return all entries, with the prices of the file."""
        return tuple(self._entries.values())

    def has_price_override(self, name: str, account_id: int) -> bool:
        """Whether a price override of the account is in force for a model now."""
        own = (name, account_id)
        return account_id != LIST and self._in_force(own, datetime.now(UTC)) is not None

    def own_prices(self) -> dict[str, OwnPrices]:
        """Count the price overrides of each model, and find the next start of its prices."""
        return own_prices(self._terms.schedule, datetime.now(UTC))

    def names(self) -> tuple[str, ...]:
        """Return the models on sale."""
        return tuple(self._entries)

    def on_sale_since(self, name: str) -> int:
        """Return the Unix time of a model's first price."""
        return int(self._terms.schedule[name, LIST][0].starts_at.timestamp())

    def priced_since(self, name: str) -> int:
        """Return the Unix time since which a model's current list price is in force."""
        now = datetime.now(UTC)
        starts = [each.starts_at for each in self._terms.schedule[name, LIST]]
        return int(max((at for at in starts if at <= now), default=starts[0]).timestamp())

    async def _put_on_sale(
        self,
        catalog: Catalog,
        content: bytes,
        author: Author | None,
        act: Literal["catalog.load", "catalog.save"] = "catalog.load",
    ) -> None:
        """Put the catalog's prices in force. Without an author, a change is the gateway's act, and
        other gateways do not follow."""
        sha256, loaded = digest_of(content), digest_of(self.content) if self.content else None
        notice = timedelta(seconds=NOTICE_ALONE_S if self._alone else NOTICE_S)

        sold_before = select(price_periods.c.model).where(price_periods.c.account_id == LIST)

        def write(connection: Connection) -> tuple[datetime, Terms, BatchPrices, int]:
            now = datetime.now(UTC)
            sold = set(connection.execute(sold_before).scalars())
            version = read_version(connection)
            changed: list[str] = []
            prices: dict[str, PriceChange] = {}
            # In a fixed order, so that gateways that start together cannot deadlock.
            for entry in sorted(catalog.models, key=lambda entry: entry.name):
                starts_at = now + notice if entry.name in sold else now
                put_in_force(connection, entry.name, entry.selling_price, starts_at)
                put_discount_in_force(connection, entry.name, entry.discount, starts_at)
                if (latest := read_version(connection)) != version:
                    version = latest
                    changed.append(entry.name)
                    change = read_catalog_change(connection, entry.name)
                    # Otherwise only its discount has changed.
                    if change["starts_at"] >= timestamp(now):
                        prices[entry.name] = change
            if author is not None or changed:
                after = {
                    "sha256": sha256,
                    "models": len(catalog.models),
                    "changed": changed,
                    "prices": prices,
                }
                by = author or Author("start of a gateway", "system")
                before = {"sha256": loaded} if loaded else None
                record(connection, by, act, "catalog", before=before, after=after)
            loads = 0 if author is None else announce_load(connection, sha256)
            found = self._read(connection)
            return now, found.terms, self._make(connection, found), loads

        started = time.monotonic()
        now, terms, made, loads = await self._write(write)
        self._add(made)
        self._apply(terms, started)
        # Later starts were set by an operator.
        ahead = (
            starts_at - now
            for entry in catalog.models
            for starts_at, _ in (*terms.schedule[entry.name, LIST], *terms.discounts[entry.name])
            if starts_at - now <= notice
        )
        await asyncio.sleep(max(max(ahead).total_seconds(), 0))
        self._entries = {entry.name: entry for entry in catalog.models}
        self.content = content
        self._follower.note(loads)
        self._at_prices = {}
        self._aliases = {alias: entry.name for entry in catalog.models for alias in entry.aliases}
        names = tuple(self.spellings())
        times = Counter(name.lower() for name in names)
        self._spellings = {name.lower(): name for name in names if times[name.lower()] == 1}
        self.expense_rates = catalog.expense_rates(self._hour_nanos)
        self._name_models()

    async def _write(self, function: Callable[[Connection], T]) -> T:
        # A thousand new models take seconds, more than a request's transaction may.
        for _ in range(1, ATTEMPTS):
            with contextlib.suppress(IntegrityError):  # another gateway wrote the same meanwhile
                return await self._database.slow_write(function)
        return await self._database.slow_write(function)

    def _apply(self, terms: Terms, started: float) -> None:
        """Use terms that were read at ``started``, unless a later version was read meanwhile."""
        if terms.version >= self._terms.version:
            self._terms = terms
            self._name_models()
        self._read_at = max(self._read_at, started)

    def _name_models(self) -> None:
        self.names_ever = tuple(dict.fromkeys((*self._entries, *self._terms.models)))

    def _read_new(self, connection: Connection) -> TermsReading | None:
        """Return the current terms; None if they have not changed."""
        known = self._terms
        self._follower.announced = read_announced(connection)
        # Terms are applied only after their batch prices exist.
        unchanged = self._follower.announced.version == known.version
        return None if unchanged else self._read(connection)

    def _read(self, connection: Connection) -> TermsReading:
        """Read what has changed, and the price rows that this process has not read yet."""
        found = read_terms(connection, self._terms)
        wanted = {
            start.price_id: model
            for (model, _), starts in found.changed.items()
            for start in starts
            if start.price_id is not None
            and start.price_id not in self.prices
            and start.price_id not in self._unreadable
        }
        with contextlib.suppress(*_UNREADABLE):
            read_prices(connection, wanted, self.prices)
        for price_id, model in wanted.items():
            if price_id not in self.prices:
                self._read_price(connection, model, price_id)
        return found

    def _read_price(self, connection: Connection, model: str, price_id: int) -> None:
        """Read a price row. An unreadable one is set aside: while it is in force, its model is not
        for sale. Other models are not affected."""
        try:
            read_price(connection, price_id, self.prices)
        except _UNREADABLE:
            log.exception("price %d of %r is unreadable; set another one", price_id, model)
            metrics.UNREADABLE_PRICES.labels(model).inc()
            self._unreadable.add(price_id)

    def _unmade(self, found: TermsReading) -> dict[BatchPrice, str]:
        wanted = due(found.changed, found.terms.discounts, datetime.now(UTC))
        return {
            pair: model
            for pair, model in wanted.items()
            if pair not in self._batch_prices and pair[0] not in self._unreadable
        }

    def _make(self, connection: Connection, found: TermsReading) -> BatchPrices:
        """Create rows for the batch prices that are missing."""
        made: BatchPrices = {}
        for (price_id, discount), model in sorted(self._unmade(found).items()):
            try:
                price = discounted(self.prices[price_id], Fraction(discount))
            except (ValueError, ZeroDivisionError) as error:
                # The discount is unreadable, or an override from before the discount is too large
                # for it: at this price the model is not sold in batches.
                if not isinstance(error, Unbookable):
                    log.exception("the batch discount %r of %r is unreadable", discount, model)
                    metrics.UNREADABLE_PRICES.labels(model).inc()
                made[price_id, discount] = None
            else:
                made[price_id, discount] = store_price(connection, model, price), price
        return made

    def _add(self, made: BatchPrices) -> None:
        """Use batch prices whose rows are committed."""
        self.prices.update(found for found in made.values() if found is not None)
        self._batch_prices.update(made)

    def _batch_price_id(self, name: str, now: datetime, price_id: int) -> int:
        discount = discount_in_force(self._terms.discounts, name, now)
        found = self._batch_prices.get((price_id, discount)) if discount else None
        if found is None:
            raise InvalidRequest(
                "model_not_in_batches", f"{name} is not sold in batches.", param="model"
            )
        return found[0]

    def _price_id(self, name: str, now: datetime, account_id: int) -> int | None:
        own = self._in_force((name, account_id), now)
        return own if own is not None else self._in_force((name, LIST), now)

    def _in_force(self, place: tuple[str, int], now: datetime) -> int | None:
        starts = reversed(self._terms.schedule.get(place, ()))
        return next((price_id for starts_at, price_id in starts if starts_at <= now), None)

    def _at_price(self, entry: CatalogEntry, now: datetime, account_id: int) -> CatalogEntry:
        price_id = self._price_id(entry.name, now, account_id)
        if price_id is None or (price := self.prices.get(price_id)) is None:
            return entry
        place = entry.name, price_id
        if (found := self._at_prices.get(place)) is None:
            # The same object each time, so that what is derived from it is computed once.
            found = self._at_prices[place] = entry.at(price)
        return found
