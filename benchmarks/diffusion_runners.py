"""The compared runners: our engine, the pipeline one by one, and the pipeline in batches.

All run in this process, alternately, on weights read from the same directory, and all produce an
encoded PNG. For the comparison, each image is also kept as floats.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from workers.contract.jobs import Completed, Job, RequestId
from workers.contract.media import ImageInput
from workers.contract.models import ModelSpec
from workers.engines.cooperative_batching import TurnResult
from workers.engines.diffusion import families, loading, request
from workers.engines.diffusion.engine import DiffusionEngine
from workers.media import encode
from workers.runtime.step_loop import StepLoop

MODEL = "bench"


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of all runners. ``together`` is the maximum batch size."""

    checkpoint: Path
    together: int
    device: str
    dtype: str
    threads: int
    processor_time: bool = False
    """Whether processor time is measured instead of wall time. Waiting then takes no time. For one
    thread on a busy machine."""

    def now_s(self) -> float:
        return time.process_time() if self.processor_time else time.perf_counter()

    @property
    def kind(self) -> str:
        return loading.pipeline_class_of(self.checkpoint)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request; ``at_s`` is relative to the start of the run. The number is also the seed."""

    number: int
    prompt: str
    steps: int
    at_s: float


class Clock:
    """Seconds since the start of a run."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._started_s = setting.now_s()

    def now_s(self) -> float:
        return self._setting.now_s() - self._started_s

    def wait(self, seconds: float) -> None:
        if self._setting.processor_time:
            self._started_s -= max(0.0, seconds)
        else:
            time.sleep(max(0.0, seconds))


@dataclass(slots=True)
class RunResult:
    """Results of a run, by number of the request; ``batches`` has the size of each forward pass."""

    latency_s: dict[int, float] = field(default_factory=dict)
    images: dict[int, Any] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    makespan_s: float = 0.0
    busy_s: float = 0.0
    processor_s: float = 0.0
    """Processor time of this process, which is independent of other load on the machine."""


class Runner(Protocol):
    def run(self, arrivals: Sequence[Arrival]) -> RunResult:
        """Generate all, each from its time of arrival on; they are sorted by it."""
        ...


def wait_for_device() -> None:
    """Synchronise CUDA, which is asynchronous; nothing to do on the CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _Watched(DiffusionEngine):
    """Keeps each image as returned by its pipeline, and the batch size of each forward pass."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.result = RunResult()

    def load(self) -> None:
        super().load()
        assert self._loaded is not None
        self.denoiser: Any = self._loaded.denoiser
        pipeline = self._loaded.pipelines[self._loaded.families["text-to-image"].pipeline]
        kind = type(pipeline)

        def generate(self_: Any, *args: Any, generator: torch.Generator, **kwargs: Any) -> Any:
            result = kind.__call__(self_, *args, generator=generator, **kwargs)
            self.result.images[generator.initial_seed()] = np.asarray(result.images[0])
            return result

        pipeline.__class__ = type(kind.__name__, (kind,), {"__call__": generate})
        turn = self._batcher.turn

        def recorded_turn(phase: Any) -> TurnResult:
            result = turn(phase)
            if result.point is not None and result.point.phase == "forward":
                self.result.batches.append(len(result.rows))
            return result

        self._batcher.turn = recorded_turn  # type: ignore[method-assign]  # instrumentation


