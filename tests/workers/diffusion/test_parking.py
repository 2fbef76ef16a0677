"""Parts that wait in host memory, and batches bounded by memory, with a CPU in place of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.diffusion.driver import SIZE, Driver, opened, spec
from tests.workers.driving import PhaseNames
from workers.contract.jobs import Completed, Job, RequestId
from workers.engines.batch_memory import BatchMemory
from workers.engines.cooperative_batching import CooperativeBatcher, PipelineRun
from workers.engines.diffusion import engine as engine_module
from workers.engines.diffusion.parking import Parking, run_on
from workers.runtime.step_loop import StepLoop

Make = Callable[[str], Path]
KIND = "StableDiffusion3Pipeline"
CPU = torch.device("cpu")


def _modules(*sizes: int) -> list[torch.nn.Module]:
    return [torch.nn.Linear(size, 1, bias=False) for size in sizes]


def _place(module: torch.nn.Module) -> int:
    return next(module.parameters()).data_ptr()


def test_parts_come_when_used_and_the_least_recently_used_leaves() -> None:
    first, second, third = _modules(10, 10, 10)
    homes = {module: _place(module) for module in (first, second, third)}
    parking = Parking(CPU, room_bytes=80)
    for module in homes:
        parking.add(module)

    def resident() -> set[torch.nn.Module]:
        return {module for module, home in homes.items() if _place(module) != home}

    assert resident() == set()
    parking.bring(first)
    parking.bring(second)
    assert resident() == {first, second}
    parking.bring(first)
    parking.bring(third)
    assert resident() == {first, third}
    assert parking.resident_bytes == 80
    assert (parking.bytes, parking.reserved_bytes) == (120, 80)


def test_a_part_that_alone_exceeds_the_room_is_used_alone() -> None:
    small, large = _modules(5, 50)
    parking = Parking(CPU, room_bytes=100)
    for module in (small, large):
        parking.add(module)

    parking.bring(small)
    parking.bring(large)

    assert parking.resident_bytes == 200
    assert parking.reserved_bytes == 200


def test_a_part_comes_and_leaves_with_the_same_weights() -> None:
    first, second = _modules(4, 4)
    x, expected = torch.ones(1, 4), first(torch.ones(1, 4))
    parking = Parking(CPU, room_bytes=16)
    parking.add(first)
    parking.add(second)

    for module in (first, second, first):
        parking.bring(module)

    assert torch.equal(first(x), expected)


def test_a_pipeline_of_parked_parts_runs_on_the_device(checkpoint: Make) -> None:
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(checkpoint(KIND))
    run_on(pipeline, torch.device("meta"))

    assert type(pipeline).__name__ == KIND
    assert pipeline.device == pipeline._execution_device == torch.device("meta")


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU pass for a device with memory of its own."""
    monkeypatch.setattr(engine_module, "has_own_memory", lambda _: True)


@pytest.mark.usefixtures("own_memory")
@pytest.mark.parametrize("kind", [KIND, "StableDiffusionXLPipeline", "PocketImagePipeline"])
def test_results_are_the_same_with_parts_on_the_host(kind: str, checkpoint: Make) -> None:
    of = spec(checkpoint(kind), steps=2)
    whole, parked = Driver(of), _parked(of)

    for driver in (whole, parked):
        for seed in range(2):
            driver.admit(f"r{seed}", seed=seed)
        driver.finish()

    assert parked.engine.memory.weights_bytes < whole.engine.memory.weights_bytes
    for name in ("r0", "r1"):
        drawn = [opened(driver.files(name)[0]) for driver in (whole, parked)]
        assert np.array_equal(*drawn)


def _parked(of: Any) -> Driver:
    """Create a driver of an engine that was allowed no more than it demands."""
    driver = Driver(of)
    driver.engine.unload()
    driver.engine.allow(driver.engine.demand().bytes)
    driver.engine.load()
    assert driver.engine._model.parking is not None
    return driver


