"""Who has which slot, and which prompts are read in the next step. Pure: it sees no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from workers.contract.jobs import RequestId

PROMPT_TOKENS_PER_STEP: Final = 2048
"""Beyond this no further prompt is read in a step, so that running answers keep flowing."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The slots of one request, one for each choice; its prompt is read into the first."""

    request_id: RequestId
    slots: tuple[int, ...]
    prompt_tokens: int


class Scheduler:
    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._unread: deque[Seat] = deque()
        self._seats: dict[RequestId, Seat] = {}

    def seat(self, request_id: RequestId, *, choices: int, prompt_tokens: int) -> Seat | None:
        """Give a request its slots; None if there are not enough now."""
        if choices > len(self._free):
            return None
        slots = tuple(self._free.pop() for _ in range(choices))
        seat = Seat(request_id, slots, prompt_tokens)
        self._seats[request_id] = seat
        self._unread.append(seat)
        return seat

    def to_read(self) -> Sequence[Seat]:
        """Name the prompts for this step, the longest waiting first; at least one if any waits."""
        chosen: list[Seat] = []
        tokens = 0
        for seat in self._unread:
            if chosen and tokens + seat.prompt_tokens > PROMPT_TOKENS_PER_STEP:
                break
            chosen.append(seat)
            tokens += seat.prompt_tokens
        return chosen

    def mark_read(self, seat: Seat) -> None:
        self._unread.remove(seat)

    def leave(self, request_id: RequestId) -> None:
        """Free the slots of a request."""
        seat = self._seats.pop(request_id, None)
        if seat is None:
            return
        if seat in self._unread:
            self._unread.remove(seat)
        self._free.extend(reversed(seat.slots))
