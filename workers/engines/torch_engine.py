"""Base of the engines that run on torch, except the language models' engine.

Owns what they share: options, the loaded model, its CPU threads, and the admitted requests. An
engine adds how its model is loaded, how a job is read, what it costs, and what a step computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import msgspec
import torch

from workers.contract.jobs import Failed, FailureCode, Job, RequestId, Usage
from workers.contract.models import ModelSpec
from workers.engines.memory import (
    COLLECTOR,
    demand_of,
    memory_of,
    parts_of,
    total_bytes,
    weights_bytes,
)
from workers.engines.options import TorchOptions
from workers.engines.threads import threads_for, use_threads
from workers.media.pixels import MediaError
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


class RunningRequest(Protocol):
    cancelled: CancelReason | None


OptionsT = TypeVar("OptionsT", bound=TorchOptions)
ModelT = TypeVar("ModelT")
RequestT = TypeVar("RequestT", bound=RunningRequest)
InputT = TypeVar("InputT")


class InputError(Exception):
    """Raised for a job that the model cannot process; ``failure`` is its outcome."""

    def __init__(self, code: FailureCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.failure = Failed(code, message, param=param)


class TorchEngine(ABC, Generic[OptionsT, ModelT, RequestT]):
    def __init__(self, spec: ModelSpec, options: OptionsT) -> None:
        self._spec = spec
        self._options = options
        self._threads = 1
        self._loaded: ModelT | None = None
        self._weights_bytes = 0
        self._running: dict[RequestId, RequestT] = {}

    @property
    def _model(self) -> ModelT:
        assert self._loaded is not None
        return self._loaded

    @property
    def hardware(self) -> Hardware:
        return self._options.hardware

    @property
    def memory(self) -> Memory:
        return memory_of(self._options.torch_device, self._weights_bytes)

    def demand(self) -> Demand:
        found = self._inspect() or Inspected()
        return demand_of(self._spec, self._options, found.cache_bytes)

    def inspect(self) -> Inspected:
        found, device = self._inspect() or Inspected(), self._options.torch_device
        return replace(found, device=self.hardware.device, memory_bytes=total_bytes(device))

    def load(self) -> None:
        """Load the weights and warm up. Raise ``ValueError`` with the reason if that fails."""
        self._loaded = self._load()
        self._weights_bytes = weights_bytes(self._loaded)

    def unload(self) -> None:
        parts = parts_of(self._loaded)
        self._loaded = None
        COLLECTOR.free(parts)

    def admit(
        self, job: Job, clock: PhaseClock, files: Sequence[bytes] | Prepared = ()
    ) -> Admission:
        if self._occupied >= self._options.slots:
            return Wait()
        with clock.phase("preprocess"):
            request = files.value if isinstance(files, Prepared) else self._prepare(job, files)
        if isinstance(request, Failed):
            return request
        self._start(job.request_id, request, clock)
        return Admitted()

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self._running[request_id].cancelled = reason

    def release(self, request_id: RequestId) -> None:
        del self._running[request_id]

    @abstractmethod
    def step(self, clock: PhaseClock) -> StepReport: ...

    @abstractmethod
    def _inspect(self) -> Inspected | None:
        """Check the checkpoint as ``_load`` does, but without reading the weights."""

    @abstractmethod
    def _load(self) -> ModelT:
        """Load the model, choose its threads (``_choose_threads``) and run it once."""

    @abstractmethod
    def _read(self, job: Job, files: Sequence[bytes]) -> RequestT:
        """Read a job's input and files. Raise ``InputError`` if the model cannot process them."""

    @property
    def _occupied(self) -> int:
        """Number of slots in use."""
        return len(self._running)

    def _prepare(self, job: Job, files: Sequence[bytes]) -> RequestT | Failed:
        try:
            return self._read(job, files)
        except InputError as error:
            return error.failure

    def _start(self, request_id: RequestId, request: RequestT, clock: PhaseClock) -> None:
        self._running[request_id] = request

    def _choose_threads(self, module: torch.nn.Module) -> None:
        self._threads = threads_for(module, self._options.threads)
        use_threads(self._threads)


def read_input(job: Job, kind: type[InputT]) -> InputT:
    """Convert a job's input. Raise ``InputError`` if it does not have the fields of ``kind``."""
    try:
        return msgspec.convert(job.input, kind)
    except msgspec.ValidationError as error:
        raise InputError("invalid_input", f"The input is not valid: {error}.") from error


@contextmanager
def reading(param: str) -> Iterator[None]:
    """Turn a ``MediaError`` into an ``InputError`` that names ``param``."""
    try:
        yield
    except MediaError as error:
        raise InputError("invalid_input", str(error), param) from error


def out_of_memory(usage: Usage) -> Failed:
    message = "The device has too little memory for this request."
    return Failed("out_of_memory", message, usage=usage)
