"""Requests of every kind on one device, with a catalog larger than its memory.

``python -m benchmarks.mixed --seconds 1800 --budget 75MB``, or ``make bench-mixed``. Runs an engine
process as a worker does, without gateway and queue. Every class has clients that send the next
request when the last one has ended, after a pause. Prints for each class how many requests ended
how, their times, and goodput: the share that kept the promise (``slo``) of its catalog entry. No
shipped model transcribes or reranks, so tiny ones of random weights are made for these, and a
denoiser whose forward pass at 768 x 768 takes most of a second on one core. Then the gaps between
the tokens of all chats, the longest step of each engine, and the memory at the beginning and the
end. Ends with status 1 if a request failed, or the budget was exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import diffusion_checkpoint
from tests.artist import png
from tests.workers.reranking import checkpoints as reranking
from tests.workers.talking import driver as talking
from tests.workers.transcription import checkpoints as transcription
from workers.agent.engine_supervisor import EngineSupervisor
from workers.contract.jobs import Completed, Event, Failed, Job, Outcome, RequestId, Tokens
from workers.contract.models import ModelSpec, read_specs
from workers.protocol.ipc import JobHandoff, Measured
from workers.settings import read_size

CATALOG: Final = Path("catalog.yaml")
WARM_S: Final = 60.0
"""Time before the first figure of memory, so that every engine has run."""
MEASURE_S: Final = 2.0
TRANSCRIBER: Final = "tiny-whisper"
RERANKER: Final = "tiny-reranker"
LARGE: Final = "large-picture"
TOPICS: Final = ("What is a hold?", "What is 12 plus 30?", "Say a red circle.", "What is a price?")


@dataclass(frozen=True, slots=True)
class Client:
    """A class of requests: ``pause_s`` is the mean pause between a client's requests."""

    model: str
    task: str
    clients: int
    pause_s: float
    input: Mapping[str, Any]
    slo: Mapping[str, float] = field(default_factory=dict)
    streams: bool = False
    files: Callable[[], tuple[bytes, ...]] = tuple
    """Makes the attachments of its requests."""


def _sound(seconds: float) -> bytes:
    return transcription.wav(transcription.sound(seconds))


CLASSES: Final = {
    "chat": Client(
        "pocket-chat",
        "text-generation",
        2,
        1.0,
        {"messages": [{"role": "user", "content": ""}], "max_tokens": 64},
        {"ttft_ms": 1000, "tpot_ms": 100},
        streams=True,
    ),
    "picture": Client(
        "pocket-image",
        "text-to-image",
        2,
        4.0,
        {"prompt": "a red circle", "width": 64, "height": 64, "steps": 4, "guidance": 1.5},
        {"total_ms": 5000},
    ),
    "large": Client(
        LARGE,
        "text-to-image",
        1,
        20.0,
        {"prompt": "a red circle", "width": 768, "height": 768, "steps": 2, "guidance": 1.0},
        {"total_ms": 60000},
    ),
    "video": Client(
        "pocket-video",
        "text-to-video",
        1,
        8.0,
        {"prompt": "a red circle moves right", "duration_ms": 2000, "fps": 8, "steps": 8},
        {"total_ms": 20000},
    ),
    "speech": Client(
        "pocket-speech",
        "text-to-speech",
        1,
        4.0,
        {"text": "The quick brown fox jumps over the lazy dog.", "voice": "ada"},
        {"total_ms": 5000},
    ),
    "music": Client(
        "pocket-music", "text-to-music", 1, 20.0, {"prompt": "a calm tune"}, {"total_ms": 30000}
    ),
    "edit": Client(
        "pocket-image",
        "image-edit",
        1,
        8.0,
        {
            "prompt": "a blue circle",
            "images": 1,
            "width": 64,
            "height": 64,
            "steps": 4,
            "guidance": 1.5,
            "strength": 0.6,
        },
        {"total_ms": 5000},
        files=lambda: (png(64, 64),),
    ),
    "talking": Client(
        "pocket-talking",
        "talking-head",
        1,
        15.0,
        {"fps": 12},
        {"total_ms": 20000},
        files=lambda: (talking.png(talking.person()[0]), _sound(2.0)),
    ),
    "transcript": Client(
        TRANSCRIBER,
        "speech-to-text",
        1,
        6.0,
        {"language": "en"},
        {"total_ms": 5000},
        streams=True,
        files=lambda: (_sound(6.0),),
    ),
    "rerank": Client(
        RERANKER,
        "rerank",
        1,
        4.0,
        {"query": "who jumps", "documents": ["the fox jumps", "a lazy dog", "the brown fox"]},
        {"total_ms": 1000},
    ),
    "embedding": Client(
        "pocket-embed", "text-embedding", 1, 3.0, {"inputs": ["a red circle"]}, {"total_ms": 1000}
    ),
}

