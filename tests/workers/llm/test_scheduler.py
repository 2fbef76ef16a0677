"""Any order of arrivals, cancellations and failed steps yields the tokens of a request run alone.

A table of the tokens in each block stands in for the cache, so that a block that is shared wrongly,
reused too early or not zeroed shows as a wrong token.
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
from workers.engines.llm.scheduling.blocks import BlockPool, Digests
from workers.engines.llm.scheduling.scheduler import (
    Scheduler,
    SequenceGroup,
    StepPlan,
    TokenSequence,
)

BLOCK = 4
SLOTS = 4
STALE = -1


def _digests(owner: str, tokens: Sequence[int]) -> list[bytes]:
    digests = Digests(owner, BLOCK)
    digests.extend(tokens)
    return digests.found


def _next_token(tokens: Sequence[int], choice: int) -> int:
    """Return the token that the model samples next: arbitrary, but always the same."""
    digest = hashlib.sha256(repr((list(tokens), choice)).encode()).digest()
    return digest[0] % 50


def _alone(prompt: Sequence[int], choice: int, limit: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(_next_token(tokens, choice))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Request:
    prompt: list[int]
    limit: int
    group: SequenceGroup
    answers: list[list[int]]
    drafts: dict[int, list[int]] = field(default_factory=dict)

    def tokens(self, sequence: TokenSequence) -> list[int]:
        return [*self.prompt, *self.answers[sequence.index]]


class World:
    """Executes plans over a table of blocks, as an engine does over tensors."""

    def __init__(
        self, *, blocks: int, decode_tokens_max: int, step_tokens: int = 24, seed: int = 0
    ) -> None:
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(
            self.pool,
            slots=SLOTS,
            block_tokens=BLOCK,
            decode_tokens_max=decode_tokens_max,
            step_tokens=step_tokens,
        )
        self.decode_tokens_max = decode_tokens_max
        self.budget = max(step_tokens, SLOTS + BLOCK)
        self.content = {block: [STALE] * BLOCK for block in range(blocks + 1)}
        self.running: dict[RequestId, Request] = {}
        self.done: dict[RequestId, list[list[int]]] = {}
        self.random = random.Random(seed)

    def arrive(self, name: str, prompt: list[int], choices: int, limit: int, priority: int) -> None:
        id = RequestId(name)
        if not self.scheduler.fits(len(prompt), choices, limit):
            return
        group = self.scheduler.add(
            id,
            prompt_tokens=len(prompt),
            choices=choices,
            digests=_digests("1", prompt),
            due=float(len(self.running) - 3 * priority),
            priority=priority,
        )
        self.running[id] = Request(prompt, limit, group, [[] for _ in range(choices)])

    def cancel(self, id: RequestId) -> None:
        self.scheduler.stop(id)
        self.scheduler.remove(id)
        del self.running[id]

    def step(self, *, fails: bool = False) -> StepPlan:
        for request in self.running.values():
            for sequence in request.group.open_sequences:
                self._propose(request, sequence)
        plan = self.scheduler.plan()
        self._check(plan)
        for block in plan.blocks_to_zero:
            self.content[block] = [STALE] * BLOCK
        for decode in plan.decodes:
            request = self.running[decode.sequence.group.request_id]
            row = [
                *request.tokens(decode.sequence),
                *request.drafts.get(decode.sequence.index, []),
            ]
            self._write(decode.sequence.blocks, row, decode.start, decode.stop)
        for prefill in plan.prefills:
            request = self.running[prefill.group.request_id]
            self._write(prefill.group.blocks, request.prompt, prefill.start, prefill.stop)
        for source, target in plan.block_copies:
            self.content[target] = list(self.content[source])
        if fails:
            return plan
        self.scheduler.advance(plan)
        for decode in plan.decodes:
            if decode.needs_logits:
                self._verify(
                    self.running[decode.sequence.group.request_id], decode.sequence, decode.stop
                )
        for prefill in plan.prefills:
            if prefill.is_last:
                self._begin(self.running[prefill.group.request_id])
        for id, request in list(self.running.items()):
            if not any(request.group.open_sequences):
                self.done[id] = request.answers
                self.scheduler.remove(id)
                del self.running[id]
        return plan

    def _propose(self, request: Request, sequence: TokenSequence) -> None:
        """Propose draft tokens, some of them right."""
        if sequence.length - sequence.computed != 1 or sequence.draft_tokens:
            return
        left = request.limit - len(request.answers[sequence.index])
        row = request.tokens(sequence)
        drafts: list[int] = []
        for _ in range(min(self.decode_tokens_max - 1, left - 1)):
            right = _next_token([*row, *drafts], sequence.index)
            drafts.append(right if self.random.random() < 0.6 else 99)
        request.drafts[sequence.index] = drafts
        sequence.draft_tokens = len(drafts)

    def _write(self, blocks: Sequence[int], row: Sequence[int], start: int, stop: int) -> None:
        for place in range(start, stop):
            self.content[blocks[place // BLOCK]][place % BLOCK] = row[place]

    def _read(self, blocks: Sequence[int], tokens: int) -> list[int]:
        return [self.content[blocks[place // BLOCK]][place % BLOCK] for place in range(tokens)]

    def _begin(self, request: Request) -> None:
        for sequence in request.group.open_sequences:
            assert self._read(sequence.blocks, sequence.computed) == request.prompt
            if not request.answers[sequence.index]:
                self._append(request, sequence, [_next_token(request.prompt, sequence.index)])

    def _verify(self, request: Request, sequence: TokenSequence, stop: int) -> None:
        """Accept draft tokens for as long as they are what the model samples."""
        row = self._read(sequence.blocks, stop)
        sampled: list[int] = []
        for place in range(sequence.length, stop + 1):
            sampled.append(_next_token(row[:place], sequence.index))
            if place < stop and row[place] != sampled[-1]:
                break
        self._append(request, sequence, sampled)

    def _append(self, request: Request, sequence: TokenSequence, tokens: list[int]) -> None:
        answer = request.answers[sequence.index]
        answer += tokens
        if len(answer) == request.limit:
            self.scheduler.close(sequence)
        else:
            self.scheduler.append(sequence, len(tokens))

    def _check(self, plan: StepPlan) -> None:
        spent = sum(decode.stop - decode.start for decode in plan.decodes)
        spent += sum(prefill.stop - prefill.start for prefill in plan.prefills)
        assert spent <= self.budget
        assert spent or not self.running, "every step makes progress"
        assert len({decode.sequence for decode in plan.decodes}) == len(plan.decodes) <= SLOTS
        again = self.scheduler.plan()
        assert (again.decodes, again.prefills, again.block_copies) == (
            plan.decodes,
            plan.prefills,
            plan.block_copies,
        )
        assert set(again.blocks_to_zero) == set(plan.blocks_to_zero)
        users: dict[int, int] = {}
        for request in self.running.values():
            group = request.group
            for table in (group.blocks, *(sequence.blocks for sequence in group.sequences)):
                assert len(set(table)) == len(table)
                for block in table:
                    users[block] = users.get(block, 0) + 1
        for _, target in plan.block_copies:
            users[target] = users.get(target, 0) + 1
        for block, count in users.items():
            assert self.pool.users(block) >= count
        written = [
            self._places(decode.sequence.blocks, decode.start, decode.stop)
            for decode in plan.decodes
        ]
        written += [self._places(p.group.blocks, p.start, p.stop) for p in plan.prefills]
        places = [place for part in written for place in part]
        assert len(set(places)) == len(places), "no two chunks write to the same place"

    @staticmethod
    def _places(blocks: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
        return [(blocks[place // BLOCK], place % BLOCK) for place in range(start, stop)]


_arrivals = st.tuples(
    st.just("arrive"),
    st.integers(0, 3),  # which prefix it shares with others
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
def test_each_answer_is_the_same_as_when_run_alone(
    moves: list[tuple[object, ...]], blocks: int, decode_tokens_max: int, seed: int
) -> None:
    world = World(blocks=blocks, decode_tokens_max=decode_tokens_max, seed=seed)
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
    assert not world.running, "no request starves"
    assert world.pool.available == blocks, "no block is lost"
    for id, (prompt, choices, limit) in wanted.items():
        assert world.done[id] == [_alone(prompt, choice, limit) for choice in range(choices)]


def test_cached_prefix_is_not_prefilled_again() -> None:
    world = World(blocks=40, decode_tokens_max=1)
    prompt = list(range(BLOCK * 3 + 1))
    world.arrive("first", prompt, 1, 2, 0)
    while world.running:
        world.step()

    world.arrive("second", prompt, 1, 2, 0)
    plan = world.step()

    assert [(prefill.start, prefill.stop) for prefill in plan.prefills] == [
        (BLOCK * 3, BLOCK * 3 + 1)
    ]
    assert plan.prefills[0].group.cached_tokens == BLOCK * 3


def test_last_prompt_token_is_prefilled_even_if_all_blocks_are_cached() -> None:
    world = World(blocks=40, decode_tokens_max=1)
    for name in ("first", "second"):
        world.arrive(name, list(range(BLOCK * 2)), 1, 1, 0)
        plan = world.step()

    assert [(prefill.start, prefill.stop) for prefill in plan.prefills] == [(BLOCK, BLOCK * 2)]


def test_least_recently_used_blocks_are_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3) or []
    for block, digest in zip(blocks, (b"1", b"2", b"3"), strict=True):
        pool.publish(block, digest)
    pool.free(blocks)
    first = pool.find(b"1")
    assert first is not None
    pool.share(first)
    pool.free([first])

    pool.allocate(2)

    assert [pool.find(digest) is None for digest in (b"1", b"2", b"3")] == [False, True, True]


def test_digests_of_a_growing_text_are_those_of_the_whole() -> None:
    grown = Digests("1", BLOCK)
    grown.extend(range(BLOCK + 1))
    fork = grown.copy()
    grown.extend(range(BLOCK + 1, BLOCK * 2))
    grown.extend(range(BLOCK * 2, BLOCK * 3 + 2))
    fork.extend([9] * BLOCK)

    assert grown.found == _digests("1", range(BLOCK * 3 + 2))
    assert fork.found == _digests("1", [*range(BLOCK + 1), *[9] * BLOCK])


def test_prefixes_are_not_shared_between_accounts() -> None:
    tokens = list(range(8))
    mine, theirs = _digests("1", tokens), _digests("2", tokens)

    assert not set(mine) & set(theirs)
    assert _digests("1", tokens[:6]) == mine[:1]
    assert _digests("1", [7, *tokens[1:]])[1] != mine[1]


def test_urgent_request_preempts_lower_priority_which_resumes_later() -> None:
    world = World(blocks=100, decode_tokens_max=1)
    for name in "abcd":
        world.arrive(name, [1, 2, 3], 1, 10, -1)
    for _ in range(4):
        world.step()

    world.arrive("urgent", [5, 6], 1, 2, 1)
    plan = world.step()

    assert [prefill.group.request_id for prefill in plan.prefills] == ["urgent"]
    assert world.scheduler.preempted == 1
    while world.running:
        world.step()
    assert all(world.done[RequestId(name)] == [_alone([1, 2, 3], 0, 10)] for name in "abcd")


def test_lack_of_blocks_preempts_requests_without_changing_their_tokens() -> None:
    world = World(blocks=9, decode_tokens_max=1)
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
def test_request_that_can_never_fit_is_refused(
    prompt: int, choices: int, limit: int, fits: bool
) -> None:
    scheduler = Scheduler(BlockPool(4), slots=SLOTS, block_tokens=BLOCK)

    assert scheduler.fits(prompt, choices, limit) is fits
