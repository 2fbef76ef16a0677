"""The code paths of other devices, run on a CPU: separate forwards, blocks read in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.workers.llm.checkpoints import Reference, make_engine
from tests.workers.llm.driver import Driver, choices, job, run_alone, texts
from tests.workers.llm.test_cache import read_in_place
from tests.workers.llm.test_engine import EXPERTS, FAMILIES, QUESTIONS
from workers.engines.devices import stage
from workers.engines.llm import experts, loading
from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.graphs import Run
from workers.engines.llm.varlen import VarlenCache
from workers.protocol.engine import Admitted

Checkpoint = Callable[[str], Path]


def _record(run: Run) -> Run:
    """Behave like a CUDA graph: read and write the recorded tensors."""
    out = run()

    def replay() -> torch.Tensor:
        out.copy_(run())
        return out

    return replay


@pytest.fixture(params=["apart", "in place", "apart and in place"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """``apart``: as if products depended on the number of rows. ``in place``: as on CUDA."""
    if "apart" in request.param:
        monkeypatch.setattr(Decoder, "_find_multiple", lambda _: False)
    if "in place" in request.param:
        monkeypatch.setattr(
            loading,
            "make_cache",
            lambda shape, device, longest, **_: VarlenCache(shape, device, read_in_place, longest),
        )
        monkeypatch.setattr(loading, "record_cuda", _record)
    way: str = request.param
    return way


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_those_of_generate(way: str, family: str, checkpoint: Checkpoint) -> None:
    if "in place" in way and family.startswith("deepseek"):
        pytest.skip("latents are gathered on every device")
    path = checkpoint(family)
    engine, reference = make_engine(path), Reference(path)
    if "apart" in way:
        assert not engine._model.decoder.one_forward
    driver = Driver(engine)

    for number, question in enumerate(QUESTIONS[:4]):
        driver.admit(job(f"r{number}", question, max_tokens=12 + number))
        driver.step()
    driver.finish("r0", "r1", "r2", "r3")

    decoder = engine._model.decoder
    # Shapes of experts depend on the routing, so their forwards are not recorded.
    assert bool(decoder._graphs) == ("in place" in way and family not in EXPERTS)
    for number, question in enumerate(QUESTIONS[:4]):
        expected = reference.generate(question, 12 + number)[2]
        assert texts(driver.outcomes[f"r{number}"]) == [expected]


@pytest.mark.parametrize("speculation", [None, {"method": "lookup", "tokens": 3}])
def test_answers_do_not_depend_on_other_requests(
    way: str, speculation: Any, checkpoint: Checkpoint
) -> None:
    if way == "in place":
        pytest.skip("only a CPU runs a step in one forward, and reads no blocks in place")
    engine = make_engine(checkpoint("qwen3"), speculation=speculation, cache_tokens=14 * 64)
    r = random.Random(1)
    jobs = [
        job(
            f"r{number}",
            r.choice(QUESTIONS),
            max_tokens=r.randint(1, 40),
            temperature=r.choice([0.0, 1.0]),
            logprobs=True,
            seed=number,
            n=r.choice([1, 2]),
        )
        for number in range(6)
    ]
    alone = {wanted.request_id: choices(run_alone(engine, wanted)) for wanted in jobs}

    driver = Driver(engine)
    waiting = list(jobs)
    while len(driver.outcomes) < len(jobs):
        while waiting and r.random() < 0.6 and isinstance(driver.admit(waiting[0]), Admitted):
            waiting.pop(0)
        driver.step()

    assert {name: choices(outcome) for name, outcome in driver.outcomes.items()} == alone


def test_without_invariance_a_recording_for_each_size_of_step_is_used(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint
) -> None:
    monkeypatch.setattr(
        loading,
        "make_cache",
        lambda shape, device, longest, **_: VarlenCache(shape, device, read_in_place, longest),
    )
    monkeypatch.setattr(loading, "record_cuda", _record)
    path = checkpoint("qwen3")
    engine, reference = make_engine(path, batch_invariant=False, slots=6), Reference(path)
    decoder = engine._model.decoder
    assert decoder.row_counts == [4, 6]
    recorded = dict(decoder._graphs)
    assert list(recorded) == [4, 8]  # padded to a multiple of four
    shapes: list[tuple[int, int]] = []
    forward = decoder._forward

    def note(one: Any) -> torch.Tensor:
        shapes.append((one.ids.shape[1], int(one.static)))
        return forward(one)

    monkeypatch.setattr(decoder, "_forward", note)
    driver = Driver(engine)

    for number, question in enumerate(QUESTIONS[:5]):
        driver.admit(job(f"r{number}", question, max_tokens=12))
    driver.step()
    assert [static for _, static in shapes] == [0]
    driver.finish(*(f"r{number}" for number in range(5)))

    assert {tokens for tokens, static in shapes if static} == {8}
    assert decoder._graphs == recorded
    for number, question in enumerate(QUESTIONS[:5]):
        expected = reference.generate(question, 12)[2]
        assert texts(driver.outcomes[f"r{number}"]) == [expected]


@pytest.mark.parametrize("enough", [4, 8, 32])
def test_products_have_as_many_rows_as_the_processor_needs(
    enough: int, monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint
) -> None:
    def probe(decoder: Decoder) -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        yield torch.zeros(1) if decoder._multiple >= enough else torch.ones(1)

    monkeypatch.setattr(Decoder, "_probe", probe)
    padded: list[int] = []

    def record(rows: torch.Tensor, by: tuple[int, ...]) -> torch.Tensor:
        padded.append(len(made := F.pad(rows, by)))
        return made

    monkeypatch.setattr(experts, "F", SimpleNamespace(pad=record, linear=F.linear))
    path = checkpoint("mixtral")
    engine = make_engine(path)
    decoder = engine.decoder

    outcome = run_alone(engine, job("a", QUESTIONS[0], max_tokens=5))

    assert texts(outcome) == [Reference(path).generate(QUESTIONS[0], 5)[2]]
    assert decoder.one_forward == (enough <= 16)
    multiple = enough if decoder.one_forward else 4
    assert padded
    assert {rows % multiple for rows in padded} == {0}
    assert multiple in padded
    if decoder.one_forward:
        (forward,) = decoder.stage([SequenceInput([1], 0, [1])], [])
        assert forward.ids.shape[1] == multiple


def test_recording_with_another_result_is_not_used(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint
) -> None:
    monkeypatch.setattr(Decoder, "_find_multiple", lambda _: False)
    monkeypatch.setattr(
        loading,
        "make_cache",
        lambda shape, device, longest, **_: VarlenCache(shape, device, read_in_place, longest),
    )
    monkeypatch.setattr(loading, "record_cuda", lambda run: lambda: run() + 1)
    path = checkpoint("qwen3")
    engine = make_engine(path)

    outcome = run_alone(engine, job("a", QUESTIONS[0]))

    assert texts(outcome) == [Reference(path).generate(QUESTIONS[0], 12)[2]]
    assert not engine._model.decoder._graphs


def test_numbers_go_to_a_gpu_from_pinned_memory_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []
    moved: list[tuple[torch.device, dict[str, Any]]] = []

    class Host:
        """Stands in for a tensor of the host."""

        def to(self, device: torch.device, **how: Any) -> torch.Tensor:
            moved.append((device, how))
            return torch.zeros(2)

    def make(values: list[int], **how: Any) -> Host:
        made.append(how)
        return Host()

    monkeypatch.setattr(torch, "tensor", make)

    stage([1, 2], torch.device("cuda:0"), torch.long)
    stage([1, 2], torch.device("cpu"))

    assert made == [
        {"dtype": torch.long, "pin_memory": True},
        {"dtype": None, "pin_memory": False},
    ]
    assert moved == [
        (torch.device("cuda:0"), {"non_blocking": True}),
        (torch.device("cpu"), {"non_blocking": False}),
    ]
