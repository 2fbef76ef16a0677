"""Device time of requests that an account cancelled within the last hour before receiving anything.

Such work is free, so an operator can limit it with `tollgate limit set`, or with the setting for
accounts without a limit. It is counted in Redis by the script of the rates, in milliseconds;
counts that are lost there are not restored.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.accounts.limits import Limit
from gateway.errors import TooManyRequests, Unavailable

log = logging.getLogger(__name__)

WINDOW_S: Final = 3600
_ANY: Final = 2**53


class CancelledTime:
    def __init__(self, redis: Redis, *, namespace: str, default_s: int | None) -> None:
        """``default_s`` applies to accounts without a limit."""
        text = importlib.resources.files("gateway.accounts").joinpath("rates.lua").read_text()
        self._script = redis.register_script(text)
        self._namespace = namespace
        self._default_s = default_s

    async def check(self, account_id: int, limits: Iterable[Limit]) -> None:
        """Raise ``TooManyRequests`` if an account has used up its time."""
        own = [one.cancelled_seconds_per_hour for one in limits if one.key_id is None]
        most_s = next((seconds for seconds in own if seconds is not None), self._default_s)
        if most_s is None:
            return
        try:
            _, _, used_ms, *_ = await self._run(account_id, amount_ms=0)
            if used_ms < most_s * 1000:
                return
            # Without room nothing is counted, but the reply says when there will be room.
            *_, wait_s = await self._run(account_id, amount_ms=1, limit_ms=most_s * 1000)
        except (RedisError, OSError):
            raise Unavailable(
                "queue_unavailable",
                "The server that counts limits does not answer; nothing was accepted.",
                retry_after_s=2,
            ) from None
        wait_s = min(max(wait_s, 1), WINDOW_S)
        raise TooManyRequests(
            "cancelled_time_exceeded",
            f"This account has cancelled {used_ms / 1000:.0f} s of device time within the last "
            f"hour, which is free, and at most {most_s} s are allowed. Let requests run to their "
            f"end, or wait {wait_s} s.",
            retry_after_s=wait_s,
            details={"limit": most_s, "unit": "cancelled_seconds_per_hour"},
        )

    async def used_s(self, account_id: int) -> int:
        """Return what an account has cancelled within the last hour, in seconds. Raise if the
        server does not answer."""
        _, _, used_ms, *_ = await self._run(account_id, amount_ms=0)
        return int(used_ms) // 1000

    async def count(self, cancelled_us: Mapping[int, int]) -> None:
        """Add cancelled device time, by account."""
        parts = [
            self._run(account_id, amount_ms=max(1, device_us // 1000))
            for account_id, device_us in cancelled_us.items()
        ]
        try:
            await asyncio.gather(*parts)
        except (RedisError, OSError) as error:
            log.warning("could not count cancelled device time: %s", type(error).__name__)

    async def _run(self, account_id: int, *, amount_ms: int, limit_ms: int = _ANY) -> Any:
        key = f"{self._namespace}:rate:{{{account_id}}}:cancelled"
        return await self._script(keys=[key], args=["take", WINDOW_S, limit_ms, amount_ms])
