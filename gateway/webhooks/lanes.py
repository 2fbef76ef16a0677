"""Limits on the concurrent webhook deliveries of a gateway. Pure; knows no SQL and no HTTP.

One account cannot fill the pool: deliveries are limited per account and per host. A receiver that
does not answer leaves the pool: after some consecutive failures its circuit opens, and while it is
open, one delivery at a time probes it. Circuits are kept per account and host, so that an account
cannot block the receiver of another one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

POOL: Final = 64
"""Maximum deliveries that one gateway runs concurrently."""
ACCOUNT_MAX: Final = 8
"""Maximum concurrent deliveries of one account."""
HOST_MAX: Final = 16
"""Maximum concurrent deliveries to one host; several accounts can share a receiver."""
FAILURES_MAX: Final = 3
"""Consecutive deliveries without an answer after which a circuit opens."""
PAUSE_S: Final = 30.0
PAUSE_MAX_S: Final = 600.0
CIRCUITS_MAX: Final = 10_000


@dataclass(slots=True)
class _Circuit:
    failures: int
    open_until: datetime


class Lanes:
    """Deliveries in flight, and circuits of receivers that do not answer."""

    def __init__(self) -> None:
        self._accounts: Counter[int] = Counter()
        self._hosts: Counter[str] = Counter()
        self._pairs: Counter[tuple[int, str]] = Counter()
        self._circuits: OrderedDict[tuple[int, str], _Circuit] = OrderedDict()

    def copy(self) -> Lanes:
        """Return a copy that can be filled in another thread, where circuits are only read."""
        made = Lanes()
        made._accounts = self._accounts.copy()
        made._hosts = self._hosts.copy()
        made._pairs = self._pairs.copy()
        made._circuits = self._circuits
        return made

    @property
    def in_flight(self) -> int:
        return self._accounts.total()

    @property
    def open_circuits(self) -> int:
        return sum(one.failures >= FAILURES_MAX for one in self._circuits.values())

    def room(self, account_id: int) -> int:
        """Return the number of deliveries that this account can start now."""
        return min(POOL - self.in_flight, ACCOUNT_MAX - self._accounts[account_id])

    @property
    def room_in_all(self) -> int:
        return POOL - self.in_flight

    def fits(self, account_id: int, host: str) -> bool:
        """Whether one more delivery to the host can start; a probed host gets one at a time."""
        circuit = self._circuits.get((account_id, host))
        probing = circuit is not None and circuit.failures >= FAILURES_MAX
        return self._hosts[host] < HOST_MAX and not (probing and self._pairs[account_id, host])

    def deferred_until(
        self, account_id: int, host: str, now: datetime, *, patience: timedelta
    ) -> datetime | None:
        """Return when a delivery to a silent receiver is due again, or None to send it now.

        ``patience`` is the time that the probe in flight can still take.
        """
        circuit = self._circuits.get((account_id, host))
        if circuit is None or circuit.failures < FAILURES_MAX:
            return None
        if circuit.open_until > now:
            return circuit.open_until
        return now + patience if self._pairs[account_id, host] else None

    def start(self, account_id: int, host: str) -> None:
        self._accounts[account_id] += 1
        self._hosts[host] += 1
        self._pairs[account_id, host] += 1

    def end(self, account_id: int, host: str) -> None:
        """Free the capacity of a delivery that was started."""
        self._accounts[account_id] -= 1
        self._hosts[host] -= 1
        self._pairs[account_id, host] -= 1
        # Unary plus drops counts of zero, so the counters do not grow beyond the pool.
        self._accounts, self._hosts, self._pairs = +self._accounts, +self._hosts, +self._pairs

    def answered(self, account_id: int, host: str) -> None:
        self._circuits.pop((account_id, host), None)

    def failed(self, account_id: int, host: str, now: datetime) -> None:
        """Count a delivery that got no answer, of whatever code."""
        key = (account_id, host)
        circuit = self._circuits.setdefault(key, _Circuit(0, now))
        if circuit.open_until > now:
            # It was in flight when the circuit opened; only probes extend the pause.
            return
        self._circuits.move_to_end(key)
        circuit.failures += 1
        if circuit.failures >= FAILURES_MAX:
            doublings = min(circuit.failures - FAILURES_MAX, 10)
            pause_s = min(PAUSE_S * 2**doublings, PAUSE_MAX_S)
            circuit.open_until = now + timedelta(seconds=pause_s)
        while len(self._circuits) > CIRCUITS_MAX:
            self._circuits.popitem(last=False)
