"""Those who draw the same requests: our engine, the pipeline one by one, and whole-request batches.

All run in this process, one after the other, on weights read from the same directory, and all end
with the same file: an encoded PNG. What the comparison needs besides is each picture in floats.
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
    """What all players have in common. ``together``: pictures drawn at a time, at most."""

    checkpoint: Path
    together: int
    device: str
    dtype: str
    threads: int
    processor_time: bool = False
    """Time is what this process computes, and waiting takes none: for one thread on a machine that
    does other things as well. Otherwise it is the wall's."""

    def now_s(self) -> float:
        return time.process_time() if self.processor_time else time.perf_counter()

    @property
    def kind(self) -> str:
        return loading.kind_of(self.checkpoint)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; ``at_s`` counts from the beginning of the play. The number is the seed too."""

    number: int
    prompt: str
    steps: int
    at_s: float


class Clock:
    """Seconds from the beginning of a play."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._began_s = setting.now_s()

    def now_s(self) -> float:
        return self._setting.now_s() - self._began_s

    def wait(self, seconds: float) -> None:
        if self._setting.processor_time:
            self._began_s -= max(0.0, seconds)
        else:
            time.sleep(max(0.0, seconds))


@dataclass(slots=True)
class Played:
    """What came of a play, by the number of the request; ``batches`` is per denoiser's forward."""

    latency_s: dict[int, float] = field(default_factory=dict)
    pictures: dict[int, Any] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    makespan_s: float = 0.0
    busy_s: float = 0.0
    processor_s: float = 0.0
    """Of this process, which other work on the machine does not change."""


class Player(Protocol):
    def play(self, asks: Sequence[Ask]) -> Played:
        """Draw all, each from its time on; they are sorted by it."""
        ...


def wait_for_device() -> None:
    """CUDA works behind one's back; on the CPU there is nothing to wait for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _Watched(DiffusionEngine):
    """Keeps each picture as its pipeline returned it, and how many shared each forward."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.played = Played()

    def load(self) -> None:
        super().load()
        assert self._loaded is not None
        self.denoiser: Any = self._loaded.denoiser
        pipeline = self._loaded.pipelines[self._loaded.families["text-to-image"].pipeline]
        kind = type(pipeline)

        def draw(self_: Any, *args: Any, generator: torch.Generator, **kwargs: Any) -> Any:
            result = kind.__call__(self_, *args, generator=generator, **kwargs)
            self.played.pictures[generator.initial_seed()] = np.asarray(result.images[0])
            return result

        pipeline.__class__ = type(kind.__name__, (kind,), {"__call__": draw})

    def _measure(self, turn: TurnResult, seconds: float) -> None:
        super()._measure(turn, seconds)
        if turn.point is not None and turn.point.phase == "forward":
            self.played.batches.append(len(turn.rows))


class Ours:
    """The step loop and the engine, as a worker runs them."""

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

    def play(self, asks: Sequence[Ask]) -> Played:
        played = self.engine.played = Played()
        busy_us = self.loop.busy_us
        processor_s = time.process_time()
        clock = Clock(self._setting)
        place = 0
        while len(played.latency_s) < len(asks):
            now_s = clock.now_s()
            while place < len(asks) and asks[place].at_s <= now_s:
                self.admit(asks[place])
                place += 1
            if self.loop.idle:
                clock.wait(asks[place].at_s - now_s)
                continue
            for id, outcome in self.loop.turn().outcomes:
                if not isinstance(outcome, Completed):
                    raise RuntimeError(f"request {id} ended as {outcome}")
                number = int(id)
                played.latency_s[number] = clock.now_s() - asks[number].at_s
        played.makespan_s = clock.now_s()
        played.processor_s = time.process_time() - processor_s
        played.busy_s = (self.loop.busy_us - busy_us) / 1e6
        return played

    def admit(self, ask: Ask) -> None:
        asked = ImageInput(ask.prompt, steps=ask.steps, seed=ask.number)
        job = Job(
            RequestId(str(ask.number)), "1", MODEL, "text-to-image", msgspec.to_builtins(asked)
        )
        self.loop.admit(job, queue_us=0, leased_us=round(1e6 * self._setting.now_s()))


class Pipeline:
    """The library's pipeline: one request a call, or all that wait and ask for equal steps."""

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

    def draw(self, asks: Sequence[Ask]) -> list[Any]:
        """One call for requests of equal steps; pictures in floats, ``(H, W, 3)``."""
        generators = [torch.Generator().manual_seed(ask.number) for ask in asks]
        one = len(asks) == 1
        result = self.pipeline(
            prompt=asks[0].prompt if one else [ask.prompt for ask in asks],
            generator=generators[0] if one else generators,
            num_inference_steps=asks[0].steps,
            output_type="np",
            **self._extra,
        )
        return list(np.asarray(result.images))

    def play(self, asks: Sequence[Ask]) -> Played:
        played = Played()
        waiting: list[Ask] = []
        place = 0
        processor_s = time.process_time()
        clock = Clock(self._setting)
        while len(played.latency_s) < len(asks):
            now_s = clock.now_s()
            while place < len(asks) and asks[place].at_s <= now_s:
                waiting.append(asks[place])
                place += 1
            if not waiting:
                clock.wait(asks[place].at_s - now_s)
                continue
            equal = [ask for ask in waiting if ask.steps == waiting[0].steps]
            group = equal[: self._together]
            waiting = [ask for ask in waiting if ask not in group]
            started = clock.now_s()
            for ask, picture in zip(group, self.draw(group), strict=True):
                _encode(picture, ask)
                played.pictures[ask.number] = picture
                played.latency_s[ask.number] = clock.now_s() - ask.at_s
            played.busy_s += clock.now_s() - started
            played.batches += [len(group)] * group[0].steps
        played.makespan_s = clock.now_s()
        played.processor_s = time.process_time() - processor_s
        return played


def _encode(picture: Any, ask: Ask) -> None:
    origin = encode.Origin(MODEL, str(ask.number), ask.number)
    request.picture_file(request.to_pixels(picture), ImageInput(ask.prompt), origin)
