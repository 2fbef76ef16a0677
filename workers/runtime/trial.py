"""The process of ``tollgate try``: loads one model at one precision, and measures it.

Each batch size has an engine of its own, with as many slots, as an entry with that option would
have. Ends with its parent, which holds its standard input open.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, Final, TypeVar

import msgspec
import numpy as np

from workers.contract.jobs import Completed, Failed, Job, Outcome, RequestId
from workers.contract.trials import (
    ReferenceAnswer,
    TrialAgreement,
    TrialOrder,
    TrialReference,
    TrialReport,
    TrialRun,
)
from workers.engines import registry
from workers.logs import configure_logging
from workers.media.decode import read_image
from workers.protocol.engine import Engine
from workers.runtime.step_loop import StepLoop

log = logging.getLogger(__name__)

ROUNDS: Final = 2
"""Requests of a run for each of its batch; with one, all would start and end together."""
REQUESTS_MIN: Final = 4
_MEMORY_ERRORS: Final = ("OutOfMemoryError", "MemoryError")
OrderT = TypeVar("OrderT")


class Trial:
    """Runs an order. ``report`` is called with each result."""

    def __init__(self, order: TrialOrder, report: Callable[[TrialReport], None]) -> None:
        self._order = order
        self._report = report
        self._jobs = 0

    def run(self) -> None:
        compared = False
        for batch in self._order.batches:
            started = time.perf_counter()
            try:
                engine, loop = self._load(batch)
            except ValueError as error:
                self._report(TrialRun(batch, problem=str(error)))
                continue
            load_s = time.perf_counter() - started
            try:
                self._report(self._measure(loop, batch, load_s))
            except ValueError as error:
                self._report(TrialRun(batch, problem=str(error)))
            else:
                # The first engine that works is enough, and cannot serve afterwards.
                if not compared:
                    self._report(self._try_to_compare(engine, loop))
                    compared = True
            finally:
                engine.unload()
                del engine, loop
                gc.collect()

    def _load(self, batch: int) -> tuple[Engine, StepLoop]:
        """Raise ``ValueError`` with the reason if the model cannot be loaded."""
        spec = self._order.spec
        spec = msgspec.structs.replace(spec, options={**spec.options, "slots": batch})
        if obstacle := registry.obstacle(spec):
            raise ValueError(obstacle)
        engine = registry.create(spec)
        loop = StepLoop(worker="trial", now_us=_now_us, unix_ms=lambda: 0)
        loop.add(spec.name, engine)
        if problem := loop.load(spec.name):
            kind, _, message = problem.partition(": ")
            engine.unload()
            if kind in _MEMORY_ERRORS:
                message = f"the device has too little memory for a batch of {batch}"
            raise ValueError(message)
        return engine, loop

    def _measure(self, loop: StepLoop, batch: int, load_s: float) -> TrialRun:
        self._finish(loop, self._take_jobs(1), 1)  # kernels are chosen at first use
        started = time.perf_counter()
        jobs = self._take_jobs(max(ROUNDS * batch, REQUESTS_MIN))
        outcomes = self._finish(loop, jobs, batch)
        seconds = time.perf_counter() - started
        details = outcomes[0].details
        return TrialRun(
            batch,
            seconds,
            load_s,
            sum(outcome.usage.output_tokens for outcome in outcomes),
            tuple(outcome.timings for outcome in outcomes),
            "" if details is None else details.device,
        )

    def _take_jobs(self, count: int) -> list[Job]:
        return [self._job(number % len(self._order.inputs)) for number in range(count)]

    def _job(self, number: int) -> Job:
        self._jobs += 1
        spec = self._order.spec
        return Job(
            request_id=RequestId(f"req_{self._jobs:032x}"),
            # Nothing is cached for another account.
            account_id=str(self._jobs),
            model=spec.name,
            task=spec.task,
            input=self._order.inputs[number],
        )

    def _finish(self, loop: StepLoop, jobs: Iterable[Job], concurrency: int) -> list[Completed]:
        """Run jobs, so many at a time. Raise ``ValueError`` with the reason if one fails."""
        waiting, started = deque(jobs), dict[RequestId, int]()
        found: list[Completed] = []
        while waiting or started:
            while waiting and len(started) < concurrency:
                job = waiting.popleft()
                started[job.request_id] = _now_us()
                leased_us, files = started[job.request_id], self._order.files
                loop.admit(job, queue_us=0, leased_us=leased_us, files=files)
            for request_id, outcome in loop.turn().outcomes:
                found.append(_completed(outcome, _now_us() - started.pop(request_id)))
        return found

    # --- Agreement --------------------------------------------------------------------------------

    def _try_to_compare(self, engine: Engine, loop: StepLoop) -> TrialReport:
        try:
            return self._compare(engine, loop)
        except Exception as error:
            log.exception("could not compare")
            return TrialAgreement(problem=f"{type(error).__name__}: {error}")

    def _compare(self, engine: Engine, loop: StepLoop) -> TrialReport:
        """Compare with the reference, or make the reference."""
        task, reference = self._order.spec.task, self._order.reference
        if task == "text-generation":
            return self._compare_tokens(engine, reference)
        if task != "text-to-image" or (reference is not None and not reference):
            return TrialReference(()) if reference is None else TrialAgreement()
        jobs = [self._job(number) for number in range(len(self._order.inputs))]
        outcomes = [self._finish(loop, [job], 1)[0] for job in jobs]
        pictures = [outcome.files[0].data for outcome in outcomes]
        if reference is None:
            return TrialReference(tuple(ReferenceAnswer(picture=picture) for picture in pictures))
        pairs = zip(pictures, reference, strict=True)
        shares = [difference(picture, answer.picture) for picture, answer in pairs]
        return TrialAgreement(difference=sum(shares) / len(shares))

    def _compare_tokens(
        self, engine: Engine, reference: Sequence[ReferenceAnswer] | None
    ) -> TrialReport:
        # Only language models need it.
        from workers.engines.llm.agreement import count_equal, write_answer
        from workers.engines.llm.engine import LlmEngine

        assert isinstance(engine, LlmEngine)
        order = self._order
        if reference is None:
            answers = [
                write_answer(engine, one, order.files, limit=order.answer_tokens)
                for one in order.inputs
            ]
            return TrialReference(tuple(answers))
        pairs = zip(order.inputs, reference, strict=False)  # without answers if it failed
        return TrialAgreement(
            compared=sum(len(answer.tokens) for answer in reference),
            equal=sum(count_equal(engine, one, order.files, answer) for one, answer in pairs),
        )


def difference(picture: bytes, other: bytes) -> float:
    """Return the mean difference of the values of two pictures, as a share of the whole range."""
    first, second = (read_image(data).astype(np.float32) for data in (picture, other))
    return float(np.abs(first - second).mean() / 255)


def _completed(outcome: Outcome, total_us: int) -> Completed:
    if not isinstance(outcome, Completed):
        message = outcome.message if isinstance(outcome, Failed) else "it was cancelled"
        raise ValueError(f"a request failed: {message}")
    timings = msgspec.structs.replace(outcome.timings, total_us=total_us)
    return msgspec.structs.replace(outcome, timings=timings)


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _reporter(channel: BinaryIO) -> Callable[[Any], None]:
    def report(value: Any) -> None:
        channel.write(msgspec.json.encode(value) + b"\n")
        channel.flush()

    return report


def open_channel(kind: type[OrderT]) -> tuple[OrderT, Callable[[Any], None]]:
    """Read the order of this process. Return it, and the function that reports to the command."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logging(os.environ.get("TOLLGATE_LOG_LEVEL", "WARNING"))
    # What libraries print must not mix with the reports.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return order, _reporter(channel)


def main() -> None:
    order, report = open_channel(TrialOrder)
    Trial(order, report).run()


if __name__ == "__main__":
    main()
