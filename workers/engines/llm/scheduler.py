"""Who takes part in a step, with which tokens, in which blocks of the cache. Pure: no tensor.

A request has a seat for each of its prompts, and a sequence for each answer to it. Seats wait until
there is room; their prompts are read in pieces of one block, those that have been read are written
on, one token in a step or more where some were guessed ahead. When the blocks run out, the seat
that may best wait gives its own back and later begins anew with what it has written so far: the
same tokens in the same order, so that its answer stays as it would have been.

Planning takes blocks and changes nothing else; only ``advance`` does, after the step has succeeded.
So a step that failed can be planned again without the request that was dropped.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from workers.contract.jobs import RequestId
from workers.engines.llm.blocks import BlockPool

STEP_TOKENS: Final = 2048
"""At most so many tokens in a step, so that running answers keep flowing while prompts are read."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class TokenSequence:
    """One answer as the cache knows it: how many tokens there are of it, the prompt included, how
    many of them are in the cache, and in which blocks."""

    seat: SequenceGroup
    index: int
    known: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    ahead: int = 0
    """Tokens that are guessed beyond the known ones, to be tried in the next step."""
    open: bool = True


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One prompt of a request. ``rank`` orders by urgency, the lowest first, and is never equal."""

    request_id: RequestId
    rank: tuple[float, int]
    priority: int
    prompt_tokens: int
    digests: Sequence[bytes]
    chains: list[TokenSequence] = field(default_factory=list)
    seated: bool = False
    read: int = 0
    """Of the prompt, how many tokens are in the cache."""
    blocks: list[int] = field(default_factory=list)
    """Of the prompt, until it has been read; then each chain has its own."""
    furthest: int = 0
    """How much of the prompt was in the cache at any time."""
    cached: int | None = None
    """How much of the prompt was in the cache already when it was first seated."""

    @property
    def reading(self) -> bool:
        return self.seated and self.read < self.prompt_tokens

    @property
    def writing(self) -> Iterator[TokenSequence]:
        return (chain for chain in self.chains if chain.open)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Of a prompt, the tokens from ``start`` to before ``stop``: one block, or the rest."""

    seat: SequenceGroup
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.seat.prompt_tokens


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Of a chain, the tokens from ``start`` to before ``stop``, known or guessed."""

    chain: TokenSequence
    start: int
    stop: int

    @property
    def is_news(self) -> bool:
        """Whether something comes after them that is not known yet."""
        return self.stop >= self.chain.known


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does, in this order: blank ``fresh`` blocks, run, make ``copies``."""

    fresh: tuple[int, ...]
    turns: tuple[DecodeChunk, ...]
    pieces: tuple[PrefillChunk, ...]
    copies: tuple[tuple[int, int], ...]
    """Blocks half full of a prompt, to be copied from one to another, for each further choice."""


