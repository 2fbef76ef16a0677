"""The language model engine: requests join and leave between steps, each with its own parameters.

A step adds one token to every running sequence and reads the prompts of newcomers. Everything that
can run out of memory is done before any state changes, so such a step can be repeated without the
request that was dropped. Modules that touch no tensor decide: ``scheduler`` who takes part,
``answers`` and ``text`` what is said; ``decoder`` and ``cache`` compute.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from workers.contract.jobs import ChatInput, Event, Failed, Job, Outcome, RequestId
from workers.contract.models import ModelSpec
from workers.engines.llm.answers import Answer, Answering
from workers.engines.llm.checkpoint import Checkpoint
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.estimate import Sizes, read_sizes
from workers.engines.llm.options import read_options
from workers.engines.llm.sampling import Chosen
from workers.engines.llm.scheduler import Plan, Scheduler
from workers.engines.protocol import (
    Admission,
    Admitted,
    CancelReason,
    Estimate,
    PhaseClock,
    StepReport,
    Wait,
)


class LlmEngine:
    """Any checkpoint directory of a proven family. Raise ``ValueError`` if an option is wrong."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = read_options(spec)
        self._scheduler = Scheduler(self._options.slots)
        self._answering: dict[RequestId, Answering] = {}
        self._sizes: Sizes | None = None
        self._checkpoint: Checkpoint | None = None
        self._decoder: Decoder | None = None

    def load(self) -> None:
        """Read the weights, make the cache, warm up. Raise ``ValueError`` with the reason."""
        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)
        checkpoint = Checkpoint(self._spec, self._options)
        decoder = Decoder(checkpoint)
        with torch.inference_mode():
            decoder.read(decoder.stage_reading(0, [0], start=0, stop=1))
            decoder.write(decoder.stage_writing([(0, 0, 1)], []))
        self._checkpoint, self._decoder = checkpoint, decoder

    def unload(self) -> None:
        self._checkpoint = self._decoder = None
        gc.collect()
        torch.cuda.empty_cache()

    def estimate(self, job: Job) -> Estimate:
        if self._sizes is None:
            self._sizes = read_sizes(self._spec, self._options)
        return self._sizes.estimate(msgspec.convert(job.input, ChatInput))

    def admit(self, job: Job, clock: PhaseClock) -> Admission:
        with clock.phase("preprocess"):
            try:
                chat = msgspec.convert(job.input, ChatInput)
            except msgspec.ValidationError as error:
                return Failed("invalid_input", f"The input is no conversation: {error}.")
            return self._refuse(chat) or self._seat(job.request_id, chat)

    def step(self, clock: PhaseClock) -> StepReport:
        plan = self._scheduler.plan()
        with torch.inference_mode(), _memory_errors_by_name():
            chosen = self._compute(plan, clock)
        self._scheduler.advance(plan)
        with clock.phase("postprocess"):
            return self._report(plan, chosen)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self._answering[request_id].cancelled = reason
        self._scheduler.halt(request_id)

    def release(self, request_id: RequestId) -> None:
        assert self._decoder is not None
        answering = self._answering.pop(request_id)
        self._decoder.clear(answering.seat.slots, answering.extent)
        self._scheduler.leave(request_id)

    # --- Admission --------------------------------------------------------------------------------

    def _refuse(self, chat: ChatInput) -> Failed | None:
        """Refuse what cannot be done, or what would harm others; the gateway checked the rest."""
        assert self._checkpoint is not None
        size = self._checkpoint.vocabulary.size
        format = (chat.response_format or {}).get("type", "text")
        if format != "text":
            return Failed(
                "unsupported_parameter",
                f"response_format {format!r} is not supported by this model's engine; leave it out "
                "or ask for 'text'.",
                param="response_format",
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

    def _seat(self, request_id: RequestId, chat: ChatInput) -> Admission:
        assert self._checkpoint is not None
        vocabulary, context = self._checkpoint.vocabulary, self._checkpoint.shape.context
        try:
            prompt = vocabulary.encode(chat.messages)
        except ValueError as error:
            return Failed(
                "invalid_input",
                f"The model cannot read this conversation: {error}.",
                param="messages",
            )
        if len(prompt) >= context:
            return Failed(
                "context_length_exceeded",
                f"The conversation is {len(prompt)} tokens long, and this model's context is "
                f"{context}; at least one must be left for the answer.",
                param="messages",
            )
        limit = min(chat.max_tokens, context - len(prompt))
        answers = [
            Answer(index, chat, vocabulary, prompt=prompt, limit=limit) for index in range(chat.n)
        ]
        seat = self._scheduler.seat(request_id, choices=chat.n, prompt_tokens=len(prompt))
        if seat is None:
            return Wait()
        self._answering[request_id] = Answering(request_id, seat, prompt, answers)
        return Admitted()

    # --- One step ---------------------------------------------------------------------------------

    def _compute(self, plan: Plan, clock: PhaseClock) -> dict[Answer, Chosen | None]:
        """Run the forwards of a step, then choose what each answer says next; None if it cannot."""
        decoder = self._decoder
        assert decoder is not None
        with clock.phase("transfer"):
            writers = [
                pair for seat in plan.writers for pair in self._answering[seat.request_id].open
            ]
            half_read = [(piece.seat.slots[0], piece.seat.read) for piece in plan.pieces]
            writing = decoder.stage_writing(
                [(slot, *answer.last) for slot, answer in writers], half_read
            )
            readings = [
                decoder.stage_reading(
                    piece.seat.slots[0],
                    self._answering[piece.seat.request_id].prompt,
                    start=piece.start,
                    stop=piece.stop,
                )
                for piece in plan.pieces
            ]
            decoder.wait()
        logits: dict[Answer, torch.Tensor] = {}
        with clock.phase("forward"):
            if writers:
                written = decoder.write(writing)
                logits |= {answer: written[slot] for slot, answer in writers}
            for piece, reading in zip(plan.pieces, readings, strict=True):
                read = decoder.read(reading)
                if piece.is_last:
                    first, *others = piece.seat.slots
                    decoder.copy(first, others, piece.stop)
                    answers = self._answering[piece.seat.request_id].answers
                    logits |= dict.fromkeys(answers, read)
            decoder.wait()
            return {answer: _choose(answer, values) for answer, values in logits.items()}

    def _report(self, plan: Plan, chosen: dict[Answer, Chosen | None]) -> StepReport:
        """Extend the answers; a request weighs as many tokens as were read and written for it."""
        weights: dict[RequestId, float] = {}
        for piece in plan.pieces:
            id = piece.seat.request_id
            weights[id] = weights.get(id, 0.0) + piece.stop - piece.start
        for seat in plan.writers:
            weights[seat.request_id] = float(len(self._answering[seat.request_id].open))
        events: list[tuple[RequestId, Event]] = []
        outcomes: list[tuple[RequestId, Outcome]] = []
        for id, answering in self._answering.items():
            if answering.cancelled is not None:
                outcomes.append((id, answering.break_off(answering.cancelled)))
                continue
            for _, answer in answering.open:
                if answer not in chosen:
                    continue
                if (token := chosen[answer]) is None:
                    outcomes.append((id, answering.fail()))
                    break
                events.append((id, answer.add(token)))
            else:
                if not answering.open:
                    outcomes.append((id, answering.complete()))
        return StepReport(weights, events, outcomes)


def _choose(answer: Answer, logits: torch.Tensor) -> Chosen | None:
    """A model whose numbers overflow fails the request that made them, and nobody else."""
    try:
        return answer.choose(logits)
    except FloatingPointError:
        return None


@contextmanager
def _memory_errors_by_name() -> Iterator[None]:
    """Give a GPU back what torch keeps for later; on a CPU torch has no error of that name."""
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):
            raise MemoryError(str(error)) from error
        raise
