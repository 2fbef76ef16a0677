"""Who has which slots, which prompts are read in the next step, who writes. Pure: no tensor.

Planning changes nothing; only ``advance`` does, after the step has succeeded. So a step that failed
can be planned again without the request that was dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from workers.contract.jobs import RequestId

PIECE_TOKENS: Final = 512
"""A long prompt is read in pieces of so many tokens, counted from its beginning whatever the load:
other pieces would be other sums, and the answer might depend on who else is running."""
STEP_TOKENS: Final = 2048
"""At most so many tokens of prompts are read in a step, so that running answers keep flowing."""


@dataclass(slots=True, eq=False)
class Seat:
    """The slots of one request, one for each choice; its prompt is read into the first."""

    request_id: RequestId
    slots: tuple[int, ...]
    prompt_tokens: int
    read: int = 0
    """Of the prompt, how many tokens are in the cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Of a prompt, the tokens from ``start`` to before ``stop``."""

    seat: Seat
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.seat.prompt_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next step does."""

    pieces: tuple[Piece, ...]
    writers: tuple[Seat, ...]
    """Those whose prompts were read in earlier steps."""


class Scheduler:
    """Prompts are read in the order of arrival, each to its end before the next."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._seats: dict[RequestId, Seat] = {}
        self._active: dict[RequestId, Seat] = {}

    def seat(self, request_id: RequestId, *, choices: int, prompt_tokens: int) -> Seat | None:
        """Give a request its slots; None if there are not enough now."""
        if choices > len(self._free):
            return None
        seat = Seat(request_id, tuple(self._free.pop() for _ in range(choices)), prompt_tokens)
        self._seats[request_id] = self._active[request_id] = seat
        return seat

    def plan(self) -> Plan:
        pieces: list[Piece] = []
        writers: list[Seat] = []
        room = STEP_TOKENS
        for seat in self._active.values():
            if seat.read == seat.prompt_tokens:
                writers.append(seat)
                continue
            for start in range(seat.read, seat.prompt_tokens, PIECE_TOKENS):
                stop = min(start + PIECE_TOKENS, seat.prompt_tokens)
                room -= stop - start
                if room < 0:
                    break
                pieces.append(Piece(seat, start, stop))
        return Plan(tuple(pieces), tuple(writers))

    def advance(self, plan: Plan) -> None:
        """Note that the pieces of a plan were read."""
        for piece in plan.pieces:
            piece.seat.read = piece.stop

    def halt(self, request_id: RequestId) -> None:
        """Plan nothing more for a request, which keeps its slots until it leaves."""
        self._active.pop(request_id, None)

    def leave(self, request_id: RequestId) -> None:
        """Free the slots of a request."""
        self.halt(request_id)
        self._free.extend(reversed(self._seats.pop(request_id).slots))