class Scheduler:
    """Seats for ``slots`` answers at a time, in the blocks of a pool.

    ``width`` is the most tokens of one answer in a step: one, and those guessed ahead.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        slots: int,
        block_tokens: int,
        width: int = 1,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._block = block_tokens
        self._width = width
        self._budget = max(step_tokens, slots + block_tokens)
        self._seats: dict[RequestId, list[SequenceGroup]] = {}
        self._waiting: list[SequenceGroup] = []
        self._seated: list[SequenceGroup] = []
        self._fresh: list[int] = []
        self._forks: dict[SequenceGroup, list[int]] = {}
        """Blocks for the further choices of prompts that are still being read."""
        self._order = itertools.count()
        self.preempted = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block)

    def fits(self, prompt_tokens: int, choices: int, limit: int) -> bool:
        """Whether a prompt could ever be answered to its end, with everything else gone."""
        whole = prompt_tokens // self._block
        each = self.blocks_of(prompt_tokens + limit) - whole
        return choices <= self._slots and whole + choices * each <= self._pool.count

    def add(
        self,
        request_id: RequestId,
        *,
        prompt_tokens: int,
        choices: int,
        digests: Sequence[bytes] = (),
        due: float = 0.0,
        priority: int = 0,
    ) -> SequenceGroup:
        """Let a prompt wait for its place; the earlier it is due, the sooner it comes."""
        seats = self._seats.setdefault(request_id, [])
        rank = (due, next(self._order))
        seat = SequenceGroup(request_id, rank, priority, prompt_tokens, digests)
        seat.chains = [TokenSequence(seat, index, prompt_tokens) for index in range(choices)]
        seats.append(seat)
        insort(self._waiting, seat, key=attrgetter("rank"))
        return seat

    # --- One step ---------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        turns = [
            turn
            for seat in list(self._seated)
            if seat.seated and not seat.reading
            for turn in self._turns(seat)
        ]
        self._seat_waiting()
        turns = [turn for turn in turns if self._still(turn)]
        reading = [seat for seat in self._seated if seat.reading]
        room = self._budget - len(turns)
        spare = room - (self._block if reading else 0)
        for place, turn in enumerate(turns):
            # Guesses come after what is known: everybody's next token, and somebody's prompt.
            more = min(turn.stop - turn.start - 1, max(spare, 0))
            spare, room = spare - more, room - more
            turns[place] = DecodeChunk(turn.chain, turn.start, turn.start + 1 + more)
        pieces = []
        for seat in reading:
            for start in range(seat.read, seat.prompt_tokens, self._block):
                stop = min(start + self._block, seat.prompt_tokens)
                if stop - start > room:
                    break
                room -= stop - start
                pieces.append(PrefillChunk(seat, start, stop))
            else:
                continue
            break
        copies = [copy for piece in pieces if piece.is_last for copy in self._copies(piece.seat)]
        return StepPlan(tuple(self._fresh), tuple(turns), tuple(pieces), tuple(copies))

    def advance(self, plan: StepPlan) -> None:
        """Note that a plan was carried out."""
        self._fresh.clear()
        for turn in plan.turns:
            turn.chain.computed = turn.stop
        for piece in plan.pieces:
            seat = piece.seat
            seat.read = piece.stop
            seat.furthest = max(seat.furthest, piece.stop)
            if piece.stop - piece.start == self._block:
                place = piece.start // self._block
                if place < len(seat.digests):
                    self._pool.publish(seat.blocks[place], seat.digests[place])
            if piece.is_last:
                self._part(seat)

    def know(self, chain: TokenSequence, tokens: int) -> None:
        """A chain has so many more tokens; what was guessed beyond them was wrong."""
        chain.known += tokens
        chain.computed = min(chain.computed, chain.known - 1)
        chain.ahead = 0

    def close(self, chain: TokenSequence) -> None:
        """Plan nothing more for an answer and give its blocks back."""
        if not chain.open:
            return
        chain.open = False
        seat = chain.seat
        self._pool.drop(chain.blocks)
        chain.blocks = []
        if not any(seat.writing):
            self._leave(seat)

    def halt(self, request_id: RequestId) -> None:
        """Plan nothing more for a request."""
        for seat in self._seats.get(request_id, ()):
            for chain in seat.chains:
                self.close(chain)

    def leave(self, request_id: RequestId) -> None:
        """Forget a request."""
        self.halt(request_id)
        self._seats.pop(request_id, None)

    # --- Room -------------------------------------------------------------------------------------

    def _turns(self, seat: SequenceGroup) -> Iterator[DecodeChunk]:
        """Take the blocks that a seat's next tokens need, from others if there are none free."""
        for chain in list(seat.writing):
            stop = min(chain.known + chain.ahead, chain.computed + self._width)
            missing = self.blocks_of(stop) - len(chain.blocks)
            while missing > 0 and (blocks := self._pool.take(missing)) is None:
                if chain.ahead:
                    # Rather guess nothing than take somebody's place.
                    chain.ahead = 0
                    stop = min(chain.known, chain.computed + self._width)
                    missing = self.blocks_of(stop) - len(chain.blocks)
                    continue
                worst = self._seated[-1]
                self._preempt(worst)
                if worst is seat:
                    return
            if missing > 0:
                assert blocks is not None
                chain.blocks += blocks
                self._fresh += blocks
            yield DecodeChunk(chain, chain.computed, stop)

    @staticmethod
    def _still(turn: DecodeChunk) -> bool:
        """Whether nobody has taken the seat of a turn since it was planned."""
        return turn.chain.seat.seated and not turn.chain.seat.reading

    def _seat_waiting(self) -> None:
        """Seat those who wait, in their order; nobody overtakes, or the large would wait for ever.

        Who is more urgent takes the place of who is less so and has a lower priority.
        """
        while self._waiting:
            seat = self._waiting[0]
            if not self._has_slots(seat) or not self._take_blocks(seat):
                worst = self._seated[-1] if self._seated else seat
                if worst.priority >= seat.priority or worst.rank < seat.rank:
                    return
                self._preempt(worst)
                continue
            del self._waiting[0]
            seat.seated = True
            insort(self._seated, seat, key=attrgetter("rank"))

    def _has_slots(self, seat: SequenceGroup) -> bool:
        taken = sum(1 for other in self._seated for _ in other.writing)
        return taken + sum(1 for _ in seat.writing) <= self._slots

    def _take_blocks(self, seat: SequenceGroup) -> bool:
        """Take the blocks of a prompt, those that are in the cache and those that are not yet."""
        found: list[int] = []
        # The last token is always read again: what comes after it is in no cache.
        for digest in seat.digests[: (seat.prompt_tokens - 1) // self._block]:
            block = self._pool.find(digest)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._pool.share(block)
        choices = sum(1 for _ in seat.writing)
        half = seat.prompt_tokens % self._block != 0
        copies = choices - 1 if half else 0
        missing = self.blocks_of(seat.prompt_tokens) - len(found) + copies
        # Everybody who writes may soon need a block more.
        reserve = sum(1 for other in self._seated for _ in other.writing)
        blocks = self._pool.take(missing) if missing + reserve <= self._pool.available else None
        if blocks is None:
            self._pool.drop(found)
            return False
        self._fresh += blocks
        if copies:
            self._forks[seat] = blocks[-copies:]
            del blocks[-copies:]
        seat.blocks = found + blocks
        seat.read = len(found) * self._block
        if seat.cached is None:
            seat.cached = seat.furthest = seat.read
        return True

    def _copies(self, seat: SequenceGroup) -> list[tuple[int, int]]:
        return [(seat.blocks[-1], target) for target in self._forks.get(seat, ())]

    def _part(self, seat: SequenceGroup) -> None:
        """A prompt has been read: each of its chains goes on from there in blocks of its own."""
        copies = self._forks.pop(seat, [])
        first, *others = seat.writing
        first.blocks, seat.blocks = seat.blocks, []
        first.computed = seat.prompt_tokens
        whole = first.blocks[: seat.prompt_tokens // self._block]
        for place, chain in enumerate(others):
            for block in whole:
                self._pool.share(block)
            chain.blocks = whole + copies[place : place + 1]
            chain.computed = seat.prompt_tokens

    def _preempt(self, seat: SequenceGroup) -> None:
        """Send a seat back to those who wait; what it has written so far is not forgotten."""
        self.preempted += 1
        self._vacate(seat)
        insort(self._waiting, seat, key=attrgetter("rank"))

    def _leave(self, seat: SequenceGroup) -> None:
        if seat.seated:
            self._vacate(seat)
        elif seat in self._waiting:
            self._waiting.remove(seat)

    def _vacate(self, seat: SequenceGroup) -> None:
        self._seated.remove(seat)
        seat.seated = False
        seat.read = 0
        blocks = [*seat.blocks, *self._forks.pop(seat, [])]
        self._pool.drop(blocks)
        seat.blocks = []
        for chain in seat.chains:
            self._pool.drop(chain.blocks)
            chain.blocks = []
            chain.computed = chain.ahead = 0
        self._fresh = [block for block in self._fresh if self._pool.users(block)]
