"""Sends due deliveries of an outbox, and posts signed webhooks (Standard Webhooks 1.0).

A delivery is written in the transaction of what it reports, so none is lost. Any gateway can send
it, and a receiver can get it twice. Clients' URLs never reach private addresses, and redirects are
not followed. The receivers of one account do not delay those of others (``lanes``).
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
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final

import httpx
import msgspec
from sqlalchemy import Connection
from standardwebhooks import Webhook

from gateway import metrics
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.ledger.closed import ClosedRequest
from gateway.sql.database import Database
from gateway.sql.outages import SQL_OUTAGE
from gateway.supervision import Beat, no_beat
from gateway.tasks.submission import OpenRequest
from gateway.webhooks.deliveries import OUTBOX
from gateway.webhooks.lanes import POOL, Lanes
from gateway.webhooks.outbox import (
    BEGINNING,
    AttemptResult,
    Claim,
    Claimed,
    GivenUp,
    Outbox,
    Outcome,
)
from workers.contract.addresses import InvalidUrl, PrivateAddress, pin

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode

SILENCE: Final = ("timeout", "connect", "tls", "protocol", "name_resolution")
"""Classes of errors that mean that a receiver does not answer; they open its circuit."""
TIMEOUT_S: Final = 15.0
"""Time limit of one attempt: name resolution, connection, TLS and response headers."""
ANSWER_MAX: Final = 200
"""Characters of a response that are kept with the attempt."""
ANSWER_BYTES: Final = 4 * ANSWER_MAX
ANSWER_S: Final = 1.0
"""Time in which they must come after the headers."""
BETWEEN_S: Final = 0.05
"""Pause between claims if there are more due deliveries than one claim covers."""


def signing_secret(pepper: bytes, account_id: int) -> str:
    """Return an account's secret, ``whsec_…``, derived from the server's, so it is not stored."""
    digest = hmac.digest(pepper, f"webhook:{account_id}".encode(), hashlib.sha256)
    return "whsec_" + base64.b64encode(digest).decode()


@dataclass(frozen=True, slots=True)
class Turn:
    """What a sender did in one turn, for its metrics."""

    ends: Mapping[tuple[Outcome, str], int]
    """Deliveries that ended, by outcome and kind."""
    delays_s: Sequence[float]
    """Times from the due time of claimed deliveries to their claim."""
    in_flight: int
    open_circuits: int


@dataclass(frozen=True, slots=True)
class ReceiverAnswer:
    """A receiver's answer: its code, and the first characters of its text."""

    code: int
    text: str = ""


class Rejected(Exception):
    """The receiver refused a delivery for good, with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class SendFailed(Exception):
    """An attempt failed, with this class of error."""

    def __init__(self, error: str) -> None:
        super().__init__(error)
        self.error = error


class Sender:
    """The loop that sends the due deliveries of an outbox. A subclass sends and counts."""

    poll_s = 1.0
    """Interval at which an idle loop looks for due deliveries."""

    def __init__(
        self,
        database: Database,
        outbox: Outbox,
        *,
        given_up: Callable[[Connection, Sequence[GivenUp]], None],
    ) -> None:
        """``given_up`` is called in the transaction that gives deliveries up."""
        self._database = database
        self._outbox = outbox
        self._given_up = given_up
        self._lanes = Lanes()
        self._results: list[AttemptResult] = []
        self._ended = asyncio.Event()
        self._after = BEGINNING

    async def send(self, client: httpx.AsyncClient, one: Claimed) -> ReceiverAnswer:
        """Send a delivery; return the receiver's answer, whose codes 200 to 299 mean success.

        Raise ``NotFound`` if there is nothing left to send, and ``Rejected``.
        """
        raise NotImplementedError

    def count(self, turn: Turn) -> None:
        """Update metrics after a turn."""
        raise NotImplementedError

    def observe(self, error: str | None, duration_s: float) -> None:
        """Update metrics after an attempt."""
        raise NotImplementedError

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
                pause_s = self.poll_s if busy or not claimed.more else BETWEEN_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._ended.wait()

    async def _turn(self) -> Claim:
        """Record results of attempts and claim due deliveries, in one transaction."""
        self._ended.clear()
        results, lanes = list(self._results), self._lanes.copy()
        failed = [
            GivenUp(result.of.account_id, result.of.url, result.of.kind)
            for result in results
            if result.outcome == "failed"
        ]

        def turn(connection: Connection) -> Claim:
            self._outbox.record(connection, results, _now())
            claimed = self._outbox.claim(connection, lanes, _now(), after=self._after)
            if lost := [*failed, *claimed.given_up]:
                self._given_up(connection, lost)
            return claimed

        try:
            claimed = await self._database.write(turn)
        except SQL_OUTAGE as error:
            log.warning("could not claim deliveries, retrying: %s", type(error).__name__)
            await asyncio.sleep(self.poll_s)
            return Claim((), (), self._after, more=False)
        except Exception:
            # Results that cannot be recorded are dropped, or the loop would fail again; their
            # deliveries are due again soon.
            del self._results[: len(results)]
            raise
        del self._results[: len(results)]
        self._after = claimed.after
        for one in claimed.taken:
            self._lanes.start(one.account_id, one.host)
        ends = Counter(
            (result.outcome, result.of.kind) for result in results if result.outcome is not None
        )
        ends.update(("failed", lost.kind) for lost in claimed.given_up)
        delays = [max(0.0, (_now() - one.due_at).total_seconds()) for one in claimed.taken]
        self.count(Turn(ends, delays, self._lanes.in_flight, self._lanes.open_circuits))
        return claimed

    async def _deliver(self, client: httpx.AsyncClient, one: Claimed) -> None:
        """Make one attempt and store its result for the next turn. Raises nothing."""
        started_at, started = _now(), time.monotonic()
        code, error, final, text = None, None, False, ""
        try:
            answer = await self.send(client, one)
            code, text = answer.code, answer.text
        except NotFound:
            error, final = "request_gone", True
        except Rejected as refusal:
            code, final = refusal.code, True
        except SQL_OUTAGE as outage:
            log.info("delivery %s not sent: %s", one.id, type(outage).__name__)
        except Exception as failure:  # a boundary: a delivery must not end the others
            error = error_class(failure)
            final = error == "invalid_url"
            if error == "internal":
                log.exception("delivery %s failed", one.id)
        finally:
            self._lanes.end(one.account_id, one.host)
        duration_s = time.monotonic() - started
        if code is not None:
            self._lanes.answered(one.account_id, one.host)
            error = None if 200 <= code < 300 or code == 410 else "status"
        elif error in SILENCE:
            self._lanes.failed(one.account_id, one.host, _now())
        self.observe(error, duration_s)
        self._results.append(
            AttemptResult(one, started_at, int(duration_s * 1000), code, error, final, text)
        )
        self._ended.set()


class Poster:
    """Posts signed bodies to accounts' URLs."""

    def __init__(self, *, pepper: bytes, private_allowed: bool) -> None:
        self._pepper = pepper
        self._private_allowed = private_allowed

    async def post(
        self, client: httpx.AsyncClient, one: Claimed, event: Mapping[str, Any], *, id: str
    ) -> ReceiverAnswer:
        """Post an event, signed with the secret of its account, and return the answer.

        ``id`` is the same whenever the event is sent again.
        """
        now = _now()
        body = _encode(event)
        secret = signing_secret(self._pepper, one.account_id)
        signature = Webhook(secret).sign(id, now, body.decode())
        async with asyncio.timeout(TIMEOUT_S) as limit:
            to = await pin(
                one.url, private_allowed=self._private_allowed, owner=str(one.account_id)
            )
            async with client.stream(
                "POST",
                to.url,
                content=body,
                headers={
                    **to.headers,
                    "Accept-Encoding": "identity",
                    "Content-Type": "application/json",
                    "webhook-id": id,
                    "webhook-timestamp": str(int(now.timestamp())),
                    "webhook-signature": signature,
                },
                extensions=to.extensions,
            ) as response:
                # The code is known, and decides. What follows is for people.
                limit.reschedule(asyncio.get_running_loop().time() + 2 * ANSWER_S)
                return ReceiverAnswer(response.status_code, await _beginning(response))