SEEDLESS: Final = ("embedding", "rerank", "talking")


def make_models(directory: Path) -> list[ModelSpec]:
    """Make the random models that no shipped one stands for."""
    whisper = transcription.make_checkpoint(directory / "whisper")
    reranker = reranking.make_checkpoint(directory / "reranker")
    picture = diffusion_checkpoint.make_checkpoint(directory / "picture", channels=(32, 64, 128))
    return [
        ModelSpec(TRANSCRIBER, "speech-to-text", "transcription", str(whisper)),
        ModelSpec(RERANKER, "rerank", "rerank", str(reranker)),
        ModelSpec(LARGE, "text-to-image", "diffusion", str(picture)),
    ]


@dataclass
class Record:
    """Requests of one class, with times in seconds."""

    total_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    kept: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


class Traffic:
    """Replaces the agent: submits jobs to an engine process and collects what it reports."""

    def __init__(self, specs: Sequence[ModelSpec], budget_bytes: int | None) -> None:
        self.records = {name: Record() for name in CLASSES}
        self.gaps_s: list[float] = []
        self.crashes = 0
        self.measures: list[tuple[float, Measured]] = []
        self.problems: list[str] = []
        self._ends: dict[RequestId, asyncio.Future[Outcome]] = {}
        self._tokens_s: dict[RequestId, list[float]] = {}
        self._numbers = itertools.count()
        self._files = {name: each.files() for name, each in CLASSES.items()}
        self._changed = asyncio.Event()
        self.host = EngineSupervisor(
            specs,
            worker="mixed",
            preload=True,
            threads=1,
            budget_bytes=budget_bytes,
            report=self._report,
            crashed=self._crash,
            changed=self._changed.set,
        )

    def _report(
        self,
        events: Sequence[tuple[RequestId, Event]],
        outcomes: Sequence[tuple[RequestId, Outcome]],
    ) -> None:
        now_s = time.monotonic()
        for request_id, event in events:
            if isinstance(event, Tokens):
                self._tokens_s.setdefault(request_id, []).append(now_s)
        for request_id, outcome in outcomes:
            self._ends.pop(request_id).set_result(outcome)

    async def _crash(self, unharmed: Collection[RequestId]) -> None:
        self.crashes += 1
        for future in self._ends.values():
            future.set_result(Failed("engine_error", "The engine process ended."))
        self._ends.clear()

    async def run(self, seconds: float, warm_s: float) -> None:
        process = asyncio.create_task(self.host.run())
        while not self.host.ready or self.host.loading:
            self._changed.clear()
            await self._changed.wait()
        ends_s = time.monotonic() + seconds
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    self._measure(ends_s, time.monotonic() + min(warm_s, seconds / 4))
                )
                for name, each in CLASSES.items():
                    for number in range(each.clients):
                        group.create_task(self._client(name, each, number, ends_s))
        finally:
            process.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await process

    async def _client(self, name: str, each: Client, number: int, ends_s: float) -> None:
        dice = random.Random(f"{name}{number}")
        while time.monotonic() < ends_s:
            await self._request(name, each, dice)
            await asyncio.sleep(each.pause_s * dice.uniform(0.5, 1.5))

    async def _request(self, name: str, each: Client, dice: random.Random) -> None:
        request_id = RequestId(f"req_{next(self._numbers)}")
        given = dict(each.input) | {"seed": dice.randrange(2**31)}
        if name == "chat":
            given["messages"] = [{"role": "user", "content": dice.choice(TOPICS)}]
        if name in SEEDLESS:
            del given["seed"]
        job = Job(request_id, "1", each.model, each.task, given, stream=each.streams)
        end = self._ends[request_id] = asyncio.get_running_loop().create_future()
        started_s = time.monotonic()
        leased_us = time.monotonic_ns() // 1000
        self.host.submit([JobHandoff(job, 0, leased_us, files=self._files[name])])
        outcome = await end
        total_s = time.monotonic() - started_s
        self._record(name, each, outcome, total_s)
        tokens_s = self._tokens_s.pop(request_id, [])
        if name == "chat":  # not between the words of a transcript
            self.gaps_s += [b - a for a, b in itertools.pairwise(tokens_s)]

    def _record(self, name: str, each: Client, outcome: Outcome, total_s: float) -> None:
        record, timings = self.records[name], outcome.timings
        record.outcomes[type(outcome).__name__.lower()] += 1
        record.total_s.append(total_s)
        record.load_s.append(timings.load_us / 1e6)
        if not isinstance(outcome, Completed):
            self.problems.append(f"{name}: {msgspec.to_builtins(outcome)}"[:300])
            return
        measured = {
            "ttft_ms": timings.first_token_us / 1000,
            "tpot_ms": timings.per_token_us / 1000,
            "total_ms": total_s * 1000,
        }
        record.kept += all(measured[promise] <= limit for promise, limit in each.slo.items())

    async def _measure(self, ends_s: float, warm_s: float) -> None:
        while (now_s := time.monotonic()) < ends_s:
            self.host.measure()
            await asyncio.sleep(MEASURE_S)
            measured = self.host.measured
            resident = sum(each.resident_bytes for each in measured.models.values())
            if resident > measured.budget_bytes > 0:
                self.problems.append(f"{resident} bytes resident of {measured.budget_bytes}")
            if now_s >= warm_s:
                self.measures.append((now_s, measured))


