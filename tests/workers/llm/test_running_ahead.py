"""The next step is launched before the tokens of this one are read, which changes no answer.

Only CUDA gains by it. Here the engine is told to do it on a CPU, where a launch is the computation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.workers.llm.checkpoints import make_engine
from tests.workers.llm.driver import Driver, choices, job, run_alone
from tests.workers.llm.test_engine import LONG, QUESTIONS
from workers.contract.jobs import Cancelled, Completed, Job
from workers.engines import devices
from workers.engines.devices import Fetch
from workers.engines.llm import sampling
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.engine import REST_STEPS, LlmEngine
from workers.protocol.engine import Admitted

Checkpoint = Callable[[str], Path]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"size": {"type": "integer"}},
            "required": ["size"],
            "additionalProperties": False,
        },
    },
}


def _make(path: Path, **options: Any) -> LlmEngine:
    engine = make_engine(path, **options)
    assert not engine.runs_ahead
    engine.runs_ahead = True
    return engine


def _jobs(r: random.Random) -> list[Job]:
    more: list[dict[str, Any]] = [
        {},
        {},
        {"top_p": 0.9},
        {"top_k": 5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.2, "stop": ("a", "o")},
        {"response_format": SCHEMA},
    ]
    return [
        job(
            f"r{number}",
            r.choice((*QUESTIONS, *QUESTIONS, LONG[:900])),
            max_tokens=r.randint(1, 50),
            temperature=r.choice([0.0, 1.0]),
            logprobs=True,
            top_logprobs=2,
            seed=number,
            n=r.choice([1, 1, 2]),
            **r.choice(more),
        )
        for number in range(12)
    ]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("seed", "family", "options"),
    [
        (0, "qwen3", {"slots": 4}),
        (1, "llama", {"slots": 6, "cache_tokens": 18 * 64}),
        (2, "phi3", {"slots": 3, "dtype": "bfloat16"}),
        (3, "deepseek3", {"slots": 4, "cache_answers": True}),
    ],
)
def test_answers_are_those_of_steps_one_after_the_other(
    seed: int,
    family: str,
    options: dict[str, Any],
    apart: bool,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if apart:
        monkeypatch.setattr(Decoder, "_find_multiple", lambda _: False)
    # Answers that are found in the cache differ in their last bits.
    plain = make_engine(checkpoint(family), **options | {"cache_answers": False})
    engine = _make(checkpoint(family), **options)
    r = random.Random(seed)
    jobs = _jobs(r)
    alone = {wanted.request_id: run_alone(plain, wanted) for wanted in jobs}
    cancelled = r.choice(jobs).request_id

    driver = Driver(engine)
    waiting, ahead = list(jobs), 0
    while len(driver.outcomes) < len(jobs):
        while waiting and r.random() < 0.4 and isinstance(driver.admit(waiting[0]), Admitted):
            waiting.pop(0)
        if r.random() < 0.1 and cancelled in engine._requests:
            engine.cancel(cancelled, "client")
        driver.step()
        ahead += engine._ahead is not None

    assert ahead > 40
    for name, outcome in driver.outcomes.items():
        if not isinstance(outcome, Cancelled):
            assert choices(outcome) == choices(alone[name])
            assert isinstance(outcome, Completed)
            assert outcome.usage.output_tokens == alone[name].usage.output_tokens
    pool = engine._model.scheduler._pool
    assert pool.available == pool.count


class _Waits(TorchFunctionMode):
    """Records the calls that would wait for a device."""

    NAMES = frozenset(
        (
            *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique"),
            *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
        )
    )

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in self.NAMES:
            self._log.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_nothing_waits_between_two_launches_but_for_the_tokens_before(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a steady state: launch step n + 1, then read the tokens of step n."""
    engine = _make(checkpoint("qwen3"))
    driver = Driver(engine)
    for number, more in enumerate(({}, {"top_p": 0.9}, {"top_k": 5, "presence_penalty": 1.0})):
        wanted = job(f"r{number}", QUESTIONS[number], max_tokens=40, temperature=1.0, **more)
        driver.admit(wanted)
    while engine._ahead is None:
        driver.step()
    log: list[str] = []
    run, wait, read = Decoder.run, Decoder.wait, Fetch.read

    class Read(Fetch):
        def read(self) -> Any:
            log.append("read")
            with torch._C.DisableTorchFunction():
                return _Silent(read(self))

    class _Silent:
        """Numbers that have arrived; using them waits for nothing."""

        def __init__(self, host: torch.Tensor) -> None:
            self._values = host.tolist()

        def tolist(self) -> Any:
            return self._values

    def launch(decoder: Decoder, forwards: Any) -> torch.Tensor:
        log.append("launch")
        return run(decoder, forwards)

    def synchronize(decoder: Decoder) -> None:
        log.append("wait")
        wait(decoder)

    monkeypatch.setattr(sampling, "Fetch", Read)
    monkeypatch.setattr(Decoder, "run", launch)
    monkeypatch.setattr(Decoder, "wait", synchronize)
    with _Waits(log):
        for _ in range(8):
            driver.step()

    assert log == ["launch", "read"] * 8


