"""Rate limits on requests and tokens per minute, counted in Redis for all gateway processes.

The script next to this file counts a request against all limits that cover it, or against none.
Before a request runs, the maximum of tokens that it can use is counted, so that concurrent requests
cannot exceed a limit together. Unused tokens are returned when it ends, and everything is returned
if it is not accepted.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from gateway.accounts.limits import Limit, Unit
from gateway.errors import TooManyRequests, Unavailable
from gateway.sql.outages import QUEUE_OUTAGE

log = logging.getLogger(__name__)

WINDOW_S: Final = 60


@dataclass(frozen=True, slots=True)
class Rate:
    """One number of a limit, and the amount to count against it."""

    limit: Limit
    unit: Unit
    per_minute: int
    amount: int

    @property
    def subject(self) -> str:
        """The limited key or account, as part of a sentence."""
        who = "this account" if self.limit.key_id is None else "this key"
        return who if self.limit.model is None else f"{who}, for {self.limit.model},"


@dataclass(frozen=True, slots=True)
class LimitUsage:
    """Usage of a limit within the last minute."""

    rate: Rate
    used: int
    reset_s: int
    """Seconds until the whole limit is free."""
    wait_s: int
    """Seconds until the requested amount is free; 0 if it was counted."""

    @property
    def remaining(self) -> int:
        return max(0, self.rate.per_minute - self.used)


@dataclass(frozen=True, slots=True)
class RateReservation:
    """Amounts counted for one request, in one second of the server's clock."""

    usages: tuple[LimitUsage, ...] = ()
    names: tuple[str, ...] = ()
    second: int = 0

    @property
    def note(self) -> str:
        """Note that the job carries for ``return_unused``; empty if nothing was counted."""
        return _encode_note((self.second, self.names)).decode() if self.names else ""

    def usages_undone(self) -> Sequence[LimitUsage]:
        """Return the usages after an ``undo``."""
        if not self.names:
            return self.usages
        return [
            replace(usage, used=max(0, usage.used - usage.rate.amount)) for usage in self.usages
        ]


@dataclass(frozen=True, slots=True)
class UnusedRates:
    """Amounts that a request reserved and did not use; ``note`` is that of its job."""

    note: str
    requests: int
    tokens: int


_encode_note: Final = msgspec.json.encode
_decode_note: Final = msgspec.json.Decoder(tuple[int, list[str]]).decode


def wanted(limits: Iterable[Limit], key_id: int, model: str, *, tokens: int) -> tuple[Rate, ...]:
    """Return every rate that covers a request of one key for a model."""
    amounts: dict[Unit, int] = {"requests": 1, "tokens": tokens}
    return tuple(
        Rate(limit, unit, per_minute, amount)
        for limit in limits
        if limit.covers(key_id, model)
        for unit, amount in amounts.items()
        if (per_minute := limit.per_minute(unit)) is not None
    )


def rates_of(limits: Iterable[Limit]) -> tuple[Rate, ...]:
    """Return every rate of some limits, of which nothing is to be counted."""
    units: tuple[Unit, ...] = ("requests", "tokens")
    return tuple(
        Rate(limit, unit, per_minute, 0)
        for limit in limits
        for unit in units
        if (per_minute := limit.per_minute(unit)) is not None
    )


class Rates:
    def __init__(self, redis: Redis, *, namespace: str, window_s: int = WINDOW_S) -> None:
        text = importlib.resources.files("gateway.accounts").joinpath("rates.lua").read_text()
        self._script = redis.register_script(text)
        self._namespace = namespace
        self._window_s = window_s

    async def take(self, rates: Sequence[Rate]) -> RateReservation:
        """Count a request against all of its rates, or against none if one of them has no room.

        If nothing was counted, one or more of the ``usages`` have a ``wait_s``; see
        ``refuse_overrun``. Raise ``Unavailable`` if the server does not answer.
        """
        if not rates:
            return RateReservation()
        names = tuple(self._name(rate) for rate in rates)
        numbers = [number for rate in rates for number in (rate.per_minute, rate.amount)]
        try:
            answer = await self._run(names, "take", self._window_s, *numbers)
        except QUEUE_OUTAGE:
            raise Unavailable(
                "queue_unavailable",
                "The server that counts limits does not answer; nothing was accepted.",
                retry_after_s=2,
            ) from None
        taken, second, *flat = answer
        usages = tuple(
            LimitUsage(rate, used, min(reset_s, self._window_s), min(wait_s, self._window_s))
            for rate, used, reset_s, wait_s in zip(
                rates, flat[0::3], flat[1::3], flat[2::3], strict=True
            )
        )
        return RateReservation(usages, names if taken else (), second)

    async def look(self, rates: Sequence[Rate]) -> tuple[LimitUsage, ...]:
        """Read the usage of rates without counting anything. Raise as ``take`` does."""
        return (await self.take([replace(rate, amount=0) for rate in rates])).usages

    async def undo(self, taken: RateReservation) -> None:
        """Undo a ``take``, for a request that was not accepted."""
        amounts = [usage.rate.amount for usage in taken.usages]
        await self._return(taken.second, taken.names, amounts)

    async def return_unused(self, ended: Iterable[UnusedRates]) -> None:
        """Return what ended requests did not use."""
        returns = []
        for unused in ended:
            if unused.note and (unused.requests or unused.tokens):
                second, names = _decode_note(unused.note)
                amounts = [
                    unused.tokens if name.endswith(":tokens") else unused.requests for name in names
                ]
                returns.append(self._return(second, names, amounts))
        await asyncio.gather(*returns)

    async def _return(self, second: int, names: Sequence[str], amounts: Sequence[int]) -> None:
        if not names:
            return
        try:
            await self._run(names, "give", second, *amounts)
        except QUEUE_OUTAGE as error:
            # Without this, the amount is free within a minute.
            log.warning("could not return unused limits: %s", type(error).__name__)

    async def _run(self, names: Sequence[str], *arguments: str | int) -> Any:
        return await self._script(keys=list(names), args=list(arguments))

    def _name(self, rate: Rate) -> str:
        # The braces keep the limits of an account in one slot of a cluster.
        limit = rate.limit
        name = f"{{{limit.account_id}}}:{limit.key_id or 0}:{limit.model or ''}"
        return f"{self._namespace}:rate:{name}:{rate.unit}"


def refuse_oversized(rates: Iterable[Rate]) -> None:
    """Raise ``TooManyRequests`` if a request alone exceeds a limit: waiting would not help."""
    for rate in rates:
        if rate.amount > rate.per_minute:
            raise TooManyRequests(
                "rate_limit_exceeded",
                f"This request can use {rate.amount} {rate.unit}, and {rate.subject} is limited to "
                f"{rate.per_minute} per minute, so it can never be accepted. Request less.",
                should_retry=False,
                details={"limit": rate.per_minute, "unit": rate.unit},
            )


def refuse_overrun(usages: Iterable[LimitUsage]) -> None:
    """Raise ``TooManyRequests`` for the limit with the longest wait, if any has no room."""
    full = [usage for usage in usages if usage.wait_s]
    if not full:
        return
    usage = max(full, key=lambda usage: usage.wait_s)
    rate = usage.rate
    raise TooManyRequests(
        "rate_limit_exceeded",
        f"{rate.subject[0].upper()}{rate.subject[1:]} is limited to {rate.per_minute} {rate.unit} "
        f"per minute. This request needs {rate.amount}, and {usage.remaining} are left; there will "
        f"be enough in {usage.wait_s} s.",
        retry_after_s=usage.wait_s,
        details={"limit": rate.per_minute, "unit": rate.unit},
    )
