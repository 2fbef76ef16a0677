"""Sends signed webhooks when requests have ended (Standard Webhooks 1.0).

A delivery is written in the transaction that settles its request, so none is lost. Any gateway can
send it, and a receiver can get it twice. Clients' URLs never reach private addresses, and redirects
are not followed. The receivers of one account do not delay those of others (``lanes``).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final

import httpx
import msgspec
from sqlalchemy import Connection
from standardwebhooks import Webhook

from gateway import metrics
from gateway.errors import NotFound
from gateway.ledger.closed import ClosedRequest
from gateway.sql.database import Database
from gateway.sql.outages import SQL_OUTAGE
from gateway.supervision import Beat, no_beat
from gateway.tasks.submission import OpenRequest
from gateway.webhooks.deliveries import AttemptResult, Claim, Claimed, claim, record
from gateway.webhooks.lanes import POOL, Lanes
from workers.contract.addresses import InvalidUrl, PrivateAddress, pin

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode

SILENCE: Final = ("timeout", "connect", "tls", "protocol", "name_resolution")
"""Classes of errors that mean that a receiver does not answer; they open its circuit."""
TIMEOUT_S: Final = 15.0
"""Time limit of one attempt: name resolution, connection, TLS and response headers."""
POLL_S: Final = 1.0
BETWEEN_S: Final = 0.05
"""Pause between claims if there are more due deliveries than one claim covers."""


def signing_secret(pepper: bytes, account_id: int) -> str:
    """Return an account's secret, ``whsec_…``, derived from the server's, so it is not stored."""
    digest = hmac.digest(pepper, f"webhook:{account_id}".encode(), hashlib.sha256)
    return "whsec_" + base64.b64encode(digest).decode()


class Webhooks:
    """The loop that sends due deliveries."""

    def __init__(
        self,
        *,
        database: Database,
        find: Callable[[int, str], Awaitable[OpenRequest | ClosedRequest]],
        view: Callable[[OpenRequest | ClosedRequest], Mapping[str, Any]],
        pepper: bytes,
        private_allowed: bool,
    ) -> None:
        self._database = database
        self._find = find
        self._view = view
        self._pepper = pepper
        self._private_allowed = private_allowed
        self._lanes = Lanes()
        self._results: list[AttemptResult] = []
        self._ended = asyncio.Event()
        self._after = 0

    async def run(self, beat: Beat = no_beat) -> None:
        """Send due deliveries until cancelled; each one that ends makes room for the next."""
        self._lanes = Lanes()
        async with (
            httpx.AsyncClient(
                timeout=TIMEOUT_S,
                follow_redirects=False,
                trust_env=False,
                # No keep-alive: a connection was checked for one receiver's host name only.
                limits=httpx.Limits(max_connections=POOL, max_keepalive_connections=0),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
                headers={"User-Agent": "Tollgate-Webhooks"},
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            while True:
                claimed = await self._turn()
                beat()
                for one in claimed.taken:
                    group.create_task(self._deliver(client, one))
                busy = self._lanes.room_in_all == 0
                pause_s = POLL_S if busy or not claimed.more else BETWEEN_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._ended.wait()

    async def _turn(self) -> Claim:
        """Record results of attempts and claim due deliveries, in one transaction."""
        self._ended.clear()
        results, lanes = list(self._results), self._lanes.copy()

        def turn(connection: Connection) -> Claim:
            record(connection, results, _now())
            return claim(connection, lanes, _now(), after=self._after)

        try:
            claimed = await self._database.write(turn)
        except SQL_OUTAGE as error:
            log.warning("could not claim webhooks, retrying: %s", type(error).__name__)
            await asyncio.sleep(POLL_S)
            return Claim((), 0, self._after, more=False)
        except Exception:
            # Results that cannot be recorded are dropped, or the loop would fail again; their
            # deliveries are due again soon.
            del self._results[: len(results)]
            raise
        del self._results[: len(results)]
        self._after = claimed.after
        for one in claimed.taken:
            self._lanes.start(one.account_id, one.host)
            metrics.WEBHOOK_DELAY_SECONDS.observe(max(0.0, (_now() - one.due_at).total_seconds()))
        ends = [result.outcome for result in results]
        for outcome, number in (
            ("delivered", ends.count("delivered")),
            ("gone", ends.count("gone")),
            ("given_up", ends.count("failed") + claimed.given_up),
        ):
            metrics.WEBHOOKS.labels(outcome).inc(number)
        metrics.WEBHOOKS_IN_FLIGHT.set(self._lanes.in_flight)
        metrics.WEBHOOK_CIRCUITS.set(self._lanes.open_circuits)
        return claimed

    async def _deliver(self, client: httpx.AsyncClient, one: Claimed) -> None:
        """Make one attempt and store its result for the next turn. Raises nothing."""
        started_at, started = _now(), time.monotonic()
        code, error, final = None, None, False
        try:
            code = await self._post(client, one)
        except NotFound:
            error, final = "request_gone", True
        except SQL_OUTAGE as outage:
            log.info("webhook of %s not sent: %s", one.request_id, type(outage).__name__)
        except Exception as failure:  # a boundary: a delivery must not end the others
            error = error_class(failure)
            final = error == "invalid_url"
            if error == "internal":
                log.exception("webhook of %s not delivered", one.request_id)
        finally:
            self._lanes.end(one.account_id, one.host)
        duration_s = time.monotonic() - started
        if code is not None:
            self._lanes.answered(one.account_id, one.host)
            error = None if 200 <= code < 300 or code == 410 else "status"
        elif error in SILENCE:
            self._lanes.failed(one.account_id, one.host, _now())
        metrics.WEBHOOK_SECONDS.labels(error or "none").observe(duration_s)
        self._results.append(
            AttemptResult(one, started_at, int(duration_s * 1000), code, error, final)
        )
        self._ended.set()

    async def _post(self, client: httpx.AsyncClient, one: Claimed) -> int:
        found = await self._find(one.account_id, one.request_id)
        now = _now()
        body = _encode(
            {
                "type": f"request.{found.status}",
                "timestamp": now.isoformat().replace("+00:00", "Z"),
                "data": self._view(found),
            }
        )
        secret = signing_secret(self._pepper, one.account_id)
        signature = Webhook(secret).sign(one.request_id, now, body.decode())
        async with asyncio.timeout(TIMEOUT_S):
            to = await pin(
                one.url, private_allowed=self._private_allowed, owner=str(one.account_id)
            )
            # The body of the response is not read, because only the status code is used.
            async with client.stream(
                "POST",
                to.url,
                content=body,
                headers={
                    **to.headers,
                    "Content-Type": "application/json",
                    "webhook-id": one.request_id,
                    "webhook-timestamp": str(int(now.timestamp())),
                    "webhook-signature": signature,
                },
                extensions=to.extensions,
            ) as response:
                return response.status_code


def error_class(failure: BaseException) -> str:
    """Return the class of an attempt's error, which is stored and displayed."""
    if isinstance(failure, InvalidUrl):
        return "invalid_url"
    if isinstance(failure, PrivateAddress):
        return "private_address"
    if isinstance(failure, (TimeoutError, httpx.TimeoutException)):
        return "timeout"
    if isinstance(failure, httpx.ConnectError):
        return "tls" if _is_tls(failure) else "connect"
    if isinstance(failure, httpx.HTTPError):
        return "protocol"
    return "name_resolution" if isinstance(failure, OSError) else "internal"


def _is_tls(failure: BaseException) -> bool:
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _now() -> datetime:
    return datetime.now(UTC)
