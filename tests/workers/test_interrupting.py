"""Long batches are interrupted between layers, and give what they would give at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.workers.driving import PhaseNames
from workers.engines import interrupting
from workers.engines.cooperative_batching import CooperativeBatcher, PipelineRun, Stopped
from workers.engines.devices import STAGES_AHEAD, DeviceProgress
from workers.engines.interrupting import Interruptible

LAYERS = 6


class Clock:
    """Moves on by a second with each layer."""

    now_s = 0.0


class Layer(torch.nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Tanh()])
        self.clock = clock
        self.modes: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now_s += 1.0
        self.modes.append(torch.is_grad_enabled())
        for part in self.inner:
            x = part(x)
        return x


class Network(torch.nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer(clock) for _ in range(LAYERS))
        self.fails_on_nan = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.fails_on_nan and x.isnan().any():
            raise RuntimeError("not a number")
        return x


class Sliced:
    """A batcher over a network whose batches are interrupted after every second layer."""

    def __init__(self) -> None:
        clock = Clock()
        self.network = Network(clock)
        self.batcher = CooperativeBatcher(rows_max=8, slice_s=2.0, now_s=lambda: clock.now_s)
        self.call = self.batcher.batch_point(
            "network", self.network.forward, "forward", module=self.network
        )

    def start(self, value: float, times: int = 2) -> PipelineRun:
        def work() -> torch.Tensor:
            x = torch.full((1, 8), value)
            for _ in range(times):
                x = self.call(x)
            return x

        run = PipelineRun(work)
        self.batcher.start(run)
        return run

    def turn(self) -> Any:
        return self.batcher.turn(PhaseNames().phase)

    def finish(self) -> list[Any]:
        turns = []
        while (turn := self.turn()).point is not None:
            turns.append(turn)
        return turns


def _alone(value: float, times: int = 2) -> torch.Tensor:
    network, x = Network(Clock()), torch.full((1, 8), value)
    with torch.no_grad():
        for _ in range(times):
            x = network(x)
    return x


def test_a_forward_takes_several_turns_and_is_equal_bit_by_bit() -> None:
    sliced = Sliced()
    runs = [sliced.start(float(value)) for value in range(2)]

    turns = sliced.finish()

    assert len(turns) == 2 * LAYERS // 2, "two forwards of six layers, two layers in each turn"
    assert all(set(turn.rows) == {id(run) for run in runs} for turn in turns)
    assert all(turn.batch_s <= 2.0 for turn in turns)
    assert [turn.ended for turn in turns if turn.ended] == [tuple(runs)]
    plain = Network(Clock())
    with torch.no_grad():
        expected = plain(plain(torch.tensor([[0.0] * 8, [1.0] * 8])))
    assert torch.equal(torch.cat([run.result for run in runs]), expected)


def test_modes_of_the_thread_are_kept_apart() -> None:
    sliced = Sliced()
    sliced.start(1.0)

    while sliced.turn().point is not None:
        assert torch.is_grad_enabled()
        with torch.inference_mode():
            torch.ones(1) + 1

    assert {mode for layer in sliced.network.layers for mode in layer.modes} == {False}


def test_a_region_of_autocast_is_not_interrupted() -> None:
    sliced = Sliced()
    compute = sliced.network.forward

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compute(x)

    sliced.call = sliced.batcher.batch_point("cast", cast, "forward", module=sliced.network)
    sliced.start(1.0, times=1)

    assert len(sliced.finish()) == 1
    assert not torch.is_autocast_enabled("cpu")


def test_a_run_stopped_within_a_forward_ends_and_the_others_go_on() -> None:
    sliced = Sliced()
    gone, other = sliced.start(1.0), sliced.start(2.0)
    sliced.turn()

    sliced.batcher.stop(gone)
    turns = sliced.finish()

    assert isinstance(gone.error, Stopped)
    assert all(set(turn.rows) == {id(other)} and gone not in turn.ended for turn in turns)
    assert torch.allclose(other.result, _alone(2.0), atol=1e-6)


def test_a_forward_whose_runs_have_all_stopped_is_abandoned() -> None:
    sliced = Sliced()
    runs = [sliced.start(1.0), sliced.start(2.0)]
    sliced.turn()
    layers = sum(len(layer.modes) for layer in sliced.network.layers)

    sliced.batcher.stop(*runs)

    assert all(run.ended for run in runs)
    assert sliced.turn().point is None
    assert sum(len(layer.modes) for layer in sliced.network.layers) == layers
    later = sliced.start(3.0)
    sliced.finish()
    assert torch.equal(later.result, _alone(3.0))


def test_an_abandoned_forward_keeps_nothing() -> None:
    sliced = Sliced()
    seen: list[weakref.ref[torch.Tensor]] = []
    sliced.network.layers[1].register_forward_hook(
        lambda _module, _args, output: seen.append(weakref.ref(output))
    )
    run = sliced.start(1.0)
    sliced.turn()
    assert seen[0]() is not None

    gc.disable()
    try:
        sliced.batcher.stop(run)
        assert seen[0]() is None
    finally:
        gc.enable()


def test_a_run_that_arrives_within_a_forward_begins_after_it() -> None:
    sliced = Sliced()
    first = sliced.start(1.0, times=1)
    sliced.turn()
    late = sliced.start(2.0, times=1)

    turns = sliced.finish()

    assert [set(turn.rows) for turn in turns] == [{id(first)}] * 2 + [{id(late)}] * 3
    assert torch.equal(late.result, _alone(2.0, 1))


def test_the_cause_of_an_error_is_found_in_slices() -> None:
    sliced = Sliced()
    sliced.network.fails_on_nan = True
    good, bad = sliced.start(1.0), sliced.start(float("nan"))

    sliced.finish()

    assert isinstance(bad.error, RuntimeError)
    assert torch.allclose(good.result, _alone(1.0), atol=1e-6)


def test_results_are_delivered_in_slices() -> None:
    sliced = Sliced()
    clock = sliced.network.layers[0].clock
    runs = []
    for value in range(3):

        def work(value: int = value) -> None:
            sliced.call(torch.full((1, 8), float(value)))
            clock.now_s += 3.0  # such as converting a video to pixels

        runs.append(PipelineRun(work))
        sliced.batcher.start(runs[-1])

    ended = [turn.ended for turn in sliced.finish()]

    assert [one for one in ended if one] == [(run,) for run in runs]


def test_only_layers_with_parts_are_interrupted() -> None:
    network = Network(Clock())

    interrupting.add_hooks(network)

    hooked = [part for part in network.modules() if part._forward_pre_hooks]
    assert hooked == list(network.layers)


def test_what_decoders_consist_of_is_interrupted_wherever_it_is() -> None:
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 1, 1),
        torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Conv3d(1, 1, 1), torch.nn.ReLU())]),
        torch.nn.GroupNorm(1, 1),
        torch.nn.SiLU(),
        torch.nn.Linear(1, 1),
    )

    interrupting.add_hooks(network)

    hooked = [type(part).__name__ for part in network.modules() if part._forward_pre_hooks]
    assert hooked == ["Conv2d", "Sequential", "Conv3d", "GroupNorm", "SiLU"]
    assert all(len(part._forward_pre_hooks) <= 1 for part in network.modules())


class Event:
    """Stands in for a CUDA event: completed when the device has reached it."""

    device_is_at = 0
    recorded = 0

    def record(self) -> None:
        type(self).recorded += 1
        self.number = self.recorded

    def query(self) -> bool:
        return self.number <= self.device_is_at

    def synchronize(self) -> None:
        type(self).device_is_at = max(self.device_is_at, self.number)


def at_once_and_in_slices(
    compute: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return what is computed at once, the same interrupted wherever possible, and how often."""
    with torch.no_grad():
        whole = compute()
    found: list[torch.Tensor] = []
    slices = 0
    computation = Interruptible(lambda: found.append(compute()), slice_s=0.0, now_s=lambda: 0.0)
    while not computation.run_slice():
        slices += 1
    return whole, found[0], slices