async def _beginning(response: httpx.Response) -> str:
    """Return the first characters of a response, for people; no more of it is read.

    Only the code decides, so a body that breaks off, or does not come in time, is no failure.
    """
    data = b""
    if "content-encoding" in response.headers:
        # A compressed one could be of any size, and none was asked for.
        return ""
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            async for chunk in response.aiter_raw(ANSWER_BYTES):
                data += chunk
                if len(data) >= ANSWER_BYTES:
                    break
    text = data[:ANSWER_BYTES].decode(errors="replace")
    shown = "".join(one if one.isprintable() else " " for one in text)
    return " ".join(shown.split())[:ANSWER_MAX]


class Webhooks(Sender):
    """Sends the webhooks of requests that have ended."""

    def __init__(
        self,
        *,
        database: Database,
        find: Callable[[int, str], Awaitable[OpenRequest | ClosedRequest]],
        view: Callable[[OpenRequest | ClosedRequest], Mapping[str, Any]],
        poster: Poster,
        given_up: Callable[[Connection, Sequence[GivenUp]], None],
    ) -> None:
        super().__init__(database, OUTBOX, given_up=given_up)
        self._find = find
        self._view = view
        self._poster = poster

    async def send(self, client: httpx.AsyncClient, one: Claimed) -> ReceiverAnswer:
        found = await self._find(one.account_id, one.id)
        event = {
            "type": f"request.{found.status}",
            "timestamp": timestamp(_now()),
            "data": self._view(found),
        }
        return await self._poster.post(client, one, event, id=one.id)

    def count(self, turn: Turn) -> None:
        outcomes: tuple[tuple[Outcome, str], ...] = (
            ("delivered", "delivered"),
            ("gone", "gone"),
            ("failed", "given_up"),
        )
        for outcome, name in outcomes:
            metrics.WEBHOOKS.labels(name).inc(turn.ends.get((outcome, ""), 0))
        for delay_s in turn.delays_s:
            metrics.WEBHOOK_DELAY_SECONDS.observe(delay_s)
        metrics.WEBHOOKS_IN_FLIGHT.set(turn.in_flight)
        metrics.WEBHOOK_CIRCUITS.set(turn.open_circuits)

    def observe(self, error: str | None, duration_s: float) -> None:
        metrics.WEBHOOK_SECONDS.labels(error or "none").observe(duration_s)


def error_class(failure: BaseException) -> str:
    """Return the class of an attempt's error, which is stored and displayed."""
    if isinstance(failure, SendFailed):
        return failure.error
    if isinstance(failure, InvalidUrl):
        return "invalid_url"
    if isinstance(failure, PrivateAddress):
        return "private_address"
    if isinstance(failure, (TimeoutError, httpx.TimeoutException)):
        return "timeout"
    if isinstance(failure, httpx.ConnectError):
        return "tls" if is_tls(failure) else "connect"
    if isinstance(failure, httpx.HTTPError):
        return "protocol"
    return "name_resolution" if isinstance(failure, OSError) else "internal"


def is_tls(failure: BaseException) -> bool:
    """Whether TLS caused a failure."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _now() -> datetime:
    return datetime.now(UTC)
