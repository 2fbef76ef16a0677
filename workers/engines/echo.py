"""An instant engine that answers with the last user message. For tests and benchmarks only.

It computes nothing and is in no default catalog; it exercises everything around an engine. A token
is a word. With ``unsafe_test_hooks`` a message can trigger faults: ``!crash`` kills the process,
``!hang`` never returns from the step, ``!long`` takes seconds and reports progress, ``!fail``
raises, ``!fail late …`` raises after its first words. The files of a job are emitted as previews in
its first step and returned at its end.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

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
    Sketch,
    Tokens,
    Usage,
)
from workers.contract.media import File
from workers.contract.models import ModelSpec
from workers.protocol.engine import (
    Admission,
    Admitted,
    CancelReason,
    PhaseClock,
    StepReport,
    Wait,
)
from workers.pulse import PULSE

_WORD: Final = re.compile(r"\S+\s*")


class Options(msgspec.Struct, frozen=True):
    """Options of the catalog entry, beside those of every engine (``registry.Serving``)."""

    slots: int = 256
    """Maximum number of admitted requests."""
    tokens_per_step: int = 0
    """Tokens per step of each choice; 0 emits all at once."""
    step_us: int = 0
    """Simulated duration of a step."""
    load_us: int = 0
    unsafe_test_hooks: bool = False


@dataclass(slots=True)
class _Echo:
    words: list[str]
    limit: int
    input_tokens: int
    choices: int
    stream: bool
    command: str | None = None
    files: tuple[File, ...] = ()
    emitted: int = 0
    """Words emitted so far, of each choice."""
    cancelled: CancelReason | None = None

    def usage(self) -> Usage:
        return Usage(
            requests=1, input_tokens=self.input_tokens, output_tokens=self.emitted * self.choices
        )

    def output(self, finish_reason: FinishReason) -> dict[str, list[Choice]]:
        text = "".join(self.words[: self.emitted])
        return {"choices": [Choice(i, text, finish_reason) for i in range(self.choices)]}


class EchoEngine:
    def __init__(self, spec: ModelSpec) -> None:
        self._options = msgspec.convert(spec.options, Options)
        self._echoes: dict[RequestId, _Echo] = {}

    def load(self) -> None:
        time.sleep(self._options.load_us / 1e6)

    def unload(self) -> None:
        self._echoes.clear()

    def admit(self, job: Job, clock: PhaseClock, files: Sequence[bytes] = ()) -> Admission:
        if len(self._echoes) >= self._options.slots:
            return Wait()
        try:
            chat = msgspec.convert(job.input, ChatInput)
        except msgspec.ValidationError as error:
            return Failed(
                code="invalid_input", message=f"The input is not a valid conversation: {error}"
            )
        prompts = [prompt for prompt in chat.prompts if isinstance(prompt, str)]
        messages = [m.content for m in chat.messages if m.role == "user"]
        text = next(reversed(messages or prompts), "")
        words = _WORD.findall(text)
        self._echoes[job.request_id] = _Echo(
            words=words,
            limit=min(len(words), chat.max_tokens),
            input_tokens=sum(
                len(text.split()) for text in (*(m.content for m in chat.messages), *prompts)
            ),
            choices=chat.n,
            stream=job.stream,
            command=text if self._options.unsafe_test_hooks else None,
            files=tuple(
                File(ref.content_type, data)
                for ref, data in zip(job.attachments, files, strict=True)
                if self._options.unsafe_test_hooks
            ),
        )
        return Admitted()

    def step(self, clock: PhaseClock) -> StepReport:
        if self._options.step_us:
            with clock.phase("forward"):
                time.sleep(self._options.step_us / 1e6)
        weights: dict[RequestId, float] = {}
        events: list[tuple[RequestId, Event]] = []
        outcomes: list[tuple[RequestId, Outcome]] = []
        for request_id, echo in self._echoes.items():
            if echo.cancelled is not None:
                outcomes.append((request_id, _cancel(echo, echo.cancelled)))
                continue
            _obey(echo.command, echo.emitted)
            start = echo.emitted
            echo.emitted = min(echo.limit, start + (self._options.tokens_per_step or echo.limit))
            weights[request_id] = 1.0 + echo.emitted - start
            finish_reason: FinishReason | None = None
            if echo.emitted == echo.limit:
                finish_reason = "stop" if echo.limit == len(echo.words) else "length"
                output = echo.output(finish_reason)
                outcomes.append(
                    (request_id, Completed(echo.usage(), output=output, files=echo.files))
                )
            if start == 0:
                for index, file in enumerate(echo.files):
                    events.append((request_id, Sketch(index, 0, file)))
            text = "".join(echo.words[start : echo.emitted])
            for index in range(echo.choices):
                event = Tokens(index, text, echo.emitted - start, finish_reason=finish_reason)
                if start == 0 and echo.stream:
                    event = msgspec.structs.replace(event, usage=echo.usage())
                events.append((request_id, event))
        return StepReport(weights, events, outcomes)

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self._echoes[request_id].cancelled = reason

    def release(self, request_id: RequestId) -> None:
        del self._echoes[request_id]


def _cancel(echo: _Echo, reason: CancelReason) -> Cancelled:
    return Cancelled(reason, usage=echo.usage(), output=echo.output("stop"))


def _obey(command: str | None, emitted: int) -> None:
    if command is not None and emitted and command.startswith("!fail late"):
        raise RuntimeError("asked to fail")
    match command:
        case "!crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "!hang":
            time.sleep(3600)
        case "!long":
            for _ in range(12):
                time.sleep(0.4)
                PULSE.beat()
        case "!fail":
            raise RuntimeError("asked to fail")
