"""Any order of arrivals, cancels and failed steps gives each request the tokens that it has alone.

The cache is played by a table of what stands in which place of which block, so that a block that is
shared wrongly, reused too early or not blanked shows as a wrong token.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.contract.jobs import RequestId
from workers.engines.llm.blocks import BlockPool, digests
from workers.engines.llm.scheduler import Scheduler, SequenceGroup, StepPlan, TokenSequence

BLOCK = 4
SLOTS = 4
STALE = -1


def _next_token(tokens: Sequence[int], choice: int) -> int:
    """What a model says after these tokens: anything, but always the same."""
    said = hashlib.sha256(repr((list(tokens), choice)).encode()).digest()
    return said[0] % 50


def _alone(prompt: Sequence[int], choice: int, limit: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(_next_token(tokens, choice))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Answering:
    prompt: list[int]
    limit: int
    seat: SequenceGroup
    answers: list[list[int]]
    guesses: dict[int, list[int]] = field(default_factory=dict)

    def tokens(self, chain: TokenSequence) -> list[int]:
        return [*self.prompt, *self.answers[chain.index]]


class World:
    """Carries plans out over a table of blocks, as an engine does over tensors."""

    def __init__(self, *, blocks: int, width: int, step_tokens: int = 24, seed: int = 0) -> None:
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(
            self.pool, slots=SLOTS, block_tokens=BLOCK, width=width, step_tokens=step_tokens
        )
        self.width = width
        self.budget = max(step_tokens, SLOTS + BLOCK)
        self.content = {block: [STALE] * BLOCK for block in range(blocks + 1)}
        self.running: dict[RequestId, Answering] = {}
        self.done: dict[RequestId, list[list[int]]] = {}
        self.random = random.Random(seed)

    def arrive(self, name: str, prompt: list[int], choices: int, limit: int, priority: int) -> None:
        id = RequestId(name)
        if not self.scheduler.fits(len(prompt), choices, limit):
            return
        seat = self.scheduler.add(
            id,
            prompt_tokens=len(prompt),
            choices=choices,
            digests=digests("1", prompt, BLOCK),
            due=float(len(self.running) - 3 * priority),
            priority=priority,
        )
        self.running[id] = Answering(prompt, limit, seat, [[] for _ in range(choices)])

    def cancel(self, id: RequestId) -> None:
        self.scheduler.halt(id)
        self.scheduler.leave(id)
        del self.running[id]

    def step(self, *, fails: bool = False) -> StepPlan:
        for answering in self.running.values():
            for chain in answering.seat.writing:
                self._guess(answering, chain)
        plan = self.scheduler.plan()
        self._check(plan)
        for block in plan.fresh:
            self.content[block] = [STALE] * BLOCK
        for turn in plan.turns:
            answering = self.running[turn.chain.seat.request_id]
            row = [*answering.tokens(turn.chain), *answering.guesses.get(turn.chain.index, [])]
            self._write(turn.chain.blocks, row, turn.start, turn.stop)
        for piece in plan.pieces:
            answering = self.running[piece.seat.request_id]
            self._write(piece.seat.blocks, answering.prompt, piece.start, piece.stop)
        for source, target in plan.copies:
            self.content[target] = list(self.content[source])
        if fails:
            return plan
        self.scheduler.advance(plan)
        for turn in plan.turns:
            if turn.is_news:
                self._verify(self.running[turn.chain.seat.request_id], turn.chain, turn.stop)
        for piece in plan.pieces:
            if piece.is_last:
                self._begin(self.running[piece.seat.request_id])
        for id, answering in list(self.running.items()):
            if not any(answering.seat.writing):
                self.done[id] = answering.answers
                self.scheduler.leave(id)
                del self.running[id]
        return plan

    def _guess(self, answering: Answering, chain: TokenSequence) -> None:
        """Guess some tokens, some of them rightly."""
        if chain.known - chain.computed != 1 or chain.ahead:
            return
        left = answering.limit - len(answering.answers[chain.index])
        row = answering.tokens(chain)
        guesses: list[int] = []
        for _ in range(min(self.width - 1, left - 1)):
            right = _next_token([*row, *guesses], chain.index)
            guesses.append(right if self.random.random() < 0.6 else 99)
        answering.guesses[chain.index] = guesses
        chain.ahead = len(guesses)

    def _write(self, blocks: Sequence[int], row: Sequence[int], start: int, stop: int) -> None:
        for place in range(start, stop):
            self.content[blocks[place // BLOCK]][place % BLOCK] = row[place]

    def _read(self, blocks: Sequence[int], tokens: int) -> list[int]:
        return [self.content[blocks[place // BLOCK]][place % BLOCK] for place in range(tokens)]

    def _begin(self, answering: Answering) -> None:
        for chain in answering.seat.writing:
            assert self._read(chain.blocks, chain.computed) == answering.prompt
            if not answering.answers[chain.index]:
                self._say(answering, chain, [_next_token(answering.prompt, chain.index)])

    def _verify(self, answering: Answering, chain: TokenSequence, stop: int) -> None:
        """Take guesses for as long as they are what the model says."""
        row = self._read(chain.blocks, stop)
        said: list[int] = []
        for place in range(chain.known, stop + 1):
            said.append(_next_token(row[:place], chain.index))
            if place < stop and row[place] != said[-1]:
                break
        self._say(answering, chain, said)

    def _say(self, answering: Answering, chain: TokenSequence, tokens: list[int]) -> None:
        answer = answering.answers[chain.index]
        answer += tokens
        if len(answer) == answering.limit:
            self.scheduler.close(chain)
        else:
            self.scheduler.know(chain, len(tokens))

    def _check(self, plan: StepPlan) -> None:
        spent = sum(turn.stop - turn.start for turn in plan.turns)
        spent += sum(piece.stop - piece.start for piece in plan.pieces)
        assert spent <= self.budget
        assert spent or not self.running, "somebody always goes on"
        assert len({turn.chain for turn in plan.turns}) == len(plan.turns) <= SLOTS
        again = self.scheduler.plan()
        assert (again.turns, again.pieces, again.copies) == (plan.turns, plan.pieces, plan.copies)
        assert set(again.fresh) == set(plan.fresh)
        users: dict[int, int] = {}
        for answering in self.running.values():
            seat = answering.seat
            for table in (seat.blocks, *(chain.blocks for chain in seat.chains)):
                assert len(set(table)) == len(table)
                for block in table:
                    users[block] = users.get(block, 0) + 1
        for _, target in plan.copies:
            users[target] = users.get(target, 0) + 1
        for block, count in users.items():
            assert self.pool.users(block) >= count
        written = [self._places(turn.chain.blocks, turn.start, turn.stop) for turn in plan.turns]
        written += [self._places(p.seat.blocks, p.start, p.stop) for p in plan.pieces]
        places = [place for part in written for place in part]
        assert len(set(places)) == len(places), "nobody writes where somebody else does"

    @staticmethod
    def _places(blocks: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
        return [(blocks[place // BLOCK], place % BLOCK) for place in range(start, stop)]


_arrivals = st.tuples(
    st.just("arrive"),
    st.integers(0, 3),  # which beginning it shares with others
    st.integers(1, 22),
    st.integers(1, 3),
    st.integers(1, 14),
    st.integers(-1, 1),
)
_moves = st.lists(
    st.one_of(
        _arrivals,
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("fail")),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(_moves, st.integers(8, 40), st.integers(1, 4), st.integers(0, 999))
def test_whoever_comes_and_goes_each_answer_is_as_it_is_alone(
    moves: list[tuple[object, ...]], blocks: int, width: int, seed: int
) -> None:
    world = World(blocks=blocks, width=width, seed=seed)
    wanted: dict[RequestId, tuple[list[int], int, int]] = {}
    for number, move in enumerate(moves):
        match move:
            case ("arrive", int(kind), int(length), int(choices), int(limit), int(priority)):
                prompt = [kind * 100 + place % 9 for place in range(length)]
                world.arrive(str(number), prompt, choices, limit, priority)
                if RequestId(str(number)) in world.running:
                    wanted[RequestId(str(number))] = (prompt, choices, limit)
            case ("cancel", int(which)) if world.running:
                id = list(world.running)[which % len(world.running)]
                world.cancel(id)
                del wanted[id]
            case ("step",):
                world.step()
            case ("fail",):
                world.step(fails=True)
    for _ in range(3000):
        if not world.running:
            break
        world.step()
    assert not world.running, "nobody starves"
    assert world.pool.available == blocks, "no block is lost"
    for id, (prompt, choices, limit) in wanted.items():
        assert world.done[id] == [_alone(prompt, choice, limit) for choice in range(choices)]


def test_what_was_read_before_is_not_read_again() -> None:
    world = World(blocks=40, width=1)
    prompt = list(range(BLOCK * 3 + 1))
    world.arrive("first", prompt, 1, 2, 0)
    while world.running:
        world.step()

    world.arrive("second", prompt, 1, 2, 0)
    plan = world.step()

    assert [(piece.start, piece.stop) for piece in plan.pieces] == [(BLOCK * 3, BLOCK * 3 + 1)]
    assert plan.pieces[0].seat.cached == BLOCK * 3


def test_the_last_token_is_always_read_for_what_comes_after_it_is_in_no_cache() -> None:
    world = World(blocks=40, width=1)
    for name in ("first", "second"):
        world.arrive(name, list(range(BLOCK * 2)), 1, 1, 0)
        plan = world.step()

    assert [(piece.start, piece.stop) for piece in plan.pieces] == [(BLOCK, BLOCK * 2)]


def test_what_was_not_asked_for_longest_goes_first() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3) or []
    for block, digest in zip(blocks, (b"1", b"2", b"3"), strict=True):
        pool.publish(block, digest)
    pool.drop(blocks)
    first = pool.find(b"1")
    assert first is not None
    pool.share(first)
    pool.drop([first])

    pool.take(2)

    assert [pool.find(digest) is None for digest in (b"1", b"2", b"3")] == [False, True, True]


def test_the_same_prompt_of_somebody_else_is_not_found() -> None:
    tokens = list(range(8))
    mine, theirs = digests("1", tokens, BLOCK), digests("2", tokens, BLOCK)

    assert not set(mine) & set(theirs)
    assert digests("1", tokens[:6], BLOCK) == mine[:1]
    assert digests("1", [7, *tokens[1:]], BLOCK)[1] != mine[1]


def test_the_more_urgent_takes_the_place_of_a_lower_priority_which_goes_on_later() -> None:
    world = World(blocks=100, width=1)
    for name in "abcd":
        world.arrive(name, [1, 2, 3], 1, 10, -1)
    for _ in range(4):
        world.step()

    world.arrive("urgent", [5, 6], 1, 2, 1)
    plan = world.step()

    assert [piece.seat.request_id for piece in plan.pieces] == ["urgent"]
    assert world.scheduler.preempted == 1
    while world.running:
        world.step()
    assert all(world.done[RequestId(name)] == [_alone([1, 2, 3], 0, 10)] for name in "abcd")


def test_too_few_blocks_cost_the_last_to_come_its_place_and_nobody_a_token() -> None:
    world = World(blocks=9, width=1)
    for number in range(4):
        world.arrive(str(number), [number, 2, 3], 1, 16, 0)
    for _ in range(400):
        if not world.running:
            break
        world.step()

    assert world.scheduler.preempted > 0
    for number in range(4):
        assert world.done[RequestId(str(number))] == [_alone([number, 2, 3], 0, 16)]


@pytest.mark.parametrize(
    ("prompt", "choices", "limit", "fits"),
    [(8, 1, 4, True), (8, 2, 4, True), (8, 3, 4, False), (16, 1, 1, False), (1, 5, 1, False)],
)
def test_what_could_never_end_is_not_let_in(
    prompt: int, choices: int, limit: int, fits: bool
) -> None:
    scheduler = Scheduler(BlockPool(4), slots=SLOTS, block_tokens=BLOCK)

    assert scheduler.fits(prompt, choices, limit) is fits
