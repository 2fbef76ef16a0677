"""The language model engine: requests join and leave between steps, each with its own parameters.

A step decodes a token for every running sequence, or several if draft tokens are accepted, and
prefills the prompts of new requests. Everything that can run out of memory happens before any state
changes, so that a failed step can be repeated without the request that was dropped. Modules without
tensors decide: ``scheduler`` which sequences run, in which blocks; ``request``, ``text`` and
``tools`` what is emitted. ``decoder`` and ``cache`` compute.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import torch

from workers.contract.jobs import ChatInput, Event, Failed, Job, Outcome, RequestId, Tokens
from workers.contract.models import ModelSpec
from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.checkpoint import Checkpoint
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.loading import Room, estimate_memory, inspect_models, make_decoders
from workers.engines.llm.options import read_options
from workers.engines.llm.request import ChatRequest, ChoiceState, Verification, refuse, verify
from workers.engines.llm.sampling import SampledToken, propose
from workers.engines.llm.scheduling.blocks import BlockPool, Digests
from workers.engines.llm.scheduling.pacing import PrefillPacing
from workers.engines.llm.scheduling.scheduler import (
    Scheduler,
    SequenceGroup,
    StepPlan,
    TokenSequence,
    step_weights,
)
from workers.engines.llm.speculation import DraftModel, PromptLookup
from workers.engines.llm.tools import is_constrained
from workers.engines.llm.vision.pictures import Picture, PicturePrompt
from workers.engines.llm.vision.reader import Pictures
from workers.engines.memory import memory_of, translate_memory_errors
from workers.engines.threads import threads_for, use_threads
from workers.protocol.engine import (
    Admission,
    Admitted,
    CancelReason,
    Demand,
    Hardware,
    Inspected,
    Memory,
    PhaseClock,
    Prepared,
    StepReport,
    Wait,
)

log = logging.getLogger(__name__)

DUE_MS: Final = 60_000
"""A request is due this long after its admission, or at its own deadline if that is earlier."""
PRIORITY_MS: Final = 30_000
"""How much earlier a request is due for each level of priority."""


@dataclass(slots=True)
class _LoadedModel:
    checkpoint: Checkpoint
    decoder: Decoder
    scheduler: Scheduler
    draft: DraftModel | None
    pacing: PrefillPacing


class LlmEngine:
    """Serves any checkpoint directory of a supported family.

    Raise ``ValueError`` if an option is invalid.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = read_options(spec)
        self._requests: dict[RequestId, ChatRequest] = {}
        self._loaded: _LoadedModel | None = None
        self._weights_bytes = self._cache_bytes = self._optional_bytes = 0
        self._allowed_bytes: int | None = None
        self._threads = 1

    @property
    def _model(self) -> _LoadedModel:
        assert self._loaded is not None
        return self._loaded

    @property
    def checkpoint(self) -> Checkpoint:
        """The loaded weights and vocabulary."""
        return self._model.checkpoint

    @property
    def decoder(self) -> Decoder:
        return self._model.decoder

    @property
    def hardware(self) -> Hardware:
        return self._options.hardware

    @property
    def memory(self) -> Memory:
        return memory_of(
            self._options.torch_device,
            self._weights_bytes,
            self._cache_bytes,
            self._optional_bytes,
        )

    def allow(self, memory_bytes: int | None) -> None:
        self._allowed_bytes = memory_bytes

    def demand(self) -> Demand:
        return estimate_memory(self._spec, self._options)

    def inspect(self) -> Inspected:
        return inspect_models(self._spec, self._options)

    def load(self) -> None:
        """Load the weights, create the cache, warm up. Raise ``ValueError`` with the reason."""
        options = self._options
        room = Room(self._allowed_bytes, memory_of(options.torch_device, 0).device_used_bytes)
        checkpoint = Checkpoint(self._spec, options)
        self._threads = threads_for(checkpoint.model, options.threads)
        use_threads(self._threads)
        made = make_decoders(self._spec, options, checkpoint, room)
        self._weights_bytes, self._optional_bytes = made.weights_bytes, made.optional_bytes
        decoder, draft = made.decoder, made.draft
        scheduler = Scheduler(
            BlockPool(checkpoint.shape.blocks),
            slots=options.slots,
            block_tokens=checkpoint.shape.block_tokens,
            decode_tokens_max=options.decode_tokens_max,
        )
        pacing = PrefillPacing(block_tokens=checkpoint.shape.block_tokens)
        self._loaded = _LoadedModel(checkpoint, decoder, scheduler, draft, pacing)
        own_bytes = 0 if draft is None else draft.decoder.cache_bytes
        self._cache_bytes = decoder.cache_bytes + own_bytes

    def unload(self) -> None:
        self._loaded = None
        gc.collect()
        torch.cuda.empty_cache()

    def prepare(self, job: Job, files: Sequence[bytes]) -> Pictures:
        """Read the pictures of a conversation, on another thread."""
        reader = self._model.checkpoint.pictures
        return () if reader is None else reader.read_all(files)

    def admit(self, job: Job, clock: PhaseClock, files: Any = ()) -> Admission:
        with clock.phase("preprocess"):
            if self._model.scheduler.waiting >= 2 * self._options.slots:
                return Wait()
            try:
                chat = msgspec.convert(job.input, ChatInput)
            except msgspec.ValidationError as error:
                return Failed("invalid_input", f"The input is not a valid conversation: {error}.")
            checkpoint = self._model.checkpoint
            failure = refuse(
                chat,
                checkpoint.vocabulary,
                name=self._spec.name,
                slots=self._options.slots,
                reads_pictures=checkpoint.pictures is not None,
            )
            if failure is not None:
                return failure
            pictures: Pictures = (
                files.value if isinstance(files, Prepared) else self.prepare(job, files)
            )
            return pictures if isinstance(pictures, Failed) else self._admit(job, chat, pictures)

    def step(self, clock: PhaseClock) -> StepReport:
        scheduler, pacing = self._model.scheduler, self._model.pacing
        use_threads(self._threads)
        drafts = self._propose()
        plan = scheduler.plan(pacing.tokens_max)
        with torch.inference_mode(), translate_memory_errors():
            seen = self._encode_pictures(plan, clock)
            started_s = time.perf_counter()
            sampled = self._compute(plan, drafts, clock)
        pacing.record(
            decodes=len(plan.decodes),
            prefill_tokens=sum(chunk.stop - chunk.start for chunk in plan.prefills),
            spent_us=(time.perf_counter() - started_s) * 1e6,
        )
        scheduler.advance(plan)
        with clock.phase("postprocess"):
            return self._report(plan, sampled, seen)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self._requests[request_id].cancelled = reason
        self._model.scheduler.stop(request_id)

    def release(self, request_id: RequestId) -> None:
        del self._requests[request_id]
        self._model.scheduler.remove(request_id)

    # --- Admission --------------------------------------------------------------------------------

    def _admit(self, job: Job, chat: ChatInput, pictures: Sequence[Picture]) -> Admission:
        vocabulary = self._model.checkpoint.vocabulary
        pictured: PicturePrompt | None = None
        param = "prompt" if chat.prompts else "messages"
        try:
            if chat.prompts:
                prompts = [vocabulary.encode_prompt(prompt) for prompt in chat.prompts]
            else:
                tools = chat.tools if chat.tool_choice != "none" else ()
                prompts = [vocabulary.encode(chat.messages, tools)]
                if (reader := self._model.checkpoint.pictures) is not None and pictures:
                    pictured = reader.place(prompts[0], chat.messages, pictures)
                    prompts = [pictured.ids]
        except ValueError as error:
            what = "prompt" if chat.prompts else "conversation"
            return Failed(
                "invalid_input", f"The model cannot process this {what}: {error}.", param=param
            )
        for prompt in prompts:
            if failure := self._refuse_length(prompt, chat, param):
                return failure
        try:
            choices = [
                self._create_choice(job.request_id, number * chat.n + index, chat, prompt, pictured)
                for number, prompt in enumerate(prompts)
                for index in range(chat.n)
            ]
        except ValueError as error:
            param = "tools" if chat.tools else "response_format"
            return Failed("invalid_input", f"This schema is not supported: {error}.", param=param)
        request = self._requests[job.request_id] = ChatRequest(job.request_id, job.stream)
        for number, prompt in enumerate(prompts):
            keys = prompt if pictured is None else pictured.keys
            group, digests = self._schedule(job, keys, chat.n)
            request.groups.append(group)
            own = choices[number * chat.n : (number + 1) * chat.n]
            if self._options.caches_answers:
                for choice in own:
                    choice.digests = digests.copy()
            request.choices.update(zip(group.sequences, own, strict=True))
        return Admitted()

    def _refuse_length(self, prompt: Sequence[int], chat: ChatInput, param: str) -> Failed | None:
        context = self._model.checkpoint.context
        if len(prompt) >= context:
            what = "prompt" if chat.prompts else "conversation"
            return Failed(
                "context_length_exceeded",
                f"The {what} is {len(prompt)} tokens long, but this model's context is {context} "
                "tokens, and the answer needs at least one of them.",
                param=param,
            )
        if not self._model.scheduler.fits(len(prompt), chat.n, self._limit(prompt, chat)):
            shape = self._model.checkpoint.shape
            cache_tokens = shape.blocks * shape.block_tokens
            return Failed(
                "invalid_input",
                f"A prompt of {len(prompt)} tokens with {chat.n} choices of up to "
                f"{self._limit(prompt, chat)} tokens does not fit into this model's cache of "
                f"{cache_tokens} tokens.",
                param="n" if chat.n > 1 else "max_tokens",
            )
        return None

    def _limit(self, prompt: Sequence[int], chat: ChatInput) -> int:
        return min(chat.max_tokens, self._model.checkpoint.context - len(prompt))

    def _create_choice(
        self,
        request_id: RequestId,
        index: int,
        chat: ChatInput,
        prompt: Sequence[int],
        pictures: PicturePrompt | None,
    ) -> ChoiceState:
        """Raise ``ValueError`` if the schema of the answer is not supported."""
        vocabulary = self._model.checkpoint.vocabulary
        constraint = None
        if is_constrained(chat):
            constraint = vocabulary.grammars.constrain(
                chat, vocabulary.tool_format, request_id=request_id
            )
        choice = ChoiceState(
            index,
            chat,
            vocabulary,
            prompt=prompt,
            limit=self._limit(prompt, chat),
            constraint=constraint,
            pictures=pictures,
        )
        speculation = self._options.speculation
        if speculation is not None and speculation.method == "lookup":
            choice.lookup = PromptLookup(prompt)
        return choice

    def _schedule(
        self, job: Job, keys: Sequence[int], choices: int
    ) -> tuple[SequenceGroup, Digests]:
        """``keys``: the tokens of the prompt, as the prefix cache tells them apart."""
        now_ms = time.time() * 1000
        due = min(now_ms + DUE_MS, job.deadline_ms or now_ms + DUE_MS)
        digests = Digests(job.account_id, self._model.checkpoint.shape.block_tokens)
        if self._options.prefix_cache:
            digests.extend(keys)
        group = self._model.scheduler.add(
            job.request_id,
            prompt_tokens=len(keys),
            choices=choices,
            digests=digests.found,
            due=due - job.priority * PRIORITY_MS,
            priority=job.priority,
        )
        return group, digests

    # --- One step ---------------------------------------------------------------------------------

    def _choices(self) -> Iterator[tuple[TokenSequence, ChoiceState]]:
        for request in self._requests.values():
            yield from request.choices.items()

    def _propose(self) -> dict[TokenSequence, list[int]]:
        """Set the number of draft tokens of every sequence that only awaits its next token.

        Return the draft tokens themselves if they come from prompt lookup.
        """
        drafts: dict[TokenSequence, list[int]] = {}
        if self._options.speculation is None:
            return drafts
        for sequence, choice in self._choices():
            if not sequence.open or sequence.length - sequence.computed != 1:
                continue
            remaining = choice.limit - len(choice.tokens)
            count = min(self._options.decode_tokens_max, remaining) - 1
            if choice.lookup is not None:
                drafts[sequence] = choice.lookup.propose(count)
                count = len(drafts[sequence])
            sequence.draft_tokens = count
        return drafts

    def _encode_pictures(self, plan: StepPlan, clock: PhaseClock) -> dict[RequestId, float]:
        """Encode the pictures that this step prefills. Return what that costs, in tokens, by
        request."""
        costs: dict[RequestId, float] = {}
        if (tower := self._model.checkpoint.tower) is None:
            return costs
        choices = dict(self._choices())
        with clock.phase("forward"):
            for chunk in plan.prefills:
                if (pictured := choices[chunk.group.sequences[0]].pictures) is not None:
                    cost = tower.encode_missing(pictured.pictures_in(chunk.start, chunk.stop))
                    id = chunk.group.request_id
                    costs[id] = costs.get(id, 0.0) + cost
            self._model.decoder.wait()
        return costs

    def _compute(
        self, plan: StepPlan, drafts: Mapping[TokenSequence, Sequence[int]], clock: PhaseClock
    ) -> dict[TokenSequence, list[SampledToken] | str]:
        """Run the forwards of a step, then sample tokens for each sequence.

        A sequence whose sampling failed has the error message instead of tokens.
        """
        model = self._model
        decoder = model.decoder
        choices = dict(self._choices())
        prefills = [
            choices[chunk.group.sequences[0]].prompt_input(
                chunk.start, chunk.stop, chunk.group.blocks, logits_kept=int(chunk.is_last)
            )
            for chunk in plan.prefills
        ]
        if model.draft is not None:
            with clock.phase("forward"):
                model.draft.decoder.zero_blocks(plan.blocks_to_zero)
                drafts = model.draft.propose(
                    plan.decodes,
                    [replace(prefill, logits_kept=0, pictures=None) for prefill in prefills],
                    lambda sequence, position: choices[sequence].token_at(position),
                    lambda sequences, logits, offset: propose(
                        logits, [choices[sequence].sampler for sequence in sequences], offset
                    ),
                )
        with clock.phase("transfer"):
            decoder.zero_blocks(plan.blocks_to_zero)
            decodes = []
            for chunk in plan.decodes:
                sequence, choice = chunk.sequence, choices[chunk.sequence]
                until = min(chunk.stop, sequence.length)
                ids = [choice.token_at(position) for position in range(chunk.start, until)]
                ids += drafts.get(sequence, ())[: chunk.stop - until]
                logits_kept = chunk.stop - sequence.length + 1 if chunk.needs_logits else 0
                decodes.append(
                    SequenceInput(ids, chunk.start, sequence.blocks, logits_kept, choice.shift)
                )
            staged = decoder.stage(decodes, prefills)
            decoder.wait()
        with clock.phase("forward"):
            logits = decoder.run(staged)
            decoder.copy_blocks(plan.block_copies)
            if model.draft is not None:
                model.draft.decoder.copy_blocks(plan.block_copies)
            decoder.wait()
            asked: dict[TokenSequence, Verification] = {}
            row = 0
            for chunk, decode in zip(plan.decodes, decodes, strict=True):
                if decode.logits_kept:
                    verified = decode.ids[len(decode.ids) - decode.logits_kept + 1 :]
                    asked[chunk.sequence] = Verification(choices[chunk.sequence], row, verified)
                    row += decode.logits_kept
            for prefill in plan.prefills:
                if prefill.is_last:
                    for sequence in prefill.group.open_sequences:
                        if not choices[sequence].tokens:
                            asked[sequence] = Verification(choices[sequence], row)
                    row += 1
            verify(logits, list(asked.values()))
            for prefill in plan.prefills:
                pictured = choices[prefill.group.sequences[0]].pictures
                if prefill.is_last and pictured is not None:
                    pictured.forget()
            return {sequence: one.result for sequence, one in asked.items()}

    def _report(
        self,
        plan: StepPlan,
        sampled: Mapping[TokenSequence, list[SampledToken] | str],
        seen: Mapping[RequestId, float],
    ) -> StepReport:
        """Extend the choices. ``seen``: costs of pictures."""
        for decode in plan.decodes:
            if decode.needs_logits:
                request = self._requests[decode.sequence.group.request_id]
                request.drafted += decode.stop - decode.sequence.length
        events: list[tuple[RequestId, Event]] = []
        outcomes: list[tuple[RequestId, Outcome]] = []
        for id, request in self._requests.items():
            if request.cancelled is not None:
                outcomes.append((id, request.cancel(request.cancelled)))
                continue
            for sequence, choice in request.choices.items():
                if sequence not in sampled or choice.ended:
                    continue
                tokens = sampled[sequence]
                if isinstance(tokens, str):
                    log.error("no token", extra={"request_id": id, "reason": tokens})
                    outcomes.append((id, request.fail(tokens)))
                    break
                request.accepted += len(tokens) - 1
                first = not choice.tokens
                emitted = self._extend(sequence, choice, tokens)
                if first and request.stream:
                    emitted[0] = msgspec.structs.replace(emitted[0], usage=request.usage)
                events += [(id, event) for event in emitted]
            else:
                if request.ended:
                    outcomes.append((id, request.complete()))
        weights = step_weights(plan, self._model.checkpoint.context_cost)
        for id, cost in seen.items():
            weights[id] += cost
        return StepReport(weights, events, outcomes)

    def _extend(
        self, sequence: TokenSequence, choice: ChoiceState, tokens: Sequence[SampledToken]
    ) -> list[Tokens]:
        scheduler, draft = self._model.scheduler, self._model.draft
        events = []
        for token in tokens:
            events.append(choice.add(token))
            if choice.ended:
                scheduler.close(sequence)
                return events
        scheduler.append(sequence, len(events))
        if choice.digests is not None:
            choice.digests.extend([token.token for token in tokens])
            sequence.digests = choice.digests.found
            scheduler.publish(sequence)
        if draft is not None:
            draft.reject(sequence)
        return events