def test_no_step_is_launched_ahead_beside_another_engine(checkpoint: Checkpoint) -> None:
    """The device's time would be measured as that of the other engine."""
    engine = _make(checkpoint("qwen3"))
    expected = choices(run_alone(engine, job("a", QUESTIONS[1], max_tokens=20)))
    driver = Driver(engine)
    driver.admit(job("b", QUESTIONS[1], max_tokens=20))

    while "b" not in driver.outcomes:
        driver.clock.alone = not driver.clock.alone
        driver.step()
        assert (engine._ahead is not None) <= driver.clock.alone

    assert choices(driver.outcomes["b"]) == expected


def test_token_from_beyond_the_head_is_followed_by_the_right_step(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job("a", QUESTIONS[1], max_tokens=60, temperature=2.0, top_p=0.97, logprobs=True)
    expected = choices(run_alone(make_engine(checkpoint("qwen3")), wanted))
    monkeypatch.setattr(sampling, "HEAD", 2)
    engine = _make(checkpoint("qwen3"))
    driver = Driver(engine)
    driver.admit(wanted)

    ahead = 0
    while "a" not in driver.outcomes:
        driver.step()
        ahead += engine._ahead is not None

    assert choices(driver.outcomes["a"]) == expected
    assert ahead <= 60 / REST_STEPS


def test_lack_of_memory_ahead_is_met_again_by_the_step_itself(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _make(checkpoint("qwen3"))
    older = job("a", QUESTIONS[1], max_tokens=30, temperature=1.0, logprobs=True, n=2)
    expected = choices(run_alone(engine, older))
    driver = Driver(engine)
    driver.admit(older)
    driver.admit(job("b", QUESTIONS[2], max_tokens=30))
    while engine._ahead is None:
        driver.step()
    run, lacking = Decoder.run, [True, True]

    def fail(decoder: Decoder, forwards: Any) -> torch.Tensor:
        if lacking:
            lacking.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(decoder, forwards)

    monkeypatch.setattr(Decoder, "run", fail)
    driver.step()
    assert not driver.outcomes
    driver.step()

    assert list(driver.outcomes) == ["b"]
    driver.finish("a")
    assert choices(driver.outcomes["a"]) == expected


def test_step_ahead_of_the_end_is_dropped(checkpoint: Checkpoint) -> None:
    engine = _make(checkpoint("qwen3"))
    first, later = (job(name, QUESTIONS[0], max_tokens=20, stop=("z", "e")) for name in "ab")
    expected = choices(run_alone(make_engine(checkpoint("qwen3")), first))
    driver = Driver(engine)
    driver.admit(first)
    driver.finish("a")

    driver.admit(later)
    driver.finish("b")

    assert choices(driver.outcomes["a"]) == choices(driver.outcomes["b"]) == expected
    engine.unload()
    assert engine._ahead is None


def test_numbers_come_from_a_gpu_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading waits for an event behind the copy, not for what was enqueued after it."""
    log: list[Any] = []

    class Remote:
        device, shape, dtype = torch.device("cuda:0"), (2,), torch.long

    class Pinned:
        def copy_(self, source: Any, *, non_blocking: bool) -> None:
            log.append(("copy", type(source), non_blocking))

    class Event:
        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

    def empty(shape: Any, **how: Any) -> Pinned:
        log.append(how)
        return Pinned()

    monkeypatch.setattr(devices.torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)

    fetch = Fetch(Remote())  # type: ignore[arg-type]  # only its place is read
    log.append("other work")

    assert isinstance(fetch.read(), Pinned)
    assert log == [
        {"dtype": torch.long, "pin_memory": True},
        ("copy", Remote, True),
        *("record", "other work", "wait"),
    ]
