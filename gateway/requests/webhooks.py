"""Tells clients that their requests have ended, by signed webhooks (Standard Webhooks 1.0).

A delivery is written in the transaction that closes its request, so none is forgotten; any gateway
may send it, and a receiver may hear of a request twice. Private addresses are never called on a
client's word, and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import httpx
import msgspec
from sqlalchemy import Connection, RowMapping, delete, select, update
from sqlalchemy.exc import DBAPIError
from standardwebhooks import Webhook

from gateway import metrics
from gateway.database import Database
from gateway.errors import NotFound
from gateway.ledger.closed import Closed
from gateway.requests.order import Open
from gateway.tables import webhook_deliveries
from workers.contract.addresses import PrivateAddress, pin

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode

SCHEDULE_S: Final = (0, 5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Pauses before each try, as Standard Webhooks recommends: about three days in all."""
TIMEOUT_S: Final = 15.0
CONCURRENCY: Final = 16
POLL_S: Final = 2.0
CLAIM_S: Final = 60
"""A delivery taken up is left alone by other gateways for this long."""


def signing_secret(pepper: bytes, account_id: int) -> str:
    """The account's secret, ``whsec_…``: derived from the server's own, so nothing is stored."""
    digest = hmac.digest(pepper, f"webhook:{account_id}".encode(), hashlib.sha256)
    return "whsec_" + base64.b64encode(digest).decode()


class Webhooks:
    """Sends what is due, for ever."""

    def __init__(
        self,
        *,
        database: Database,
        find: Callable[[int, str], Awaitable[Open | Closed]],
        view: Callable[[Open | Closed], Mapping[str, Any]],
        pepper: bytes,
        private_allowed: bool,
    ) -> None:
        self._database = database
        self._find = find
        self._view = view
        self._pepper = pepper
        self._private_allowed = private_allowed

    async def run(self) -> None:
        async with httpx.AsyncClient(
            timeout=TIMEOUT_S,
            follow_redirects=False,
            trust_env=False,
            headers={"User-Agent": "Tollgate-Webhooks"},
        ) as client:
            while True:
                try:
                    due = await self._database.write(lambda connection: claim(connection, _now()))
                    await asyncio.gather(*(self._deliver(client, row) for row in due))
                except DBAPIError as error:
                    log.warning("webhooks wait, trying again: %s", type(error).__name__)
                    due = []
                if not due:
                    await asyncio.sleep(POLL_S)

    async def _deliver(self, client: httpx.AsyncClient, row: RowMapping) -> None:
        """Try one delivery once, and write down how it went."""
        try:
            status = await self._post(client, row)
        except NotFound:
            status = 410
        except (httpx.HTTPError, PrivateAddress, OSError) as error:
            log.info("webhook of %s not delivered: %s", row["request_id"], type(error).__name__)
            status = 0
        if 200 <= status < 300 or status == 410:
            metrics.WEBHOOKS.labels("delivered" if status != 410 else "gone").inc()
            await self._database.write(lambda connection: finish(connection, row["request_id"]))
            return
        if row["attempts"] >= len(SCHEDULE_S):
            metrics.WEBHOOKS.labels("given_up").inc()
            await self._database.write(lambda connection: finish(connection, row["request_id"]))
            return
        pause_s = SCHEDULE_S[row["attempts"]] * random.uniform(0.9, 1.1)
        due_at = _now() + timedelta(seconds=pause_s)
        await self._database.write(
            lambda connection: postpone(connection, row["request_id"], due_at)
        )

    async def _post(self, client: httpx.AsyncClient, row: RowMapping) -> int:
        found = await self._find(row["account_id"], row["request_id"])
        now = _now()
        body = _encode(
            {
                "type": f"request.{found.status}",
                "timestamp": now.isoformat().replace("+00:00", "Z"),
                "data": self._view(found),
            }
        )
        secret = signing_secret(self._pepper, row["account_id"])
        signature = Webhook(secret).sign(row["request_id"], now, body.decode())
        to = await pin(row["url"], private_allowed=self._private_allowed)
        async with client.stream(
            "POST",
            to.url,
            content=body,
            headers={
                **to.headers,
                "Content-Type": "application/json",
                "webhook-id": row["request_id"],
                "webhook-timestamp": str(int(now.timestamp())),
                "webhook-signature": signature,
            },
            extensions=to.extensions,
        ) as response:
            return response.status_code


def claim(connection: Connection, now: datetime) -> Sequence[RowMapping]:
    """Take up deliveries that are due; each counts as an attempt from here on."""
    table = webhook_deliveries
    due = (
        select(table.c.request_id)
        .where(table.c.due_at <= now)
        .order_by(table.c.due_at)
        .limit(CONCURRENCY)
        .with_for_update(skip_locked=True)
    )
    ids = connection.execute(due).scalars().all()
    if not ids:
        return []
    taken = (
        update(table)
        .where(table.c.request_id.in_(ids))
        .values(attempts=table.c.attempts + 1, due_at=now + timedelta(seconds=CLAIM_S))
        .returning(table)
    )
    return connection.execute(taken).mappings().all()


def postpone(connection: Connection, request_id: str, due_at: datetime) -> None:
    table = webhook_deliveries
    connection.execute(update(table).where(table.c.request_id == request_id).values(due_at=due_at))


def finish(connection: Connection, request_id: str) -> None:
    table = webhook_deliveries
    connection.execute(delete(table).where(table.c.request_id == request_id))


def _now() -> datetime:
    return datetime.now(UTC)
