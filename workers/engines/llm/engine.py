"""The language model engine: requests join and leave between steps, each with its own parameters.

A step adds a token to every running sequence, or several where some were guessed, and reads the
prompts of newcomers. Everything that can run out of memory is done before any state changes, so
such a step can be repeated without the request that was dropped. Modules that touch no tensor
decide: ``scheduler`` who takes part and where in the cache, ``answers``, ``text`` and ``tools``
what is said; ``decoder`` and ``cache`` compute.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import torch

from workers.contract.jobs import ChatInput, Event, Failed, Job, Outcome, RequestId, Tokens
from workers.contract.models import ModelSpec
from workers.engines.llm.blocks import BlockPool, digests
from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.checkpoint import Checkpoint
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.draft_model import DraftModel
from workers.engines.llm.drafts import PromptLookup
from workers.engines.llm.grammar import GrammarError
from workers.engines.llm.loading import load_draft, make_decoder
from workers.engines.llm.options import read_options
from workers.engines.llm.request import ChatRequest, ChoiceState
from workers.engines.llm.sampling import SampledToken
from workers.engines.llm.scheduler import Scheduler, SequenceGroup, StepPlan, TokenSequence
from workers.engines.llm.tools import is_constrained
from workers.engines.memory import is_out_of_memory
from workers.engines.threads import threads_for, use_threads
from workers.protocol.engine import (
    Admission,
    Admitted,
    CancelReason,
    PhaseClock,
    StepReport,
    Wait,
)

log = logging.getLogger(__name__)

PATIENCE_MS: Final = 60_000
"""A request is as urgent as one that must be done in a minute, or by its own deadline."""
PRIORITY_MS: Final = 30_000
"""A priority higher by one is worth having come so much earlier."""


@dataclass(slots=True)
class _Loaded:
    """What there is while the model is loaded."""

    checkpoint: Checkpoint
    decoder: Decoder
    scheduler: Scheduler
    draft: DraftModel | None


class LlmEngine:
    """Any checkpoint directory of a proven family. Raise ``ValueError`` if an option is wrong."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = read_options(spec)
        self._answering: dict[RequestId, ChatRequest] = {}
        self._loaded: _Loaded | None = None
        self._threads = 1

    @property
    def _there(self) -> _Loaded:
        assert self._loaded is not None
        return self._loaded

    def load(self) -> None:
        """Read the weights, make the cache, warm up. Raise ``ValueError`` with the reason."""
        options = self._options
        checkpoint = Checkpoint(self._spec, options)
        self._threads = threads_for(checkpoint.model, options.threads)
        use_threads(self._threads)
        draft = load_draft(self._spec, options, checkpoint)
        decoder = make_decoder(checkpoint, options)
        scheduler = Scheduler(
            BlockPool(checkpoint.shape.blocks),
            slots=options.slots,
            block_tokens=checkpoint.shape.block_tokens,
            width=options.width,
        )
        self._loaded = _Loaded(checkpoint, decoder, scheduler, draft)

    def unload(self) -> None:
        self._loaded = None
        gc.collect()
        torch.cuda.empty_cache()

    def admit(self, job: Job, clock: PhaseClock, files: Sequence[bytes] = ()) -> Admission:
        with clock.phase("preprocess"):
            if self._there.scheduler.waiting >= 2 * self._options.slots:
                return Wait()
            try:
                chat = msgspec.convert(job.input, ChatInput)
            except msgspec.ValidationError as error:
                return Failed("invalid_input", f"The input is no conversation: {error}.")
            return self._refuse(chat) or self._take_in(job, chat)

    def step(self, clock: PhaseClock) -> StepReport:
        there = self._there
        use_threads(self._threads)
        guesses = self._guess()
        plan = there.scheduler.plan()
        with torch.inference_mode(), _memory_errors_by_name():
            said = self._compute(plan, guesses, clock)
        there.scheduler.advance(plan)
        with clock.phase("postprocess"):
            return self._report(plan, said)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self._answering[request_id].cancelled = reason
        self._there.scheduler.halt(request_id)

    def release(self, request_id: RequestId) -> None:
        del self._answering[request_id]
        self._there.scheduler.leave(request_id)

    # --- Admission --------------------------------------------------------------------------------

    def _refuse(self, chat: ChatInput) -> Failed | None:
        """Refuse what cannot be done, or what would harm others; the gateway checked the rest."""
        vocabulary = self._there.checkpoint.vocabulary
        size = vocabulary.size
        if chat.tools and chat.tool_choice != "none" and vocabulary.tool_format is None:
            return Failed(
                "unsupported_parameter",
                "This model was not made to call functions: its chat template knows no tools. "
                "Leave tools out.",
                param="tools",
            )
        if chat.tool_name is not None and chat.tool_name not in {tool.name for tool in chat.tools}:
            return Failed(
                "invalid_input",
                f"tool_choice names {chat.tool_name!r}, which is not among the tools.",
                param="tool_choice",
            )
        if not 1 <= chat.n <= self._options.slots:
            return Failed(
                "invalid_input",
                f"n is {chat.n}; this model writes 1 to {self._options.slots} choices at a time.",
                param="n",
            )
        if chat.max_tokens < 1:
            return Failed(
                "invalid_input",
                f"max_tokens is {chat.max_tokens}; at least 1 is needed.",
                param="max_tokens",
            )
        if unknown := [token for token in chat.logit_bias if not 0 <= token < size]:
            return Failed(
                "invalid_input",
                f"logit_bias names the token {unknown[0]}; there are 0 to {size - 1}.",
                param="logit_bias",
            )
        return None

    def _take_in(self, job: Job, chat: ChatInput) -> Admission:
        there = self._there
        vocabulary = there.checkpoint.vocabulary
        param = "prompt" if chat.prompts else "messages"
        try:
            if chat.prompts:
                prompts = [vocabulary.encode_prompt(prompt) for prompt in chat.prompts]
            else:
                tools = chat.tools if chat.tool_choice != "none" else ()
                prompts = [vocabulary.encode(chat.messages, tools)]
        except ValueError as error:
            what = "prompt" if chat.prompts else "conversation"
            return Failed(
                "invalid_input", f"The model cannot read this {what}: {error}.", param=param
            )
        for prompt in prompts:
            if failure := self._refuse_length(prompt, chat, param):
                return failure
        try:
            answers = [
                self._answer(job.request_id, place * chat.n + index, chat, prompt)
                for place, prompt in enumerate(prompts)
                for index in range(chat.n)
            ]
        except ValueError as error:
            param = "tools" if chat.tools else "response_format"
            return Failed("invalid_input", f"This schema cannot be followed: {error}.", param=param)
        answering = self._answering[job.request_id] = ChatRequest(job.request_id, job.stream)
        for place, prompt in enumerate(prompts):
            seat = self._seat(job, prompt, chat.n)
            answering.seats.append(seat)
            mine = answers[place * chat.n : (place + 1) * chat.n]
            answering.answers.update(zip(seat.chains, mine, strict=True))
        return Admitted()

    def _refuse_length(self, prompt: Sequence[int], chat: ChatInput, param: str) -> Failed | None:
        there = self._there
        context = there.checkpoint.context
        if len(prompt) >= context:
            what = "prompt" if chat.prompts else "conversation"
            return Failed(
                "context_length_exceeded",
                f"The {what} is {len(prompt)} tokens long, and this model's context is "
                f"{context}; at least one must be left for the answer.",
                param=param,
            )
        if not there.scheduler.fits(len(prompt), chat.n, self._limit(prompt, chat)):
            room = there.checkpoint.shape.blocks * there.checkpoint.shape.block_tokens
            return Failed(
                "invalid_input",
                f"A prompt of {len(prompt)} tokens with {chat.n} answers of up to "
                f"{self._limit(prompt, chat)} needs more than this model's cache of {room} tokens.",
                param="n" if chat.n > 1 else "max_tokens",
            )
        return None

    def _limit(self, prompt: Sequence[int], chat: ChatInput) -> int:
        return min(chat.max_tokens, self._there.checkpoint.context - len(prompt))

    def _answer(
        self, request_id: RequestId, index: int, chat: ChatInput, prompt: Sequence[int]
    ) -> ChoiceState:
        """Raise ``ValueError`` if the schema that the answer must fit is none."""
        vocabulary = self._there.checkpoint.vocabulary
        constraint = None
        if is_constrained(chat):
            constraint = vocabulary.grammars.constrain(
                chat, vocabulary.tool_format, request_id=request_id
            )
        answer = ChoiceState(
            index,
            chat,
            vocabulary,
            prompt=prompt,
            limit=self._limit(prompt, chat),
            constraint=constraint,
        )
        speculation = self._options.speculation
        if speculation is not None and speculation.method == "lookup":
            answer.lookup = PromptLookup(prompt)
        return answer

    def _seat(self, job: Job, prompt: Sequence[int], choices: int) -> SequenceGroup:
        there = self._there
        now_ms = time.time() * 1000
        due = min(now_ms + PATIENCE_MS, job.deadline_ms or now_ms + PATIENCE_MS)
        known = (
            digests(job.account_id, prompt, there.checkpoint.shape.block_tokens)
            if self._options.prefix_cache
            else ()
        )
        return there.scheduler.add(
            job.request_id,
            prompt_tokens=len(prompt),
            choices=choices,
            digests=known,
            due=due - job.priority * PRIORITY_MS,
            priority=job.priority,
        )

    # --- One step ---------------------------------------------------------------------------------

    def _answers(self) -> Iterator[tuple[TokenSequence, ChoiceState]]:
        for answering in self._answering.values():
            yield from answering.answers.items()

    def _guess(self) -> dict[TokenSequence, list[int]]:
        """Guess ahead where nothing is to be caught up with, or say how many shall be guessed."""
        guesses: dict[TokenSequence, list[int]] = {}
        if self._options.speculation is None:
            return guesses
        for chain, answer in self._answers():
            if not chain.open or chain.known - chain.computed != 1:
                continue
            most = min(self._options.width, answer.limit - len(answer.tokens)) - 1
            if answer.lookup is not None:
                guesses[chain] = answer.lookup.guess(most)
                most = len(guesses[chain])
            chain.ahead = most
        return guesses

    def _compute(
        self, plan: StepPlan, guesses: Mapping[TokenSequence, Sequence[int]], clock: PhaseClock
    ) -> dict[TokenSequence, list[SampledToken] | str]:
        """Run the forwards of a step, then choose the next tokens of each answer, or why none."""
        there = self._there
        decoder = there.decoder
        answers = dict(self._answers())
        pieces = [
            SequenceInput(
                answers[piece.seat.chains[0]].prompt[piece.start : piece.stop],
                piece.start,
                piece.seat.blocks,
                int(piece.is_last),
            )
            for piece in plan.pieces
        ]
        if there.draft is not None:
            with clock.phase("forward"):
                there.draft.decoder.zero_blocks(plan.fresh)
                guesses = there.draft.guess(
                    plan.turns,
                    [replace(piece, kept=0) for piece in pieces],
                    lambda chain, position: answers[chain].token_at(position),
                    lambda chain, logits, place: answers[chain].sampler.guess(logits, place),
                )
        with clock.phase("transfer"):
            decoder.zero_blocks(plan.fresh)
            turns = []
            for turn in plan.turns:
                chain, answer = turn.chain, answers[turn.chain]
                until = min(turn.stop, chain.known)
                ids = [answer.token_at(place) for place in range(turn.start, until)]
                ids += guesses.get(chain, ())[: turn.stop - until]
                kept = turn.stop - chain.known + 1 if turn.is_news else 0
                turns.append(SequenceInput(ids, turn.start, chain.blocks, kept))
            staged = decoder.stage(turns, pieces)
            decoder.wait()
        with clock.phase("forward"):
            logits = _Logits(decoder.run(staged))
            decoder.copy(plan.copies)
            if there.draft is not None:
                there.draft.decoder.copy(plan.copies)
            decoder.wait()
            said: dict[TokenSequence, list[SampledToken] | str] = {}
            place = 0
            for turn, feed in zip(plan.turns, turns, strict=True):
                if feed.kept:
                    tried = list(feed.ids[len(feed.ids) - feed.kept + 1 :])
                    said[turn.chain] = _choose(answers[turn.chain], logits, place, tried)
                    place += feed.kept
            for piece in plan.pieces:
                if piece.is_last:
                    for chain in piece.seat.writing:
                        if not answers[chain].tokens:
                            said[chain] = _choose(answers[chain], logits, place, [])
                    place += 1
            return said

    def _report(
        self, plan: StepPlan, said: Mapping[TokenSequence, list[SampledToken] | str]
    ) -> StepReport:
        """Extend the answers; a request weighs as many tokens as were read and written for it."""
        weights: dict[RequestId, float] = {}
        for piece in plan.pieces:
            id = piece.seat.request_id
            weights[id] = weights.get(id, 0.0) + piece.stop - piece.start
        for turn in plan.turns:
            id = turn.chain.seat.request_id
            weights[id] = weights.get(id, 0.0) + turn.stop - turn.start
            if turn.is_news:
                self._answering[id].drafted += turn.stop - turn.chain.known
        events: list[tuple[RequestId, Event]] = []
        outcomes: list[tuple[RequestId, Outcome]] = []
        for id, answering in self._answering.items():
            if answering.cancelled is not None:
                outcomes.append((id, answering.break_off(answering.cancelled)))
                continue
            for chain, answer in answering.answers.items():
                if chain not in said or answer.ended:
                    continue
                tokens = said[chain]
                if isinstance(tokens, str):
                    log.error("no token", extra={"request_id": id, "reason": tokens})
                    outcomes.append((id, answering.fail(tokens)))
                    break
                answering.accepted += len(tokens) - 1
                first = not answer.tokens
                made = self._extend(chain, answer, tokens)
                if first and answering.stream:
                    made[0] = msgspec.structs.replace(made[0], usage=answering.usage)
                events += [(id, event) for event in made]
            else:
                if answering.ended:
                    outcomes.append((id, answering.complete()))
        return StepReport(weights, events, outcomes)

    def _extend(
        self, chain: TokenSequence, answer: ChoiceState, tokens: Sequence[SampledToken]
    ) -> list[Tokens]:
        scheduler, draft = self._there.scheduler, self._there.draft
        said = []
        for token in tokens:
            said.append(answer.add(token))
            if answer.ended:
                scheduler.close(chain)
                return said
        scheduler.know(chain, len(said))
        if draft is not None:
            draft.correct(chain)
        return said


