"""Schedules prefill and decode: the sequences of each step, their tokens and their KV blocks.

Pure: no tensors. A request has one ``SequenceGroup`` per prompt, and a group one ``TokenSequence``
per choice. Groups wait until slots and blocks are free. Their prompts are prefilled in chunks of
one block; after that each step decodes one token per sequence, plus its draft tokens. When blocks
run out, the least urgent group is preempted: its blocks are freed, and it is recomputed later from
its prompt and the tokens generated so far, so its output does not change.

``plan`` allocates blocks and changes nothing else; ``advance`` applies a plan after its step has
succeeded. A failed step can therefore be planned again without the request that caused it.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from workers.contract.jobs import RequestId
from workers.engines.llm.scheduling.blocks import BlockPool

STEP_TOKENS: Final = 2048
"""Token budget of a step. Bounds prefill, so that running sequences keep decoding."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class TokenSequence:
    """One choice of a request: its length in tokens (prompt included), how many of them are in the
    KV cache (``computed``), and its blocks."""

    group: SequenceGroup
    index: int
    length: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: Sequence[bytes] = ()
    """Digests of its full blocks, the prompt's included, if its answer is to be found again."""
    published: int = 0
    """Number of blocks that are known to the prefix cache, or need not be."""
    draft_tokens: int = 0
    """Draft tokens after the known ones, to be verified in the next step."""
    open: bool = True


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A prompt and its sequences. ``rank`` is unique and orders by urgency, lowest first."""

    request_id: RequestId
    rank: tuple[float, int]
    priority: int
    prompt_tokens: int
    digests: Sequence[bytes]
    sequences: list[TokenSequence] = field(default_factory=list)
    running: bool = False
    prefilled: int = 0
    """Prompt tokens in the KV cache."""
    blocks: list[int] = field(default_factory=list)
    """The prompt's blocks during prefill; afterwards each sequence has its own list."""
    prefilled_max: int = 0
    """Highest value of ``prefilled``. Input tokens are billed by it, so recomputation is free."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at first admission; None before it."""

    @property
    def prefilling(self) -> bool:
        return self.running and self.prefilled < self.prompt_tokens

    @property
    def open_sequences(self) -> Iterator[TokenSequence]:
        return (sequence for sequence in self.sequences if sequence.open)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens ``[start, stop)`` of a group: one block, or the rest of the prompt."""

    group: SequenceGroup
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.group.prompt_tokens


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Tokens ``[start, stop)`` of a sequence, including draft tokens."""

    sequence: TokenSequence
    start: int
    stop: int

    @property
    def needs_logits(self) -> bool:
        """Whether the chunk reaches the end of the known tokens, so that a new one is sampled."""
        return self.stop >= self.sequence.length


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, in this order: zero ``blocks_to_zero``, run the chunks, make ``block_copies``."""

    blocks_to_zero: tuple[int, ...]
    decodes: tuple[DecodeChunk, ...]
    prefills: tuple[PrefillChunk, ...]
    block_copies: tuple[tuple[int, int], ...]
    """``(source, target)``: a prompt's partly filled last block, copied for each further choice."""

    def without(self, groups: Collection[SequenceGroup]) -> StepPlan:
        """Return the step without the prompts of some groups."""
        left_out = [chunk for chunk in self.prefills if chunk.group in groups]
        sources = {chunk.group.blocks[-1] for chunk in left_out if chunk.is_last}
        return replace(
            self,
            prefills=tuple(chunk for chunk in self.prefills if chunk.group not in groups),
            block_copies=tuple(copy for copy in self.block_copies if copy[0] not in sources),
        )


def step_weights(plan: StepPlan, context_cost: float) -> dict[RequestId, float]:
    """Return the cost of each request in a step, in tokens without a context.

    ``context_cost``: of attending to one more token. The products of a token are the same for each,
    but its attention grows with its context.
    """
    weights: dict[RequestId, float] = {}
    chunks = [(prefill.group, prefill.start, prefill.stop) for prefill in plan.prefills]
    chunks += [(decode.sequence.group, decode.start, decode.stop) for decode in plan.decodes]
    for group, start, stop in chunks:
        cost = (stop - start) * (1 + context_cost * (start + stop + 1) / 2)
        weights[group.request_id] = weights.get(group.request_id, 0.0) + cost
    return weights


