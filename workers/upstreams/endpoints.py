"""Selects the endpoint of a call: the least busy of those that are up.

After several consecutive failures, an endpoint receives no calls until a probe succeeds. Probes are
sent at growing intervals, so that no client's request is used for probing. A busy endpoint is
paused for its ``Retry-After``. Endpoints of a higher tier, which may serve another model, are used
only if no other endpoint accepts work. If the endpoints of a tier have weights, the job decides
instead of the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from workers.contract.announcements import EndpointState
from workers.contract.models import EndpointSpec, UpstreamSpec
from workers.contract.shares import choose
from workers.upstreams.connections import Connections, ExchangeError

log = logging.getLogger(__name__)

FAILURES_MAX: Final = 3
"""Consecutive failures after which an endpoint counts as down."""
PROBE_MIN_S: Final = 1.0
PROBE_MAX_S: Final = 60.0
PROBE_TIMEOUT_S: Final = 5.0
DURATIONS_KEPT: Final = 128
"""Latest calls of an endpoint over which its percentile is computed."""
CODES_MAX: Final = 8
"""Maximum number of error codes that are counted of an endpoint."""


class Endpoint:
    """One endpoint of a model: its connections, its load and its health."""

    def __init__(
        self,
        spec: EndpointSpec,
        *,
        model: str,
        credential: str | None,
        connect_timeout_s: float,
        prefix: str = "",
    ) -> None:
        self.model = spec.model or model
        self.label = ""
        """Its name among several endpoints: its model, with its host if others have that model."""
        self.tier = spec.tier
        self.weight = spec.weight
        self.concurrency = spec.concurrency or 1
        self.credential = credential
        self.in_flight = 0
        self.is_down = False
        self.url = spec.url.rstrip("/") + prefix + "/"
        """Base URL of its calls."""
        self._failures = 0
        self._paused_until = 0.0
        self._recovery: asyncio.Task[None] | None = None
        self._down_at = self._probe_at = 0.0
        self._calls = 0
        self._errors: Counter[str] = Counter()
        self._durations_us: deque[int] = deque(maxlen=DURATIONS_KEPT)
        headers = {"Content-Type": "application/json"}
        if credential:
            headers["Authorization"] = f"Bearer {credential}"
        self.connections = Connections(
            self.url,
            limit=self.concurrency,
            connect_timeout_s=connect_timeout_s,
            headers=headers,
        )

    @property
    def is_plain(self) -> bool:
        """Whether it is called without TLS, as is possible in the operator's own network."""
        return self.url.startswith("http://")

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc.rpartition("@")[2]

    @property
    def load(self) -> float:
        return self.in_flight / self.concurrency

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def pause(self, seconds: float) -> None:
        """Send no calls for a while, because the endpoint is busy."""
        self._paused_until = time.monotonic() + seconds

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self) -> None:
        """Record a failure caused by the endpoint."""
        self._failures += 1
        if self._failures >= FAILURES_MAX and not self.is_down:
            self.is_down = True
            self._down_at = time.time()
            log.warning("upstream endpoint is down", extra={"endpoint": self.host})
            self._recovery = asyncio.create_task(self._recover())

    def record(self, duration_us: int, error: str | None) -> None:
        """Count a call that has ended, with the code of its error."""
        self._calls += 1
        self._durations_us.append(duration_us)
        if error is not None and (error in self._errors or len(self._errors) < CODES_MAX):
            self._errors[error] += 1

    def state(self, model: str) -> EndpointState:
        """Return what is announced of it. ``model`` is the name of the catalog entry."""
        pause_s = self._paused_until - time.monotonic()
        until = self._probe_at if self.is_down else time.time() + pause_s if pause_s > 0 else 0.0
        ordered = sorted(self._durations_us)
        return EndpointState(
            model=model,
            host=self.host,
            tier=self.tier,
            in_flight=self.in_flight,
            limit=self.concurrency,
            failures=self._failures,
            state="down" if self.is_down else "paused" if pause_s > 0 else "up",
            since_ms=round(self._down_at * 1000) if self.is_down else 0,
            until_ms=round(until * 1000),
            calls=self._calls,
            p95_us=ordered[(95 * len(ordered) - 1) // 100] if ordered else 0,
            errors=dict(self._errors),
        )

    async def close(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._recovery
        await self.connections.close()

    async def _recover(self) -> None:
        pause_s = PROBE_MIN_S
        while True:
            delay_s = pause_s * random.uniform(0.75, 1.25)
            self._probe_at = time.time() + delay_s
            await asyncio.sleep(delay_s)
            pause_s = min(2 * pause_s, PROBE_MAX_S)
            with contextlib.suppress(ExchangeError, TimeoutError):
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    response = await self.connections.open("GET", "models")
                response.close()
                if response.status < 500:
                    break
        self.is_down = False
        self._failures = 0
        log.warning("upstream endpoint is up again", extra={"endpoint": self.host})


class Endpoints:
    """All endpoints of a catalog entry whose credentials are set.

    ``prefix`` is the path that a dialect appends to every base URL.
    """

    def __init__(
        self, upstream: UpstreamSpec, name: str, environ: Mapping[str, str], *, prefix: str = ""
    ) -> None:
        self.all = [
            Endpoint(
                spec,
                model=name,
                credential=environ[spec.credential] if spec.credential else None,
                connect_timeout_s=upstream.connect_timeout_s,
                prefix=prefix,
            )
            for spec in upstream.usable(environ)
        ]
        models = Counter(endpoint.model for endpoint in self.all)
        for endpoint in self.all if len(self.all) > 1 else ():
            host = f"@{endpoint.host}" if models[endpoint.model] > 1 else ""
            endpoint.label = f"{endpoint.model}{host}"

    @property
    def down(self) -> bool:
        """Whether all endpoints are down."""
        return all(endpoint.is_down for endpoint in self.all)

    def find(self, host: str, label: str) -> Endpoint | None:
        """Return the endpoint with this host and label."""
        found = (each for each in self.all if each.host == host and each.label == label)
        return next(found, None)

    def choose(self, avoid: Collection[Endpoint] = (), key: str = "") -> Endpoint | None:
        """Return an endpoint of the lowest tier that accepts work, if possible not one of
        ``avoid``: the one that the job's key chooses by weight, or else the least busy one. Return
        None if all are down."""
        well = [endpoint for endpoint in self.all if not endpoint.is_down]
        ready = [one for one in well if not one.is_paused and one.load < 1.0]
        # Prefer a higher tier to an endpoint that has just failed or is at capacity.
        for group in ([one for one in ready if one not in avoid], ready, well):
            if group:
                return _of_lowest_tier(group, key)
        return None

    def has_other(self, avoid: Collection[Endpoint]) -> bool:
        chosen = self.choose(avoid)
        return chosen is not None and chosen not in avoid and not chosen.is_paused

    async def close(self) -> None:
        for endpoint in self.all:
            await endpoint.close()


def _of_lowest_tier(group: Sequence[Endpoint], key: str) -> Endpoint:
    lowest = min(endpoint.tier for endpoint in group)
    tier = [endpoint for endpoint in group if endpoint.tier == lowest]
    weights = {one.url + one.model: one.weight for one in tier if one.weight is not None}
    if not weights:
        return min(tier, key=lambda one: one.load)
    chosen = choose(weights, key)
    return next(one for one in tier if one.url + one.model == chosen)