def show(traffic: Traffic, seconds: float) -> None:
    print("class        requests  failed   p50 s   p95 s   max s  waited for a load  goodput")
    for name, record in traffic.records.items():
        ended, failed = len(record.total_s), len(record.total_s) - record.outcomes["completed"]
        if not ended:
            print(f"{name:12} {0:8}")
            continue
        loads = sum(load_s > 0 for load_s in record.load_s)
        print(
            f"{name:12} {ended:8} {failed:7} {_at(record.total_s, 50):7.2f} "
            f"{_at(record.total_s, 95):7.2f} {max(record.total_s):7.2f} {loads:18} "
            f"{100 * record.kept / ended:6.1f} %  ({record.kept / seconds * 60:.1f} a minute)"
        )
    if gaps := traffic.gaps_s:
        shares = ", ".join(f"p{share} {1000 * _at(gaps, share):.0f}" for share in (50, 90, 95, 99))
        late = sum(gap > 0.05 for gap in gaps)
        print(
            f"\ngaps between tokens, ms: {shares}, max {1000 * max(gaps):.0f}; "
            f"above 50 ms: {late} of {len(gaps)}"
        )
    if not traffic.measures:
        return
    last = traffic.measures[-1][1]
    print("\nmodel                 longest step ms  loads  last load ms  resident MB")
    for model, each in last.models.items():
        print(
            f"{model:22} {each.longest_us / 1000:14.0f} {each.loads:6} {each.load_us / 1000:13.0f} "
            f"{each.resident_bytes / 1e6:12.1f}"
        )
    used = [measured.bytes_used / 1e6 for _, measured in traffic.measures]
    third = max(len(used) // 3, 1)
    print(
        f"\nprocess, MB resident: median of the first third {statistics.median(used[:third]):.0f}, "
        f"of the last {statistics.median(used[-third:]):.0f}, most {max(used):.0f}"
    )
    print(f"engine processes that ended: {traffic.crashes}")
    for problem in traffic.problems[:20]:
        print("problem:", problem)


def _at(values: Sequence[float], share: int) -> float:
    """Return a percentile; the largest value of those that few values make."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * share // 100, len(ordered) - 1)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--budget", default="75MB", help="memory of the models; 'none': no limit")
    parser.add_argument("--catalog", type=Path, default=CATALOG)
    chosen = parser.parse_args(arguments)
    budget = None if chosen.budget == "none" else read_size(chosen.budget)
    wanted = {each.model for each in CLASSES.values()} | {"pocket-upscale"}
    specs = [spec for spec in read_specs(chosen.catalog) if spec.name in wanted]

    async def measure(specs: Sequence[ModelSpec]) -> Traffic:
        traffic = Traffic(specs, budget)
        await traffic.run(chosen.seconds, WARM_S)
        return traffic

    with tempfile.TemporaryDirectory() as directory:
        traffic = asyncio.run(measure([*specs, *make_models(Path(directory))]))
    show(traffic, chosen.seconds)
    sys.exit(1 if traffic.problems or traffic.crashes else 0)


if __name__ == "__main__":
    main()
