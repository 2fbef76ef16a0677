"""Steps an engine as the step loop does, and collects its events and outcomes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from workers.contract.jobs import (
    Cancelled,
    ChatInput,
    ChatMessage,
    Completed,
    Failed,
    Job,
    Outcome,
    RequestId,
    Tokens,
)
from workers.engines.llm.engine import LlmEngine
from workers.protocol.engine import Admission, Admitted, Phase


def job(name: str, content: str, *, stream: bool = True, role: str = "user", **chat: Any) -> Job:
    given = {"max_tokens": 12, "temperature": 0.0, **chat}
    message = msgspec.convert({"role": role, "content": content}, ChatMessage)
    value = ChatInput(messages=(message,), **given)
    return Job(
        request_id=RequestId(name),
        account_id="1",
        model="tiny",
        task="text-generation",
        input=msgspec.to_builtins(value),
        stream=stream,
    )


class Clock:
    """A phase clock that only records the names of the phases."""

    alone = True

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        self.phases.append(name)
        yield


class Driver:
    """Steps an engine; when memory runs out, ends the youngest request."""

    def __init__(self, engine: LlmEngine) -> None:
        self.engine = engine
        self.clock = Clock()
        self.outcomes: dict[str, Outcome] = {}
        self.events: dict[str, list[Tokens]] = {}
        self._admitted: list[RequestId] = []

    def admit(self, wanted: Job, files: Sequence[bytes] = ()) -> Admission:
        admission = self.engine.admit(wanted, self.clock, files)
        if isinstance(admission, Admitted):
            self._admitted.append(wanted.request_id)
        return admission

    def step(self) -> Mapping[RequestId, float]:
        try:
            report = self.engine.step(self.clock)
        except (MemoryError, torch.OutOfMemoryError):
            self._end(self._admitted[-1], Failed("out_of_memory", "no memory"))
            return {}
        for id, event in report.events:
            assert isinstance(event, Tokens)
            self.events.setdefault(f"{id}/{event.index}", []).append(event)
        for id, outcome in report.outcomes:
            self._end(id, outcome)
        return report.weights

    def text(self, choice: str) -> str:
        """Return the streamed text of one choice, named ``request/index``."""
        return "".join(event.text for event in self.events.get(choice, ()))

    def finish(self, *names: str) -> None:
        for _ in range(600):
            if all(name in self.outcomes for name in names):
                return
            self.step()
        raise AssertionError(f"{names} did not end")

    def _end(self, id: RequestId, outcome: Outcome) -> None:
        assert id not in self.outcomes, "a request ends once"
        self.outcomes[id] = outcome
        self._admitted.remove(id)
        self.engine.release(id)


def run_alone(engine: LlmEngine, wanted: Job, files: Sequence[bytes] = ()) -> Outcome:
    driver = Driver(engine)
    driver.admit(wanted, files)
    driver.finish(wanted.request_id)
    return driver.outcomes[wanted.request_id]


def choices(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the choices as they are sent, with log probabilities to the last bit."""
    assert isinstance(outcome, Completed | Cancelled), outcome
    found: list[dict[str, Any]] = msgspec.to_builtins(outcome.output["choices"])
    return found


def texts(outcome: Outcome) -> list[str]:
    return [choice["text"] for choice in choices(outcome)]