class Scheduler:
    """Schedules at most ``slots`` sequences over the blocks of a pool.

    ``decode_tokens_max`` is the most tokens of one sequence in a step: one plus its draft tokens.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        slots: int,
        block_tokens: int,
        decode_tokens_max: int = 1,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._block_tokens = block_tokens
        self._decode_tokens_max = decode_tokens_max
        self._budget = max(step_tokens, slots + block_tokens)
        self._groups: dict[RequestId, list[SequenceGroup]] = {}
        self._waiting: list[SequenceGroup] = []
        self._running: list[SequenceGroup] = []
        self._blocks_to_zero: list[int] = []
        self._fork_blocks: dict[SequenceGroup, list[int]] = {}
        """Partial blocks for the further choices of prompts that are still being prefilled."""
        self._order = itertools.count()
        self.preempted = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def fits(self, prompt_tokens: int, choices: int, limit: int) -> bool:
        """Whether a request can ever run: choices within ``slots``, and its prompt plus ``limit``
        tokens per choice within an otherwise empty pool."""
        shared = prompt_tokens // self._block_tokens
        own = self.blocks_of(prompt_tokens + limit) - shared
        return choices <= self._slots and shared + choices * own <= self._pool.count

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
        """Queue a prompt. Groups are admitted in order of ``due``, earliest first."""
        groups = self._groups.setdefault(request_id, [])
        rank = (due, next(self._order))
        group = SequenceGroup(request_id, rank, priority, prompt_tokens, digests)
        group.sequences = [TokenSequence(group, index, prompt_tokens) for index in range(choices)]
        groups.append(group)
        insort(self._waiting, group, key=attrgetter("rank"))
        return group

    # --- One step ---------------------------------------------------------------------------------

    def plan(self, prefill_max: int | None = None) -> StepPlan:
        """Plan the next step: decode first, then prefill, within the token budget.

        ``prefill_max``: maximum prompt tokens beside decoding sequences, at least a block. Default:
        what the budget leaves. Draft tokens have the lowest priority: every sequence's next token
        and one block of prefill come first.
        """
        decodes = [
            decode
            for group in list(self._running)
            if group.running and not group.prefilling
            for decode in self._decodes(group)
        ]
        self._admit_waiting()
        decodes = [decode for decode in decodes if self._is_running(decode)]
        prefilling = [group for group in self._running if group.prefilling]
        budget = self._budget - len(decodes)
        for_drafts = budget - (self._block_tokens if prefilling else 0)
        for index, decode in enumerate(decodes):
            drafts = min(decode.stop - decode.start - 1, max(for_drafts, 0))
            for_drafts, budget = for_drafts - drafts, budget - drafts
            decodes[index] = DecodeChunk(decode.sequence, decode.start, decode.start + 1 + drafts)
        if decodes and prefill_max is not None:
            budget = min(budget, prefill_max)
        prefills = []
        for group in prefilling:
            for start in range(group.prefilled, group.prompt_tokens, self._block_tokens):
                stop = min(start + self._block_tokens, group.prompt_tokens)
                if stop - start > budget:
                    break
                budget -= stop - start
                prefills.append(PrefillChunk(group, start, stop))
            else:
                continue
            break
        copies = [copy for chunk in prefills if chunk.is_last for copy in self._copies(chunk.group)]
        return StepPlan(tuple(self._blocks_to_zero), tuple(decodes), tuple(prefills), tuple(copies))

    def advance(self, plan: StepPlan) -> None:
        """Record that a plan was executed, and publish full prompt blocks to the prefix cache."""
        self._blocks_to_zero.clear()
        for decode in plan.decodes:
            decode.sequence.computed = decode.stop
        for prefill in plan.prefills:
            group = prefill.group
            group.prefilled = prefill.stop
            group.prefilled_max = max(group.prefilled_max, prefill.stop)
            if prefill.stop - prefill.start == self._block_tokens:
                index = prefill.start // self._block_tokens
                if index < len(group.digests):
                    self._pool.publish(group.blocks[index], group.digests[index])
            if prefill.is_last:
                self._fork(group)

    def append(self, sequence: TokenSequence, tokens: int) -> None:
        """Add the number of tokens sampled or accepted. Draft tokens after them are rejected."""
        sequence.length += tokens
        sequence.computed = min(sequence.computed, sequence.length - 1)
        sequence.draft_tokens = 0

    def publish(self, sequence: TokenSequence) -> None:
        """Publish the blocks that have become full; none that contains a draft token."""
        full = min(sequence.computed // self._block_tokens, len(sequence.digests))
        for index in range(sequence.published, full):
            self._pool.publish(sequence.blocks[index], sequence.digests[index])
        sequence.published = max(sequence.published, full)

    def close(self, sequence: TokenSequence) -> None:
        """Stop a sequence and free its blocks; with its last sequence, the group's."""
        if not sequence.open:
            return
        sequence.open = False
        group = sequence.group
        self._pool.free(sequence.blocks)
        sequence.blocks = []
        if not any(group.open_sequences):
            self._withdraw(group)

    def stop(self, request_id: RequestId) -> None:
        """Stop all sequences of a request."""
        for group in self._groups.get(request_id, ()):
            for sequence in group.sequences:
                self.close(sequence)

    def remove(self, request_id: RequestId) -> None:
        """Stop a request and drop its state."""
        self.stop(request_id)
        self._groups.pop(request_id, None)

    # --- Slots and blocks -------------------------------------------------------------------------

    def _decodes(self, group: SequenceGroup) -> Iterator[DecodeChunk]:
        """Allocate blocks for a group's next tokens. If none are free, drop its draft tokens, then
        preempt the least urgent group, which may be this one."""
        for sequence in list(group.open_sequences):
            stop = min(
                sequence.length + sequence.draft_tokens, sequence.computed + self._decode_tokens_max
            )
            missing = self.blocks_of(stop) - len(sequence.blocks)
            while missing > 0 and (blocks := self._pool.allocate(missing)) is None:
                if sequence.draft_tokens:
                    sequence.draft_tokens = 0
                    stop = min(sequence.length, sequence.computed + self._decode_tokens_max)
                    missing = self.blocks_of(stop) - len(sequence.blocks)
                    continue
                least_urgent = self._running[-1]
                self._preempt(least_urgent)
                if least_urgent is group:
                    return
            if missing > 0:
                assert blocks is not None
                sequence.blocks += blocks
                self._blocks_to_zero += blocks
            yield DecodeChunk(sequence, sequence.computed, stop)

    @staticmethod
    def _is_running(decode: DecodeChunk) -> bool:
        """Whether the chunk's group was not preempted after the chunk was planned."""
        return decode.sequence.group.running and not decode.sequence.group.prefilling

    def _admit_waiting(self) -> None:
        """Admit waiting groups in order of rank. No group overtakes, or large ones would starve.

        A more urgent group preempts a less urgent one of lower priority.
        """
        while self._waiting:
            group = self._waiting[0]
            if not self._has_slots(group) or not self._allocate_prompt(group):
                least_urgent = self._running[-1] if self._running else group
                if least_urgent.priority >= group.priority or least_urgent.rank < group.rank:
                    return
                self._preempt(least_urgent)
                continue
            del self._waiting[0]
            group.running = True
            insort(self._running, group, key=attrgetter("rank"))

    def _has_slots(self, group: SequenceGroup) -> bool:
        used = sum(1 for other in self._running for _ in other.open_sequences)
        return used + sum(1 for _ in group.open_sequences) <= self._slots

    def _allocate_prompt(self, group: SequenceGroup) -> bool:
        """Allocate a prompt's blocks, sharing those in the prefix cache. False if there is no room.

        The last prompt token is never taken from the cache: its logits are needed. One block is
        reserved for each decoding sequence.
        """
        found: list[int] = []
        for digest in group.digests[: (group.prompt_tokens - 1) // self._block_tokens]:
            block = self._pool.find(digest)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._pool.share(block)
        choices = sum(1 for _ in group.open_sequences)
        has_partial_block = group.prompt_tokens % self._block_tokens != 0
        copies = choices - 1 if has_partial_block else 0
        missing = self.blocks_of(group.prompt_tokens) - len(found) + copies
        reserve = sum(1 for other in self._running for _ in other.open_sequences)
        blocks = self._pool.allocate(missing) if missing + reserve <= self._pool.available else None
        if blocks is None:
            self._pool.free(found)
            return False
        self._blocks_to_zero += blocks
        if copies:
            self._fork_blocks[group] = blocks[-copies:]
            del blocks[-copies:]
        group.blocks = found + blocks
        group.prefilled = len(found) * self._block_tokens
        if group.cached_tokens is None:
            group.cached_tokens = group.prefilled_max = group.prefilled
        return True

    def _copies(self, group: SequenceGroup) -> list[tuple[int, int]]:
        return [(group.blocks[-1], target) for target in self._fork_blocks.get(group, ())]

    def _fork(self, group: SequenceGroup) -> None:
        """Split a group after prefill: its sequences share full blocks and copy the partial one."""
        copies = self._fork_blocks.pop(group, [])
        first, *others = group.open_sequences
        first.blocks, group.blocks = group.blocks, []
        first.computed = group.prompt_tokens
        full = first.blocks[: group.prompt_tokens // self._block_tokens]
        for index, sequence in enumerate(others):
            for block in full:
                self._pool.share(block)
            sequence.blocks = full + copies[index : index + 1]
            sequence.computed = group.prompt_tokens

    def _preempt(self, group: SequenceGroup) -> None:
        """Free a group's blocks and move it back to the waiting groups; its tokens are kept."""
        self.preempted += 1
        self._free(group)
        insort(self._waiting, group, key=attrgetter("rank"))

    def _withdraw(self, group: SequenceGroup) -> None:
        if group.running:
            self._free(group)
        elif group in self._waiting:
            self._waiting.remove(group)

    def _free(self, group: SequenceGroup) -> None:
        self._running.remove(group)
        group.running = False
        group.prefilled = 0
        self._pool.free([*group.blocks, *self._fork_blocks.pop(group, [])])
        group.blocks = []
        for sequence in group.sequences:
            self._pool.free(sequence.blocks)
            sequence.blocks = []
            sequence.computed = sequence.draft_tokens = sequence.published = 0
        self._blocks_to_zero = [block for block in self._blocks_to_zero if self._pool.users(block)]