class _Logits:
    """The logits of a step ``(kept, vocabulary)``; the likeliest tokens are found all at once."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        highest, likeliest = logits.max(dim=-1) if len(logits) else (logits, logits)
        self._highest: list[float] = highest.tolist()
        self._likeliest: list[int] = likeliest.tolist()

    def likeliest(self, row: int) -> int:
        """Raise ``FloatingPointError`` if a number in the row is none."""
        if not abs(self._highest[row]) < float("inf"):
            raise FloatingPointError("there is no likeliest token")
        return self._likeliest[row]

    def row(self, row: int) -> torch.Tensor:
        return self._logits[row].cpu()


def _choose(
    answer: ChoiceState, logits: _Logits, row: int, tried: list[int]
) -> list[SampledToken] | str:
    """Choose the next token, and on for as long as what was tried is what is chosen.

    Logits that overflow and a grammar in error fail their own request alone: return why.
    """
    chosen: list[SampledToken] = []
    sampler = answer.sampler
    try:
        for place in range(row, row + len(tried) + 1):
            if sampler.is_plain:
                chosen.append(SampledToken(logits.likeliest(place)))
            else:
                chosen.append(sampler.choose(logits.row(place)))
            if answer.ends_at(chosen[-1]) or tried[place - row :][:1] != [chosen[-1].token]:
                break
    except FloatingPointError:
        return "The model gave no numbers that a token could be chosen by."
    except GrammarError as error:
        return f"The answer could not be kept to its schema: {error}."
    return chosen


@contextmanager
def _memory_errors_by_name() -> Iterator[None]:
    """Give a GPU back what torch keeps for later; on a CPU torch has no error of that name."""
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise
