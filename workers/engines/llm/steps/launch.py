"""Launches the forward passes of a step, also before the tokens of the step before have been read.

On CUDA a launch only enqueues. Where a token is sampled but not read, its place among the inputs is
filled on the device, so that the device has its next step before the host knows the last one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from workers.contract.jobs import RequestId
from workers.engines.interrupting import SLICE_S
from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.decoder import Decoder, Forward
from workers.engines.llm.request import ChoiceState
from workers.engines.llm.sampling import propose
from workers.engines.llm.scheduling.scheduler import SequenceGroup, StepPlan, TokenSequence
from workers.engines.llm.speculation import DraftModel
from workers.engines.llm.steps.verification import Verification
from workers.engines.llm.vision.tower import Tower
from workers.protocol.engine import PhaseClock

Choices: TypeAlias = Mapping[TokenSequence, ChoiceState]
Drafts: TypeAlias = Mapping[TokenSequence, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Unread:
    """Tokens ``(sequences,)`` on the device, and which of them is that of each sequence."""

    tokens: torch.Tensor
    places: Mapping[TokenSequence, int]


@dataclass(slots=True)
class Launch:
    """A step whose forward passes have been enqueued. ``logits`` are those of the rows of
    ``decodes``, then of prompts that end in it."""

    plan: StepPlan
    decodes: Sequence[SequenceInput]
    logits: torch.Tensor
    costs: Mapping[RequestId, float]
    """Costs of pictures, in tokens of the language model without a context."""
    started_s: float
    """Time from which the device can have worked at it."""

    @property
    def is_wanted(self) -> bool:
        """Whether any of its requests has not ended since."""
        plan = self.live_plan()
        return bool(plan.decodes or plan.prefills)

    def live_plan(self) -> StepPlan:
        """Return the plan without what has ended since it was launched."""
        return replace(
            self.plan,
            decodes=tuple(chunk for chunk in self.plan.decodes if chunk.sequence.open),
            prefills=tuple(chunk for chunk in self.plan.prefills if chunk.group.running),
        )

    def verifications(self, choices: Choices) -> dict[TokenSequence, Verification]:
        """Return what is to be sampled for each sequence that is still open."""
        found: dict[TokenSequence, Verification] = {}
        row = 0
        for chunk, decode in zip(self.plan.decodes, self.decodes, strict=True):
            if decode.logits_kept and chunk.sequence.open:
                verified = decode.ids[len(decode.ids) - decode.logits_kept + 1 :]
                found[chunk.sequence] = Verification(choices[chunk.sequence], row, verified)
            row += decode.logits_kept
        for prefill in self.plan.prefills:
            if prefill.is_last:
                for sequence in prefill.group.open_sequences:
                    if not choices[sequence].tokens:
                        found[sequence] = Verification(choices[sequence], row)
                row += 1
        return found


class Launcher:
    """``draft``: proposes draft tokens, if there is a draft model. ``tower``: encodes pictures."""

    def __init__(self, decoder: Decoder, draft: DraftModel | None, tower: Tower | None) -> None:
        self._decoder = decoder
        self._draft = draft
        self._tower = tower

    def launch(
        self, plan: StepPlan, choices: Choices, clock: PhaseClock, *, drafts: Drafts
    ) -> Launch:
        """Launch a step whose tokens are known, and wait for it, so that its phases are timed."""
        plan, costs = self._encode_pictures(plan, choices, clock)
        started_s = time.perf_counter()
        prefills = _prefills(plan, choices)
        if self._draft is not None:
            drafts = self._propose(plan, prefills, choices, clock)
        decodes = _decodes(plan, choices, drafts)
        with clock.phase("transfer"):
            self._decoder.zero_blocks(plan.blocks_to_zero)
            staged = self._decoder.stage(decodes, prefills)
            self._decoder.wait()
        with clock.phase("forward"):
            logits = self._run(plan, staged)
            self._decoder.wait()
        return Launch(plan, decodes, logits, costs, started_s)

    def launch_ahead(
        self, plan: StepPlan, choices: Choices, clock: PhaseClock, unread: Unread
    ) -> Launch | None:
        """Enqueue a step behind the one whose tokens are unread, and return without waiting.

        Return None for a step without tokens, or with pictures to be encoded.
        """
        if not (plan.decodes or plan.prefills) or any(
            choices[chunk.group.sequences[0]].pictures is not None for chunk in plan.prefills
        ):
            return None
        started_s = time.perf_counter()
        prefills, decodes = _prefills(plan, choices), _decodes(plan, choices, {})
        with clock.phase("transfer"):
            self._decoder.zero_blocks(plan.blocks_to_zero)
            staged = self._decoder.stage(decodes, prefills)
            filled = [
                (row, unread.places[chunk.sequence])
                for row, chunk in enumerate(plan.decodes)
                if chunk.needs_logits and chunk.sequence in unread.places
            ]
            if filled:
                self._decoder.fill(staged, filled, unread.tokens)
        with clock.phase("forward"):
            logits = self._run(plan, staged)
        return Launch(plan, decodes, logits, {}, started_s)

    def _run(self, plan: StepPlan, staged: Sequence[Forward]) -> torch.Tensor:
        logits = self._decoder.run(staged)
        self._decoder.copy_blocks(plan.block_copies)
        if self._draft is not None:
            self._draft.decoder.copy_blocks(plan.block_copies)
        return logits

    def _propose(
        self,
        plan: StepPlan,
        prefills: Sequence[SequenceInput],
        choices: Choices,
        clock: PhaseClock,
    ) -> Drafts:
        assert self._draft is not None
        with clock.phase("forward"):
            self._draft.decoder.zero_blocks(plan.blocks_to_zero)
            return self._draft.propose(
                plan.decodes,
                [replace(prefill, logits_kept=0, pictures=None) for prefill in prefills],
                lambda sequence, position: choices[sequence].token_at(position),
                lambda sequences, logits, offset: propose(
                    logits, [choices[sequence].sampler for sequence in sequences], offset
                ),
            )

    def _encode_pictures(
        self, plan: StepPlan, choices: Choices, clock: PhaseClock
    ) -> tuple[StepPlan, dict[RequestId, float]]:
        """Encode the pictures that this step prefills, until a slice of time is over.

        Return the plan without prompts whose pictures take longer, and the costs by request.
        """
        costs: dict[RequestId, float] = {}
        if self._tower is None:
            return plan, costs
        late: set[SequenceGroup] = set()
        with clock.phase("forward"):
            ends_s = time.monotonic() + SLICE_S
            for chunk in plan.prefills:
                pictured = choices[chunk.group.sequences[0]].pictures
                if pictured is None or chunk.group in late:
                    continue
                pictures = list(pictured.pictures_in(chunk.start, chunk.stop))
                if not late and (not costs or time.monotonic() < ends_s):
                    cost = self._tower.encode_slice(pictures, ends_s)
                    id = chunk.group.request_id
                    costs[id] = costs.get(id, 0.0) + cost
                if any(picture.features is None for picture in pictures):
                    late.add(chunk.group)
            self._decoder.wait()
        return (plan.without(late) if late else plan), costs


def _prefills(plan: StepPlan, choices: Choices) -> list[SequenceInput]:
    return [
        choices[chunk.group.sequences[0]].prompt_input(
            chunk.start, chunk.stop, chunk.group.blocks, logits_kept=int(chunk.is_last)
        )
        for chunk in plan.prefills
    ]


def _decodes(plan: StepPlan, choices: Choices, drafts: Drafts) -> list[SequenceInput]:
    """Return the tokens of decoding sequences, with 0 for one that has not been read."""
    decodes = []
    for chunk in plan.decodes:
        sequence, choice = chunk.sequence, choices[chunk.sequence]
        until = min(chunk.stop, sequence.length)
        known = min(until, choice.length)
        ids = [choice.token_at(position) for position in range(chunk.start, known)]
        ids += [0] * (until - known)
        ids += drafts.get(sequence, ())[: chunk.stop - until]
        logits_kept = chunk.stop - sequence.length + 1 if chunk.needs_logits else 0
        decodes.append(SequenceInput(ids, chunk.start, sequence.blocks, logits_kept, choice.shift))
    return decodes
