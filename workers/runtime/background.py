"""Work beside the step loop: what needs no device runs on other threads, in order for each owner.

Files are decoded and encoded here, while the loop goes on with other steps. Results come back in
the thread of the loop, by ``take``; nothing else of an owner is touched by a thread. Knows neither
engines nor jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

LIMIT_US: Final = 900 * 1_000_000
"""What takes longer hangs, and a thread cannot be ended but with its process."""


class StuckError(Exception):
    """A piece of work does not come to its end."""


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """A piece of work that has ended; ``error`` is what it raised instead of a result."""

    owner: Hashable
    name: str
    result: Any
    error: Exception | None
    spent_us: int


@dataclass(slots=True, eq=False)
class _Piece:
    owner: Hashable
    name: str
    work: Callable[[], Any]
    began_us: int = 0


class Background:
    """``start`` has a function run on some thread, and at once in this one if there is none.

    ``wake`` is called by that thread when there is something to take.
    """

    def __init__(
        self,
        now_us: Callable[[], int],
        start: Callable[[Callable[[], None]], object] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._now_us = now_us
        self._start = start or (lambda work: work())
        self._wake = wake
        self._chains: dict[Hashable, deque[_Piece]] = {}
        self._running: dict[Hashable, _Piece] = {}
        self._done: deque[Done] = deque()

    def put(self, owner: Hashable, name: str, work: Callable[[], Any]) -> None:
        """Have some work done after what the same owner has put before."""
        self._chains.setdefault(owner, deque()).append(_Piece(owner, name, work))
        self._go_on(owner)

    def drop(self, owner: Hashable) -> None:
        """Forget what has not begun; what runs ends, and its result is still to be taken."""
        self._chains.pop(owner, None)

    def pending(self, owner: Hashable) -> int:
        """Pieces of an owner that were put and not taken back yet."""
        return len(self._chains.get(owner, ())) + (owner in self._running)

    @property
    def idle(self) -> bool:
        return not self._running

    @property
    def has_done(self) -> bool:
        return bool(self._done)

    def take(self) -> list[Done]:
        """What has ended since. Raise ``StuckError`` if something takes for ever."""
        taken: list[Done] = []
        while self._done:
            done = self._done.popleft()
            del self._running[done.owner]
            taken.append(done)
            self._go_on(done.owner)
        now_us = self._now_us()
        for piece in self._running.values():
            if piece.began_us and now_us - piece.began_us > LIMIT_US:
                raise StuckError(f"{piece.name} has not ended in {LIMIT_US // 1_000_000} s")
        return taken

    def _go_on(self, owner: Hashable) -> None:
        chain = self._chains.get(owner)
        if not chain or owner in self._running:
            return
        piece = self._running[owner] = chain.popleft()
        if not chain:
            del self._chains[owner]
        self._start(lambda: self._run(piece))

    def _run(self, piece: _Piece) -> None:
        piece.began_us = self._now_us()
        result, error = None, None
        try:
            result = piece.work()
        except Exception as raised:
            error = raised
        spent_us = self._now_us() - piece.began_us
        self._done.append(Done(piece.owner, piece.name, result, error, spent_us))
        self._wake()
