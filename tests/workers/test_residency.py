"""A catalog larger than its device: which models are in memory, and what becomes of their jobs."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.fakes import Clock, FakeEngine, Room
from tests.workers.test_engine_supervisor import Owner, running_owner
from workers.contract.jobs import Completed, Failed, Job, Outcome, RequestId
from workers.contract.models import ModelSpec
from workers.engines import registry
from workers.engines.footprint import weights_estimate
from workers.protocol.engine import Demand, Memory
from workers.protocol.ipc import JobHandoff
from workers.runtime.residency import RESIDENCE_LOADS, RESIDENCE_MIN_US
from workers.runtime.step_loop import StepLoop
from workers.settings import WorkerSettings, read_size

BUDGET = 10
CHAT = Path("workers/pocket/chat")


@dataclass
class SizedEngine(FakeEngine):
    size: int = 6
    estimate: int | None = None
    """The estimate before a load, if it is wrong."""
    unload_us: int = 0
    in_memory: bool = False
    short_of_memory: int = 0
    """Number of loads that run out of memory."""
    device: str = "cpu"
    host_size: int = 0
    """Memory of the host that it takes while it is on another device."""

    def demand(self) -> Demand:
        size = self.size if self.estimate is None else self.estimate
        return Demand(self.device, size, BUDGET, host_budget_bytes=BUDGET)

    @property
    def memory(self) -> Memory:
        return Memory(self.size, host_bytes=self.host_size)

    def load(self) -> None:
        if self.short_of_memory:
            self.short_of_memory -= 1
            raise MemoryError
        super().load()
        self.in_memory = True

    def unload(self) -> None:
        super().unload()
        self.clock.us += self.unload_us
        self.in_memory = False


@dataclass
class ElasticEngine(SizedEngine):
    """Takes ``wanted`` if it is allowed to, and at least ``size``."""

    wanted: int = 100
    allowed: int | None = None
    taken: int = 0

    def allow(self, memory_bytes: int | None) -> None:
        self.allowed = memory_bytes

    @property
    def memory(self) -> Memory:
        return Memory(self.size, self.taken - self.size, optional_bytes=self.taken - self.size)

    def load(self) -> None:
        super().load()
        self.taken = self.wanted if self.allowed is None else min(self.wanted, self.allowed)
        assert self.taken >= self.size


@dataclass
class Device:
    """A loop over models that do not fit its budget together, driven as the process drives it."""

    sizes: dict[str, int]
    load_us: int = 0
    elastic: str = ""
    """Models that take more than their size if they are allowed to."""
    clock: Clock = field(default_factory=Clock)
    outcomes: dict[RequestId, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = StepLoop(
            worker="w1", now_us=self.clock.now_us, unix_ms=self.clock.unix_ms, quantum_us=1_000
        )
        self.engines: dict[str, SizedEngine] = {}
        for model, size in self.sizes.items():
            kind = ElasticEngine if model in self.elastic else SizedEngine
            engine = kind(self.clock, Room(1000), size=size, load_us=self.load_us)
            self.engines[model] = engine
            self.loop.add(model, engine)
        self.number = 0
        self.unloaded: list[str] = []

    @property
    def resident(self) -> set[str]:
        return {model for model, engine in self.engines.items() if engine.in_memory}

    def taken(self, model: str) -> int:
        engine = self.engines[model]
        return engine.taken if isinstance(engine, ElasticEngine) else engine.size

    def submit(self, model: str, *, steps: int = 1) -> RequestId:
        self.number += 1
        request_id = RequestId(f"req_{self.number:032x}")
        given = {"steps": steps, "room": 1}
        job = Job(request_id, "acc", model, "text-generation", given)
        self.loop.admit(job, queue_us=0, leased_us=self.clock.us)
        return request_id

    def turn(self) -> None:
        change = self.loop.residency.next() if self.loop.residency.is_pending else None
        if change is not None and change.problem is not None:
            self.loop.refuse(change.load.model, change.problem)
        elif change is not None:
            for lane in change.unload:
                self.loop.unload(lane.model)
                self.unloaded.append(lane.model)
            self.loop.load(change.load.model)
            for lane in self.loop.residency.excess(change.load):
                self.loop.unload(lane.model)
                self.unloaded.append(lane.model)
            assert sum(map(self.taken, self.resident)) <= BUDGET
        if self.loop.patience_s:
            self.clock.us += round(self.loop.patience_s * 1_000_000)
        for request_id, outcome in self.loop.turn().outcomes:
            assert request_id not in self.outcomes
            self.outcomes[request_id] = outcome

    def finish(self) -> None:
        for _ in range(10_000):
            if self.loop.idle:
                return
            self.turn()
        raise AssertionError("a job never ends")

    def run(self, model: str) -> Completed:
        request_id = self.submit(model)
        self.finish()
        outcome = self.outcomes[request_id]
        assert isinstance(outcome, Completed)
        return outcome

    def pass_time(self) -> None:
        self.clock.us += RESIDENCE_MIN_US + RESIDENCE_LOADS * self.load_us


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30), st.integers(0, 3)), max_size=25)
)
def test_every_job_of_a_catalog_larger_than_its_device_completes(
    traffic: list[tuple[str, int, int]],
) -> None:
    device = Device({"a": 6, "b": 5, "c": 4, "d": 10}, load_us=1_000)

    for model, steps, turns in traffic:
        device.submit(model, steps=steps)
        for _ in range(turns):
            device.turn()
    device.finish()

    assert len(device.outcomes) == len(traffic)
    assert all(isinstance(outcome, Completed) for outcome in device.outcomes.values())
    assert sum(each.usage.gpu_us for each in device.outcomes.values()) == device.loop.busy_us


def test_models_that_wait_for_each_other_serve_their_jobs_before_they_leave() -> None:
    device = Device({"x": 4, "a": 5, "b": 5, "c": 5}, load_us=1_000)
    for engine in device.engines.values():
        engine.unload_us = 10 * RESIDENCE_MIN_US
    device.run("x")
    device.pass_time()

    for model in "abc":
        device.submit(model)
    device.finish()

    assert [device.loop.lanes[model].loads for model in "xabc"] == [1, 1, 1, 1]


def test_the_least_recently_used_model_leaves() -> None:
    device = Device({"a": 5, "b": 5, "c": 5})
    device.run("a")
    device.run("b")
    device.run("a")
    device.pass_time()

    device.run("c")

    assert device.unloaded == ["b"]
    assert device.resident == {"a", "c"}


def test_request_that_waited_for_a_reload_shows_its_load_and_is_not_charged_for_it() -> None:
    device = Device({"a": 6, "b": 6}, load_us=2_000_000)
    first = device.run("a")
    device.run("b")
    device.pass_time()

    again = device.run("a")
    warm = device.run("a")

    assert again.timings.load_us == 2_000_000
    assert warm.timings.load_us == 0
    assert first.usage.gpu_us == again.usage.gpu_us == warm.usage.gpu_us
    assert device.loop.lanes["a"].loads == 2


def test_model_with_running_jobs_stays_until_they_end_and_admits_no_others() -> None:
    device = Device({"a": 6, "b": 6})
    running = device.submit("a", steps=50)
    device.turn()
    device.pass_time()
    other = device.submit("b")
    later = device.submit("a")
    device.turn()

    assert device.resident == {"a"}
    device.finish()

    assert list(device.outcomes) == [running, other, later]


def test_model_serves_on_if_the_job_that_it_made_room_for_is_cancelled() -> None:
    device = Device({"a": 6, "b": 6})
    running = device.submit("a", steps=50)
    device.turn()
    device.pass_time()
    other = device.submit("b")
    device.turn()
    assert device.loop.lanes["a"].leaving

    device.loop.cancel(other, "client")
    later = device.submit("a")
    device.finish()

    assert list(device.outcomes) == [other, later, running]


def test_models_that_alternate_stay_for_a_multiple_of_their_load() -> None:
    device = Device({"a": 6, "b": 6}, load_us=1_000_000)
    for _ in range(1_000):
        for model in ("a", "b"):
            if not device.loop.lanes[model].waiting:
                device.submit(model, steps=5)
        device.turn()
        device.clock.us += 20_000

    loads = sum(lane.loads for lane in device.loop.lanes.values())
    assert loads >= 3
    assert loads * 1_000_000 * (RESIDENCE_LOADS + 1) <= device.clock.us + 5_000_000


def test_larger_model_is_not_overtaken_for_ever_by_smaller_ones() -> None:
    device = Device({"a": 5, "b": 5, "large": 10})
    device.submit("a", steps=40)
    device.turn()
    device.pass_time()
    large = device.submit("large")

    for _ in range(60):
        device.submit("b")
        device.submit("a")
        device.turn()
        device.clock.us += 100_000

    assert large in device.outcomes


def test_model_that_never_fits_is_a_problem_and_fails_its_requests() -> None:
    device = Device({"a": 5, "large": 11})
    request_id = device.submit("large")
    device.finish()

    outcome = device.outcomes[request_id]
    assert isinstance(outcome, Failed)
    assert outcome.code == "model_load_failed"
    problem = device.loop.lanes["large"].broken
    assert problem is not None
    assert "needs 11 B" not in problem
    assert "TOLLGATE_MEMORY_BUDGET" in problem


def test_model_for_which_memory_lacks_despite_the_estimate_takes_that_of_another() -> None:
    device = Device({"a": 4, "b": 6})
    device.run("a")
    device.pass_time()
    device.engines["b"].estimate = 1
    device.engines["b"].short_of_memory = 1

    device.run("b")

    assert device.unloaded == ["a"]


def test_model_larger_than_its_estimate_takes_the_room_of_an_idle_one() -> None:
    device = Device({"a": 6, "b": 6})
    device.engines["b"].estimate = 3
    device.run("a")

    device.run("b")

    assert device.unloaded == ["a"]


def test_memory_that_was_measured_replaces_the_estimate() -> None:
    device = Device({"a": 6, "b": 4, "c": 1})
    device.engines["a"].estimate = 9
    device.run("a")

    device.run("b")

    assert device.resident == {"a", "b"}
    assert device.loop.lanes["a"].demand.bytes == 6


def test_parts_that_wait_in_host_memory_count_beside_the_models_there() -> None:
    device = Device({"a": 6, "large": 5, "b": 4})
    device.engines["large"].device = "cuda:0"
    device.engines["large"].host_size = 6
    device.run("a")
    device.pass_time()

    device.run("large")  # which measures what it has on the host
    device.run("b")
    assert device.unloaded == ["a"]
    device.pass_time()
    device.run("a")
    assert device.unloaded == ["a", "large"]
    device.pass_time()
    device.run("large")  # which is known now, so room is made before it is loaded

    assert device.unloaded == ["a", "large", "b", "a"]
    assert device.resident == {"large"}


def test_model_whose_host_memory_never_fits_is_a_problem() -> None:
    device = Device({"large": 5})
    lane = device.loop.lanes["large"]
    lane.demand = Demand("cuda:0", 5, BUDGET, host_bytes=11, host_budget_bytes=BUDGET)

    assert "the models on cpu can have" in (device.loop.residency.problem(lane) or "")


def test_model_that_is_alone_takes_all_that_it_wants_of_its_device() -> None:
    device = Device({"a": 3}, elastic="a")

    device.run("a")

    assert device.taken("a") == BUDGET


def test_model_takes_half_of_what_is_free_while_others_are_not_loaded() -> None:
    device = Device({"a": 2, "b": 2}, elastic="ab")

    device.run("a")
    device.run("b")

    # Of 8 beside its 2, the first takes 4; the second takes what is left.
    assert [device.taken(model) for model in "ab"] == [6, 4]
    assert device.resident == {"a", "b"}


def test_models_that_are_still_to_be_added_leave_room() -> None:
    device = Device({"a": 2}, elastic="a")
    device.loop.residency._expected = ("b",)

    device.run("a")

    assert device.taken("a") == 6


def test_model_is_loaded_again_with_less_rather_than_in_place_of_another() -> None:
    device = Device({"a": 3, "b": 7}, elastic="a")
    device.run("a")
    assert device.taken("a") == 6
    device.pass_time()
    device.run("b")
    assert device.unloaded == ["a"]

    device.run("a")

    assert device.unloaded == ["a"]
    assert device.taken("a") == 3
    assert device.resident == {"a", "b"}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), max_size=20))
def test_models_that_take_what_is_free_never_take_more_than_the_budget(
    traffic: list[tuple[str, int]],
) -> None:
    device = Device({"a": 2, "b": 3, "c": 6}, elastic="ab")
    for model, steps in traffic:
        device.submit(model, steps=steps)
        device.turn()
    device.finish()

    assert all(isinstance(outcome, Completed) for outcome in device.outcomes.values())
    used = {model: device.loop.lanes[model].demand.bytes for model in device.resident}
    assert used == {model: device.taken(model) for model in device.resident}


def test_unloading_a_model_frees_its_weights() -> None:
    spec = _embedding("embed")
    engine = registry.create(spec)
    engine.load()
    engine.unload()
    gc.collect()
    before = _tensor_bytes()
    loop = StepLoop(worker="w1", now_us=lambda: 0, unix_ms=lambda: 0)
    loop.add(spec.name, engine)

    loop.load(spec.name)
    lane, loaded = loop.lanes[spec.name], _tensor_bytes()
    resident = lane.demand.bytes
    del lane
    loop.unload(spec.name)
    gc.collect()

    assert loaded - before >= resident > 10_000_000
    assert _tensor_bytes() == before


def test_estimate_counts_what_a_loader_reads(tmp_path: Path) -> None:
    whole = weights_estimate(CHAT, "float32")
    engine = registry.create(_embedding("embed"))
    engine.load()

    assert whole == pytest.approx(engine.memory.weights_bytes, rel=0.02)  # type: ignore[attr-defined]
    assert weights_estimate(CHAT, "bfloat16") == whole // 2
    engine.unload()

    weights = (CHAT / "model.safetensors").read_bytes()
    for name in ("model.safetensors", "model.fp16.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(weights)
    assert weights_estimate(tmp_path, "float32") == whole


async def test_process_serves_more_models_than_its_memory_holds() -> None:
    specs = [_embedding(name) for name in ("a", "b", "c")]
    async with running_owner(Owner(*specs, budget_bytes=30_000_000)) as owner:
        host = owner.host
        assert host.loaded == {"a", "b"}
        assert host.cold == {"c"}
        assert all(host.takes(model) for model in "abc")
        assert host.obstacle("c") is None

        for number, model in enumerate("cba"):
            job = Job(
                RequestId(f"req_{number:032x}"), "acc", model, "text-embedding", _embedding_input()
            )
            host.submit([JobHandoff(job, 0, 0)])
            outcome = await owner.ends(job.request_id)
            assert isinstance(outcome, Completed), outcome
            assert len(host.loaded) == 2
            assert host.loaded | host.cold == {"a", "b", "c"}

        host.measure()
        while not host.measured.models:  # noqa: ASYNC110 - a measurement changes nothing
            await asyncio.sleep(0.01)
        sizes = [each.resident_bytes for each in host.measured.models.values()]
        assert 0 < sum(sizes) <= host.measured.budget_bytes == 30_000_000
        assert sizes.count(0) == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20_000_000_000), ("1.5 GiB", 1_610_612_736), ("512mib", 536_870_912)],
)
def test_memory_budget_is_a_size(text: str, size: int) -> None:
    assert WorkerSettings(memory_budget=text).budget_bytes == size


@pytest.mark.parametrize("text", ["", "20", "much", "0GB", "-1GB", "80%"])
def test_memory_budget_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 20GB"):
        read_size(text)


def _embedding(name: str) -> ModelSpec:
    return ModelSpec(
        name,
        "text-embedding",
        engine="embedding",
        checkpoint=str(CHAT),
        limits={"context_tokens": 64},
        options={"device": "cpu", "threads": 1},
    )


def _embedding_input() -> dict[str, object]:
    return {"inputs": ["a red circle"]}


def _tensor_bytes() -> int:
    """Return the bytes of all living tensors; shared ones count once."""
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):  # modules warn when they are asked
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
