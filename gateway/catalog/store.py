"""The catalog that this process sells from, and the prices in force, kept up with the database.

A reload swaps the whole catalog at once or, if the file is wrong, keeps the old one. A changed
price becomes a new price version; requests that were accepted before keep theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from gateway.catalog.loader import CatalogError, Problem, load_catalog
from gateway.catalog.schema import Catalog, Entry
from gateway.database import Database
from gateway.errors import Unavailable
from gateway.ledger.prices import PriceCache, in_force, put_in_force, read_price
from gateway.pricing import Price

log = logging.getLogger(__name__)

REFRESH_S: Final = 5.0


class LiveCatalog:
    def __init__(self, path: Path, database: Database) -> None:
        self._path = path
        self._database = database
        self._entries: Mapping[str, Entry] = {}
        self._in_force: Mapping[str, int] = {}
        self._since: dict[str, int] = {}
        self.prices: PriceCache = {}
        """Every price row that this process has read; rows never change."""

    @classmethod
    async def open(cls, path: Path, database: Database) -> Self:
        """Read the catalog and put its prices in force. Raise ``CatalogError`` or ``OSError``."""
        live = cls(path, database)
        await live._put_on_sale(load_catalog(path))
        return live

    async def reload(self) -> tuple[Problem, ...]:
        """Read the file again; on any problem change nothing and return what is wrong."""
        try:
            catalog = await asyncio.to_thread(load_catalog, self._path)
        except CatalogError as error:
            return error.problems
        except OSError as error:
            return (Problem(str(self._path), 1, "", f"cannot be read: {error.strerror}"),)
        await self._put_on_sale(catalog)
        return ()

    async def _put_on_sale(self, catalog: Catalog) -> None:
        def sync(connection: Connection) -> dict[str, int]:
            now = datetime.now(UTC)
            return {
                entry.name: put_in_force(connection, entry.name, entry.selling_price, now)
                for entry in catalog.models
            }

        price_ids = await self._database.write(sync)
        await self._remember(price_ids)
        now = int(datetime.now(UTC).timestamp())
        self._since = {entry.name: self._since.get(entry.name, now) for entry in catalog.models}
        self._entries = {entry.name: entry for entry in catalog.models}

    async def keep_fresh(self) -> None:
        """Take over, for ever, prices that other processes have put in force."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._remember(
                    await self._database.read(
                        lambda connection: in_force(connection, datetime.now(UTC))
                    )
                )
            except DBAPIError as error:
                log.warning("prices not refreshed: %s", type(error).__name__)

    async def _remember(self, price_ids: Mapping[str, int]) -> None:
        unknown = [price_id for price_id in price_ids.values() if price_id not in self.prices]
        if unknown:
            await self._database.read(
                lambda connection: [
                    read_price(connection, price_id, self.prices) for price_id in unknown
                ]
            )
        self._in_force = price_ids

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    def on_sale_since(self, name: str) -> int:
        """Unix time at which this process first offered a model."""
        return self._since[name]

    def entry(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def priced(self, name: str) -> tuple[int, Price]:
        """Give the price in force of a model that is on sale, and its id."""
        price_id = self._in_force.get(name)
        if price_id is None:
            raise Unavailable("no_price", f"{name} has no price in force; it is not for sale.")
        return price_id, self.prices[price_id]
