"""Requests and tokens per minute of one key, counted in Redis for all gateway processes together.

A sliding window by the ``limits`` library. Tokens are counted as the most that a request can use,
before it runs, so that a limit cannot be passed by many requests at once.
"""

from __future__ import annotations

import math
import time
from typing import cast

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.accounts.keys import KeyInfo
from gateway.errors import TooManyRequests, Unavailable
from workers.contract.jobs import Usage


class RateLimits:
    def __init__(self, redis: Redis, *, namespace: str) -> None:
        storage = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix=f"{namespace}:limit",
            # The library hands its options on to the client; ours brings its own bounded pool.
            connection_pool=cast(str, redis.connection_pool),
        )
        self._limiter = SlidingWindowCounterRateLimiter(storage)

    async def take(self, key: KeyInfo, most: Usage) -> None:
        """Count a request against its key's limits; raise ``TooManyRequests`` if it is over."""
        if key.requests_per_minute is None and key.tokens_per_minute is None:
            return
        tokens = most.input_tokens + most.output_tokens
        try:
            if key.requests_per_minute is not None:
                await self._hit("requests", key, key.requests_per_minute, amount=1)
            if key.tokens_per_minute is not None and tokens:
                await self._hit("tokens", key, key.tokens_per_minute, amount=tokens)
        except (RedisError, OSError):
            raise Unavailable(
                "queue_unavailable",
                "The server that counts this key's limits does not answer; nothing was accepted.",
                retry_after_s=2,
            ) from None

    async def _hit(self, what: str, key: KeyInfo, per_minute: int, *, amount: int) -> None:
        if amount > per_minute:
            raise TooManyRequests(
                "rate_limit_exceeded",
                f"This request can use {amount} {what}, and this key is limited to {per_minute} "
                f"{what} per minute: it can never pass. Ask for less.",
                details={"limit": per_minute, "unit": what},
            )
        item: RateLimitItem = RateLimitItemPerMinute(per_minute)
        if await self._limiter.hit(item, what, str(key.id), cost=amount):
            return
        stats = await self._limiter.get_window_stats(item, what, str(key.id))
        raise TooManyRequests(
            "rate_limit_exceeded",
            f"This key is limited to {per_minute} {what} per minute; {stats.remaining} are left.",
            retry_after_s=min(60, max(1, math.ceil(stats.reset_time - time.time()))),
            details={"limit": per_minute, "unit": what},
        )