@pytest.mark.usefixtures("own_memory")
def test_what_may_wait_on_the_host_is_not_demanded(checkpoint: Make) -> None:
    of = spec(checkpoint(KIND))
    whole = Driver(of).engine

    assert whole.demand().bytes < whole.memory.weights_bytes
    assert whole.memory.optional_bytes > 0
    parked = _parked(of).engine
    assert parked.memory.optional_bytes < whole.memory.optional_bytes
    parking = parked._model.parking
    assert parking is not None
    assert whole.memory.host_bytes == 0
    assert parked.memory.host_bytes == parking.bytes > 0


@pytest.mark.usefixtures("own_memory")
def test_time_of_bringing_parts_is_in_the_receipt(checkpoint: Make) -> None:
    clock = [0]

    def now_us() -> int:
        clock[0] += 1
        return clock[0]

    driver = _parked(spec(checkpoint(KIND), steps=1))
    loop = StepLoop(worker="w", now_us=now_us, unix_ms=lambda: 0)
    loop.add("painter", driver.engine)
    loop.lanes["painter"].loaded = True
    asked = {"prompt": "a red circle", "width": SIZE, "height": SIZE}
    job = Job(RequestId("one"), "acct", "painter", "text-to-image", asked)
    loop.admit(job, queue_us=0, leased_us=0)
    outcomes: list[Any] = []
    while not outcomes:
        outcomes += loop.turn().outcomes

    assert isinstance(outcomes[0][1], Completed)
    assert outcomes[0][1].timings.transfer_us > 0


class Meter:
    """A device on which a batch takes a fixed number of bytes for each row."""

    def __init__(self) -> None:
        self.allocated = self.peak = 1000

    def start(self) -> int:
        self.peak = self.allocated
        return self.allocated

    def stop(self) -> tuple[int, int]:
        return self.allocated, self.peak

    def take(self, count: int) -> None:
        self.peak = max(self.peak, self.allocated + count)


def test_rows_grow_with_measurements_up_to_what_fits() -> None:
    meter, rows = Meter(), []
    batcher = CooperativeBatcher(rows_max=16)
    batcher.memory = BatchMemory(600, meter)

    def model(x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        meter.take(100 * len(x))
        return x

    call = batcher.batch_point("m", model, "forward")

    def work() -> None:
        for _ in range(4):
            call(torch.zeros(1, 1))

    for _ in range(8):
        batcher.start(PipelineRun(work))
    while batcher.turn(PhaseNames().phase).point is not None:
        pass

    assert rows[:4] == [1, 2, 4, 6]
    assert max(rows) == 6, "600 bytes are enough for six rows"
    assert batcher.memory.peak_bytes == 600
    assert sum(rows) == 32


def test_memory_of_others_between_slices_does_not_count() -> None:
    meter = Meter()
    memory = BatchMemory(1000, meter)

    memory.begin()
    memory.start_slice()
    meter.allocated += 50
    meter.take(100)
    memory.stop_slice()
    meter.allocated += 700  # another model's, while the batch is suspended
    memory.start_slice()
    meter.take(200)
    memory.stop_slice()
    memory.end("shape", 2)

    assert memory.peak_bytes == 250
    assert memory.rows_max("shape", 100) == 4
    assert memory.rows_max("another", 100) == 0


def test_parts_that_cannot_come_fail_only_their_calls() -> None:
    batcher = CooperativeBatcher(rows_max=4)
    fails = [False, True]  # registered, then without room, then with room

    def bring() -> None:
        if fails and fails.pop(0):
            raise torch.OutOfMemoryError("no room")

    denoise = batcher.batch_point("denoiser", lambda x: x, "forward")
    call = batcher.batch_point("encoder", lambda x: x + 1, "preprocess", bring=bring)
    lost = PipelineRun(lambda: call(torch.zeros(1, 1)), priority=1)
    kept = PipelineRun(lambda: call(denoise(torch.zeros(1, 1))))
    batcher.start(lost)
    batcher.start(kept)

    while batcher.turn(PhaseNames().phase).point is not None:
        pass

    assert isinstance(lost.error, torch.OutOfMemoryError)
    assert kept.result.tolist() == [[1.0]]
