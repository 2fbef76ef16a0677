"""The language model engine: requests join and leave between steps, each with its own parameters.

A step decodes a token for every running sequence, or several if draft tokens are accepted, and
prefills the prompts of new requests. Everything that can run out of memory happens before any state
changes, so that a failed step can be repeated without the request that was dropped. Modules without
tensors decide: ``scheduler`` which sequences run, in which blocks; ``request``, ``text`` and
``tools`` what is emitted. ``decoder`` and ``cache`` compute.

On CUDA the next step is launched before the tokens of this one are read, with their places filled
on the device: the host reports them while the device works. A sequence that ends is decoded once
more in vain.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch

from workers.contract.jobs import ChatInput, Event, Failed, Job, Outcome, RequestId, Tokens
from workers.contract.models import ModelSpec
from workers.engines.llm.checkpoint import Checkpoint
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.loading import Room, estimate_memory, inspect_models, make_decoders
from workers.engines.llm.options import read_options
from workers.engines.llm.request import ChatRequest, ChoiceState, refuse
from workers.engines.llm.sampling import SampledToken
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
from workers.engines.llm.steps.launch import Launch, Launcher, Unread
from workers.engines.llm.steps.verification import Verification, Verifying
from workers.engines.llm.tools import is_constrained
from workers.engines.llm.vision.pictures import Picture, PicturePrompt
from workers.engines.llm.vision.reader import Pictures
from workers.engines.memory import (
    COLLECTOR,
    is_out_of_memory,
    memory_of,
    parts_of,
    translate_memory_errors,
)
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
REST_STEPS: Final = 16
"""Steps after one that was launched ahead with a wrong token, and in vain, until the next is."""


@dataclass(slots=True)
class _LoadedModel:
    checkpoint: Checkpoint
    decoder: Decoder
    scheduler: Scheduler
    draft: DraftModel | None
    pacing: PrefillPacing
    launcher: Launcher


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
        self._ahead: Launch | None = None
        """The next step, if it was launched before the tokens of this one were read."""
        self._rest = 0
        """Number of steps in which none is launched ahead."""
        self.runs_ahead = (
            self._options.torch_device.type == "cuda" and self._options.speculation is None
        )
        """Whether the next step is launched before the tokens of this one are read. It cannot be
        with draft tokens, and gains nothing where a launch is the computation itself."""

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
        launcher = Launcher(decoder, draft, checkpoint.tower)
        self._loaded = _LoadedModel(checkpoint, decoder, scheduler, draft, pacing, launcher)
        own_bytes = 0 if draft is None else draft.decoder.cache_bytes
        self._cache_bytes = decoder.cache_bytes + own_bytes

    def unload(self) -> None:
        parts = parts_of(self._loaded, self._loaded and self._loaded.decoder)
        self._loaded = self._ahead = None
        COLLECTOR.free(parts)

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
        pacing = self._model.pacing
        use_threads(self._threads)
        with torch.inference_mode(), translate_memory_errors():
            launch = self._take_ahead() or self._launch(clock)
            plan = launch.live_plan()
            sampled = self._sample(launch, plan, clock)
        pacing.record(
            decodes=len(launch.plan.decodes),
            prefill_tokens=sum(chunk.stop - chunk.start for chunk in launch.plan.prefills),
            spent_us=(time.perf_counter() - launch.started_s) * 1e6,
        )
        with clock.phase("postprocess"):
            return self._report(plan, sampled, launch.costs)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self._requests[request_id].cancelled = reason
        self._model.scheduler.stop(request_id)

    def release(self, request_id: RequestId) -> None:
        request = self._requests.pop(request_id)
        for choice in request.choices.values():
            if choice.pictures is not None:
                choice.pictures.forget()
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

    def _launch(self, clock: PhaseClock) -> Launch:
        drafts = self._propose()
        plan = self._model.scheduler.plan(self._model.pacing.tokens_max)
        return self._model.launcher.launch(plan, dict(self._choices()), clock, drafts=drafts)

    def _take_ahead(self) -> Launch | None:
        """Return the step that was launched ahead, unless all of its requests have ended."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.is_wanted:
            return None
        return ahead

    def _sample(
        self, launch: Launch, plan: StepPlan, clock: PhaseClock
    ) -> dict[TokenSequence, list[SampledToken] | str]:
        """Sample tokens for each sequence; launch the next step before they are read.

        A sequence whose sampling failed has the error message instead of tokens.
        """
        choices = dict(self._choices())
        asked = launch.verifications(choices)
        with clock.phase("forward"):
            sampling = Verifying(launch.logits, list(asked.values())) if asked else None
        for prefill in plan.prefills:
            pictured = choices[prefill.group.sequences[0]].pictures
            if prefill.is_last and pictured is not None:
                pictured.forget()
        # Nothing more can run out of memory: the step has succeeded.
        self._model.scheduler.advance(plan)
        if sampling is None:
            return {}
        self._rest = max(self._rest - 1, 0)
        if self.runs_ahead and clock.alone and not self._rest:
            self._ahead = self._launch_ahead(asked, sampling.tokens, choices, clock)
        with clock.phase("forward"):
            is_same = sampling.finish()
        if self._ahead is not None:
            self._ahead.started_s = time.perf_counter()
            if not is_same:
                self._ahead, self._rest = None, REST_STEPS
        return {sequence: one.result for sequence, one in asked.items()}

    def _launch_ahead(
        self,
        asked: Mapping[TokenSequence, Verification],
        tokens: torch.Tensor,
        choices: Mapping[TokenSequence, ChoiceState],
        clock: PhaseClock,
    ) -> Launch | None:
        """Launch the next step as if every sequence continued that is not at its limit.

        A step that lacks memory is planned again, when it can end a request.
        """
        scheduler, pacing = self._model.scheduler, self._model.pacing
        for sequence, one in asked.items():
            if len(one.choice.tokens) + 1 < one.choice.limit:
                scheduler.append(sequence, 1)
            else:
                scheduler.close(sequence)
        unread = Unread(tokens, {sequence: place for place, sequence in enumerate(asked)})
        plan = scheduler.plan(pacing.tokens_max)
        try:
            return self._model.launcher.launch_ahead(plan, choices, clock, unread)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

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
            weights[id] = weights.get(id, 0.0) + cost
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
        # A step that was launched ahead has counted them already.
        scheduler.append(sequence, choice.length - sequence.length)
        if choice.digests is not None:
            choice.digests.extend([token.token for token in tokens])
            sequence.digests = choice.digests.found
            scheduler.publish(sequence)
        if draft is not None:
            draft.reject(sequence)
        return events
