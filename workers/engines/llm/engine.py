"""The language model engine: requests join and leave between steps, each with its own parameters.

A step adds one token to every running sequence and reads the prompts of some newcomers. All
forwards of a step are done before any state changes, so a step that runs out of memory can be
repeated without the request that was dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from workers.contract.jobs import (
    Cancelled,
    ChatInput,
    Choice,
    Completed,
    Event,
    Failed,
    FinishReason,
    Job,
    Outcome,
    RequestId,
    TokenLogprob,
    Tokens,
    Usage,
)
from workers.contract.models import ModelSpec
from workers.engines.llm.cache import SlotCache, attach
from workers.engines.llm.checkpoint import Checkpoint, read_options
from workers.engines.llm.sampling import Chosen, Sampler
from workers.engines.llm.scheduler import Scheduler, Seat
from workers.engines.llm.text import TextStream
from workers.engines.protocol import (
    Admission,
    Admitted,
    CancelReason,
    Estimate,
    PhaseClock,
    StepReport,
    Wait,
)


@dataclass(slots=True, eq=False)
class _Sequence:
    """One choice of a request while it is written."""

    index: int
    slot: int
    sampler: Sampler
    stream: TextStream
    position: int
    """Where the next token's keys and values go."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class _Request:
    job: Job
    chat: ChatInput
    prompt: list[int]
    seat: Seat
    sequences: list[_Sequence]
    reading: bool = True
    cancelled: CancelReason | None = None

    @property
    def usage(self) -> Usage:
        return Usage(
            requests=1,
            input_tokens=len(self.prompt),
            output_tokens=sum(len(sequence.tokens) for sequence in self.sequences),
        )

    @property
    def running(self) -> list[_Sequence]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def output(self) -> dict[str, list[Choice]]:
        return {
            "choices": [
                Choice(
                    sequence.index,
                    sequence.text,
                    sequence.finish_reason or "stop",
                    tuple(sequence.logprobs) if self.chat.logprobs else None,
                )
                for sequence in self.sequences
            ]
        }