class Ours:
    """The step loop with the engine, as in a worker."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        options: dict[str, Any] = {
            "slots": setting.together,
            "device": setting.device,
            "dtype": setting.dtype,
            "threads": setting.threads,
        }
        spec = ModelSpec(MODEL, "text-to-image", "diffusion", str(setting.checkpoint), options)
        self.engine = _Watched(spec)
        self.loop = StepLoop(
            worker=MODEL,
            now_us=lambda: round(1e6 * setting.now_s()),
            unix_ms=lambda: time.time_ns() // 1_000_000,
        )
        self.loop.add(MODEL, self.engine)
        if broken := self.loop.load(MODEL):
            raise ValueError(broken)

    def run(self, arrivals: Sequence[Arrival]) -> RunResult:
        result = self.engine.result = RunResult()
        busy_us = self.loop.busy_us
        processor_s = time.process_time()
        clock = Clock(self._setting)
        next_arrival = 0
        while len(result.latency_s) < len(arrivals):
            now_s = clock.now_s()
            while next_arrival < len(arrivals) and arrivals[next_arrival].at_s <= now_s:
                self.admit(arrivals[next_arrival])
                next_arrival += 1
            if self.loop.idle:
                clock.wait(arrivals[next_arrival].at_s - now_s)
                continue
            for id, outcome in self.loop.turn().outcomes:
                if not isinstance(outcome, Completed):
                    raise RuntimeError(f"request {id} ended as {outcome}")
                number = int(id)
                result.latency_s[number] = clock.now_s() - arrivals[number].at_s
        result.makespan_s = clock.now_s()
        result.processor_s = time.process_time() - processor_s
        result.busy_s = (self.loop.busy_us - busy_us) / 1e6
        return result

    def admit(self, arrival: Arrival) -> None:
        asked = ImageInput(arrival.prompt, steps=arrival.steps, seed=arrival.number)
        job = Job(
            RequestId(str(arrival.number)), "1", MODEL, "text-to-image", msgspec.to_builtins(asked)
        )
        self.loop.admit(job, queue_us=0, leased_us=round(1e6 * self._setting.now_s()))


class Pipeline:
    """The library's pipeline: one request per call, or all waiting ones with equal steps."""

    def __init__(self, setting: Setting, *, together: int) -> None:
        self._setting = setting
        self._together = together
        torch.set_num_threads(setting.threads)
        spec = ModelSpec(MODEL, "text-to-image", "diffusion", str(setting.checkpoint), {})
        family = families.families_of(setting.kind, spec)["text-to-image"]
        self._extra = family.extra
        device = setting.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.pipeline: Any = family.load_class().from_pretrained(
            str(setting.checkpoint), dtype=getattr(torch, setting.dtype), local_files_only=True
        )
        self.pipeline.to(device)
        self.pipeline.set_progress_bar_config(disable=True)
        for part in self.pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval().requires_grad_(requires_grad=False)

    def generate(self, arrivals: Sequence[Arrival]) -> list[Any]:
        """Generate images for requests with equal steps in one call: floats, ``(H, W, 3)``."""
        generators = [torch.Generator().manual_seed(arrival.number) for arrival in arrivals]
        one = len(arrivals) == 1
        result = self.pipeline(
            prompt=arrivals[0].prompt if one else [arrival.prompt for arrival in arrivals],
            generator=generators[0] if one else generators,
            num_inference_steps=arrivals[0].steps,
            output_type="np",
            **self._extra,
        )
        return list(np.asarray(result.images))

    def run(self, arrivals: Sequence[Arrival]) -> RunResult:
        result = RunResult()
        waiting: list[Arrival] = []
        next_arrival = 0
        processor_s = time.process_time()
        clock = Clock(self._setting)
        while len(result.latency_s) < len(arrivals):
            now_s = clock.now_s()
            while next_arrival < len(arrivals) and arrivals[next_arrival].at_s <= now_s:
                waiting.append(arrivals[next_arrival])
                next_arrival += 1
            if not waiting:
                clock.wait(arrivals[next_arrival].at_s - now_s)
                continue
            equal = [arrival for arrival in waiting if arrival.steps == waiting[0].steps]
            group = equal[: self._together]
            waiting = [arrival for arrival in waiting if arrival not in group]
            started = clock.now_s()
            for arrival, image in zip(group, self.generate(group), strict=True):
                _encode(image, arrival)
                result.images[arrival.number] = image
                result.latency_s[arrival.number] = clock.now_s() - arrival.at_s
            result.busy_s += clock.now_s() - started
            result.batches += [len(group)] * group[0].steps
        result.makespan_s = clock.now_s()
        result.processor_s = time.process_time() - processor_s
        return result


def _encode(image: Any, arrival: Arrival) -> None:
    origin = encode.Origin(MODEL, str(arrival.number), arrival.number)
    request.image_file(request.to_pixels(image), ImageInput(arrival.prompt), origin)