@pytest.mark.parametrize("mask", [None, "rows", "heads", "queries"])
@pytest.mark.parametrize(
    ("length", "keys", "heads", "width"),
    [(2400, 2400, 2, 16), (1000, 77, 5, 8), (1537, 1700, 1, 40), (300, 300, 9, 8)],
)
def test_attention_in_parts_is_equal_bit_by_bit(
    length: int,
    keys: int,
    heads: int,
    width: int,
    mask: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupting, "_PRODUCTS_MIN", 1)
    interrupting.add_hooks(torch.nn.Linear(1, 1))
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, size, heads, width).transpose(1, 2) for size in (length, keys, keys)
    )
    masks = {
        "rows": torch.rand(2, 1, 1, keys) < 0.7,
        "heads": torch.randn(2, heads, 1, keys),
        "queries": torch.rand(length, keys) < 0.7,
    }
    whole, in_parts, slices = at_once_and_in_slices(
        lambda: F.scaled_dot_product_attention(query, key, value, masks.get(mask or ""))
    )

    assert torch.equal(in_parts, whole)
    assert in_parts.stride() == whole.stride()
    assert slices >= 2


def test_causal_attention_is_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupting, "_PRODUCTS_MIN", 1)
    interrupting.add_hooks(torch.nn.Linear(1, 1))
    query = torch.randn(1, 2, 2000, 8)

    def attend() -> None:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)

    assert Interruptible(attend, slice_s=0.0, now_s=lambda: 0.0).run_slice()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in interrupting._TESTED,
    reason="convolutions are divided on processors with AVX2",
)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("batch", "channels", "height", "width", "made"),
    [
        (1, 32, 64, 200, 32),
        (2, 64, 41, 90, 16),
        (1, 3, 400, 300, 64),
        (1, 64, 60, 100, 3),
        (1, 20, 77, 150, 12),
        (1, 512, 24, 40, 128),
    ],
)
def test_a_convolution_in_parts_is_equal_bit_by_bit(
    batch: int,
    channels: int,
    height: int,
    width: int,
    made: int,
    bias: bool,
    order: torch.memory_format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupting, "_PART_PRODUCTS", 1)
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(channels, made, 3, padding=1, bias=bias)
    interrupting.add_hooks(layer)
    pixels = torch.randn(batch, channels, height, width).contiguous(memory_format=order)

    whole, in_parts, slices = at_once_and_in_slices(lambda: layer(pixels))

    assert torch.equal(in_parts, whole)
    assert in_parts.stride() == whole.stride()
    assert slices >= 3


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 1},
        {"kernel_size": 5, "padding": 2},
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": 3, "padding": 2, "dilation": 2},
        {"kernel_size": 3, "padding": 1, "groups": 2},
        {"kernel_size": 3, "padding": "same"},
        {"kernel_size": 3, "padding": 1, "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_other_convolutions_are_one_operation(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupting, "_PART_PRODUCTS", 1)
    layer = torch.nn.Conv2d(32, 32, **options)
    interrupting.add_hooks(layer)
    pixels = torch.randn(1, 32, 64, 200, dtype=layer.weight.dtype)

    computation = Interruptible(lambda: layer(pixels), slice_s=0.0, now_s=lambda: 0.0)

    assert not computation.run_slice(), "before it"
    assert computation.run_slice()


def test_layers_on_a_gpu_are_enqueued_a_few_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = Sliced()
    behind: list[int] = []
    progress = DeviceProgress()
    monkeypatch.setattr(interrupting, "PROGRESS", progress)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for layer in sliced.network.layers:
        layer._forward_pre_hooks.clear()
        layer.register_forward_pre_hook(interrupting._pause_on_cuda)
        layer.register_forward_pre_hook(
            lambda *_: behind.append(Event.recorded - Event.device_is_at)
        )
    run = sliced.start(1.0, times=1)

    turns = sliced.finish()

    assert len(turns) == LAYERS // 2
    assert max(behind) == STAGES_AHEAD
    assert torch.equal(run.result, _alone(1.0, 1))