class LlmEngine:
    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = read_options(spec)
        self._requests: dict[RequestId, _Request] = {}
        self._scheduler = Scheduler(self._options.slots)
        self._checkpoint: Checkpoint | None = None
        self._cache: SlotCache | None = None

    def load(self) -> None:
        """Read the weights and make the cache. Raise ``ValueError`` with the reason if not."""
        checkpoint = Checkpoint(self._spec, self._options)
        config = checkpoint.config
        head_dim = getattr(config, "head_dim", None)
        self._cache = SlotCache(
            layers=config.num_hidden_layers,
            slots=self._options.slots,
            kv_heads=config.num_key_value_heads,
            context=checkpoint.context,
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            dtype=checkpoint.dtype,
            device=checkpoint.device,
        )
        attach(checkpoint.model, self._cache)
        self._checkpoint = checkpoint
        with torch.inference_mode():
            self._read_prompt([0], slot=0)
            self._decode([])

    def unload(self) -> None:
        self._checkpoint = self._cache = None

    def estimate(self, job: Job) -> Estimate:
        """The cache is allocated once for all slots, so a request takes no memory of its own."""
        chat = msgspec.convert(job.input, ChatInput)
        return Estimate(device_us=(chat.max_tokens * chat.n) * 5_000, bytes=0)

    def admit(self, job: Job, clock: PhaseClock) -> Admission:
        checkpoint = self._loaded
        with clock.phase("preprocess"):
            try:
                chat = msgspec.convert(job.input, ChatInput)
            except msgspec.ValidationError as error:
                return Failed("invalid_input", f"The input is no conversation: {error}.")
            if refused := self._refuse(chat):
                return refused
            prompt = self._tokenize(chat)
            if len(prompt) >= checkpoint.context:
                return Failed(
                    "context_length_exceeded",
                    f"The conversation is {len(prompt)} tokens long, and this model's context is "
                    f"{checkpoint.context}; at least one must be left for the answer.",
                    param="messages",
                )
            seat = self._scheduler.seat(job.request_id, choices=chat.n, prompt_tokens=len(prompt))
            if seat is None:
                return Wait()
            self._requests[job.request_id] = _Request(
                job, chat, prompt, seat, self._sequences(chat, prompt, seat)
            )
        return Admitted()

    def step(self, clock: PhaseClock) -> StepReport:
        reading = [
            self._requests[seat.request_id]
            for seat in self._scheduler.to_read()
            if self._requests[seat.request_id].cancelled is None
        ]
        writing = [
            request
            for request in self._requests.values()
            if not request.reading and request.cancelled is None
        ]
        with torch.inference_mode():
            chosen = self._compute(reading, writing, clock)
        with clock.phase("postprocess"):
            return self._report(reading, writing, chosen)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self._requests[request_id].cancelled = reason

    def release(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)
        self._scheduler.leave(request_id)

    @property
    def _loaded(self) -> Checkpoint:
        assert self._checkpoint is not None, "the model is not loaded"
        return self._checkpoint

    def _refuse(self, chat: ChatInput) -> Failed | None:
        if chat.response_format is not None:
            return Failed(
                "unsupported_parameter",
                f"response_format {chat.response_format.get('type')!r} is not supported by this "
                "model's engine; leave it out or ask for text.",
                param="response_format",
            )
        if chat.n > self._options.slots:
            return Failed(
                "invalid_input",
                f"n is {chat.n}, and this model writes at most {self._options.slots} at a time.",
                param="n",
            )
        return None

    def _tokenize(self, chat: ChatInput) -> list[int]:
        tokenizer = self._loaded.tokenizer
        messages = [
            {"role": message.role, "content": message.content}
            | ({"name": message.name} if message.name else {})
            for message in chat.messages
        ]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _sequences(self, chat: ChatInput, prompt: list[int], seat: Seat) -> list[_Sequence]:
        return [
            _Sequence(
                index=index,
                slot=slot,
                sampler=Sampler(chat, prompt=prompt, seed=chat.seed + index),
                stream=TextStream(self._decode_ids, chat.stop),
                position=len(prompt),
            )
            for index, slot in enumerate(seat.slots)
        ]

    def _decode_ids(self, ids: Sequence[int]) -> str:
        text: str = self._loaded.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _compute(
        self, reading: Sequence[_Request], writing: Sequence[_Request], clock: PhaseClock
    ) -> dict[tuple[RequestId, int], Chosen]:
        """Run the forwards of a step, then choose a token for every sequence in it."""
        with clock.phase("transfer"):
            running = [sequence for request in writing for sequence in request.running]
            tensors = self._decode_inputs(running) if running else None
        with clock.phase("forward"):
            # Idle slots are written to at position 0 by a decode, so prompts are read after it.
            logits = self._decode(running, tensors) if running else None
            firsts = [
                self._read_prompt(request.prompt, slot=request.seat.slots[0]) for request in reading
            ]
            if self._loaded.device.type == "cuda":
                torch.cuda.synchronize(self._loaded.device)
            chosen: dict[tuple[RequestId, int], Chosen] = {}
            for request, first in zip(reading, firsts, strict=True):
                assert self._cache is not None
                self._cache.copy(request.seat.slots[0], request.seat.slots[1:], len(request.prompt))
                for sequence in request.sequences:
                    place = (request.job.request_id, sequence.index)
                    chosen[place] = sequence.sampler.choose(first)
            for request in writing:
                for sequence in request.running:
                    assert logits is not None
                    place = (request.job.request_id, sequence.index)
                    chosen[place] = sequence.sampler.choose(logits[sequence.slot])
        return chosen

    def _read_prompt(self, prompt: Sequence[int], *, slot: int) -> torch.Tensor:
        """Read a prompt into a slot; return the logits ``(vocabulary,)`` of what comes next."""
        assert self._cache is not None
        self._cache.begin_prefill(slot)
        device = self._loaded.device
        ids = torch.tensor([list(prompt)], device=device)
        positions = torch.arange(len(prompt), device=device)[None]
        out = self._loaded.model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1
        )
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def _decode_inputs(
        self, running: Sequence[_Sequence]
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Last tokens ``(slots, 1)`` and positions ``(slots,)``, int64; idle slots are 0."""
        tokens = [0] * self._options.slots
        positions = [0] * self._options.slots
        for sequence in running:
            tokens[sequence.slot] = sequence.tokens[-1]
            positions[sequence.slot] = sequence.position
        device = self._loaded.device
        return (
            torch.tensor(tokens, device=device)[:, None],
            torch.tensor(positions, device=device),
            max(positions),
        )

    def _decode(
        self,
        running: Sequence[_Sequence],
        inputs: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    ) -> torch.Tensor:
        """Add one token to every slot; return logits ``(slots, vocabulary)``."""
        assert self._cache is not None
        tokens, positions, longest = inputs or self._decode_inputs(running)
        self._cache.begin_decode(positions, longest)
        out = self._loaded.model(input_ids=tokens, position_ids=positions[:, None], use_cache=False)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _report(
        self,
        reading: Sequence[_Request],
        writing: Sequence[_Request],
        chosen: dict[tuple[RequestId, int], Chosen],
    ) -> StepReport:
        weights: dict[RequestId, float] = {}
        events: list[tuple[RequestId, Event]] = []
        outcomes: list[tuple[RequestId, Outcome]] = []
        for request in reading:
            weights[request.job.request_id] = float(len(request.prompt))
            self._scheduler.mark_read(request.seat)
            request.reading = False
        for request in writing:
            weights[request.job.request_id] = float(len(request.running))
        for request in (*reading, *writing):
            id = request.job.request_id
            events.extend(
                (id, self._extend(request, sequence, chosen[id, sequence.index]))
                for sequence in request.running
            )
            if not request.running:
                outcomes.append((id, Completed(request.usage, output=request.output())))
        outcomes.extend(
            (id, Cancelled(request.cancelled, usage=request.usage, output=request.output()))
            for id, request in self._requests.items()
            if request.cancelled is not None
        )
        return StepReport(weights, events, outcomes)

    def _extend(self, request: _Request, sequence: _Sequence, chosen: Chosen) -> Tokens:
        """Add a token to a sequence, end it if it is at its end, and say what is new."""
        checkpoint = self._loaded
        if sequence.tokens:
            sequence.position += 1
        sequence.tokens.append(chosen.token)
        ended = chosen.token in checkpoint.end_tokens
        text = "" if ended else sequence.stream.push(chosen.token)
        logprobs: tuple[TokenLogprob, ...] | None = None
        if chosen.logprob is not None and not ended:
            logprobs = (self._logprob(chosen),)
            sequence.logprobs.extend(logprobs)
        if ended or sequence.stream.stopped:
            sequence.finish_reason = "stop"
        elif (
            len(sequence.tokens) >= request.chat.max_tokens
            or len(request.prompt) + len(sequence.tokens) >= checkpoint.context
        ):
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            text += sequence.stream.flush()
        sequence.text += text
        return Tokens(sequence.index, text, 1, logprobs, sequence.finish_reason)

    def _logprob(self, chosen: Chosen) -> TokenLogprob:
        assert chosen.logprob is not None
        return TokenLogprob(
            self._token_text(chosen.token),
            chosen.logprob,
            tuple((self._token_text(token), logprob) for token, logprob in chosen.top),
        )

    def _token_text(self, token: int) -> str:
        text: Any = self._loaded.tokenizer.decode([token])
        return str(text)
