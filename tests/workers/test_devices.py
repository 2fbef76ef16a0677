"""Devices of a worker and of its models: names, placement, precision, one process for each."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.workers.running import PATIENCE_S, Gateway, Worker, echo
from workers import devices
from workers.contract.announcements import Workers
from workers.contract.jobs import Completed
from workers.contract.models import ModelSpec
from workers.engines import devices as torch_devices
from workers.engines.options import TorchOptions, read, stored_dtype

TWO = ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("setting", "count", "expected"),
    [
        ("auto", 0, ("cpu",)),
        ("auto", 2, TWO),
        ("cpu", 2, ("cpu",)),
        ("cuda", 2, ("cuda:0",)),
        ("cuda:1", 2, ("cuda:1",)),
        ("cuda:0, cuda:1", 0, TWO),
    ],
)
def test_setting_chooses_among_the_devices_of_the_machine(
    setting: str, count: int, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_lacks_cuda", lambda: False)

    assert devices.choose(setting, count=lambda: count) == (expected, "")


def test_gpu_that_torch_cannot_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_lacks_cuda", lambda: True)

    chosen, warning = devices.choose("auto", count=lambda: 1)

    assert chosen == ("cpu",)
    assert "built without CUDA, so all models run on the CPU" in warning


@pytest.mark.parametrize("setting", ["gpu", "cuda:", "cuda:01", "cuda:0,cuda:0", "auto,cpu", ""])
def test_wrong_setting_is_refused_with_what_is_accepted(setting: str) -> None:
    with pytest.raises(ValueError, match="device is"):
        devices.parse(setting)


@pytest.mark.parametrize(
    ("option", "runs_on"),
    [
        (None, ("cuda:0", "cuda:1")),
        ("auto", ("cuda:0", "cuda:1")),
        ("cuda", ("cuda:0", "cuda:1")),
        ("cuda:1", (None, "cuda:1")),
        ("cuda:0,cuda:5", ("cuda:0", None)),
        ("cpu", ("cpu", None)),
    ],
)
def test_entry_is_replicated_unless_it_names_a_device(
    option: str | None, runs_on: tuple[str | None, ...]
) -> None:
    assert tuple(devices.device_of(option, own, TWO) for own in TWO) == runs_on


@pytest.mark.parametrize("have", [("cpu",), ("cuda:0",)])
def test_entry_for_a_device_that_the_worker_lacks_is_refused(have: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="its device is cuda:3, but this worker has"):
        devices.device_of("cuda:3", have[0], have)


def _spec(path: Path | None = None, **options: Any) -> ModelSpec:
    checkpoint = None if path is None else str(path)
    return ModelSpec("m", "text-generation", engine="llm", checkpoint=checkpoint, options=options)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that there are two CUDA devices. Return those that were made the current one."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda:1", "cuda:1"), ("cuda", "cuda:0"), ("auto", "cuda:0"), ("cuda:1,cuda:0", "cuda:1")],
)
def test_engine_accepts_the_names_that_the_command_line_shows(
    device: str, expected: str, two_gpus: list[int]
) -> None:
    assert read(_spec(device=device), TorchOptions).torch_device == torch.device(expected)


def test_engine_refuses_a_device_that_torch_does_not_find(two_gpus: list[int]) -> None:
    with pytest.raises(ValueError, match="device is cuda:2, but torch finds cuda:0, cuda:1 here"):
        read(_spec(device="cuda:2"), TorchOptions)


def test_engine_process_makes_its_device_the_current_one(
    two_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    products = SimpleNamespace(fp32_precision="ieee")
    monkeypatch.setattr(torch.backends.cuda, "matmul", products)

    torch_devices.select("cpu")
    torch_devices.select("cuda:1")
    torch_devices.select(None)

    assert two_gpus == [1, 0]
    assert products.fp32_precision == "tf32"


def test_precision_is_that_of_the_checkpoint_on_a_gpu_and_float32_on_a_cpu(
    tmp_path: Path, two_gpus: list[int]
) -> None:
    (tmp_path / "unet").mkdir()
    save_file({"w": torch.zeros(8, 8, dtype=torch.bfloat16)}, tmp_path / "unet" / "a.safetensors")
    save_file({"norm": torch.zeros(8)}, tmp_path / "b.safetensors")

    assert stored_dtype(tmp_path) == "bfloat16"
    assert read(_spec(tmp_path, device="cuda:0"), TorchOptions).dtype == "bfloat16"
    assert read(_spec(tmp_path, device="cpu"), TorchOptions).dtype == "float32"
    assert read(_spec(tmp_path, device="cuda:0", dtype="int8"), TorchOptions).dtype == "int8"
    with pytest.raises(ValueError, match="dtype is 'int4'; one of auto, float32"):
        read(_spec(tmp_path, device="cpu", dtype="int4"), TorchOptions)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.05)


async def _announced(gateway: Gateway, count: int) -> dict[str, tuple[str, ...]]:
    """Return the models by device once so many workers serve some."""
    workers = Workers(gateway.redis, namespace=gateway.namespace)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = {each.device: each.models for each in await workers.list()}
            if len(found) == count and all(found.values()):
                return found
            await asyncio.sleep(0.05)


async def test_each_device_has_a_worker_process_and_one_signal_drains_all(gateway: Gateway) -> None:
    gateway.models = ("echo", "one")
    one = echo("one") | {"options": {"device": "cuda:1"}}
    async with gateway.worker(echo(), one, device="cuda:0,cuda:1") as worker:
        found = await _announced(gateway, 2)
        request = await gateway.submit("hello", model="one")
        outcome = await gateway.outcome(request)
        worker.signal(signal.SIGTERM)
        status = await worker.ends()

    assert {device: sorted(models) for device, models in found.items()} == {
        "cuda:0": ["echo"],
        "cuda:1": ["echo", "one"],
    }
    assert isinstance(outcome, Completed)
    assert status == 0
    assert await _announced(gateway, 0) == {}


async def test_process_that_dies_is_started_again_and_none_outlives_its_parent(
    gateway: Gateway,
) -> None:
    async with gateway.worker(device="cuda:0,cpu") as worker:
        await _announced(gateway, 2)
        first, second = _children(worker)

        os.kill(first, signal.SIGKILL)
        await until(lambda: len(_children(worker)) == 2 and first not in _children(worker))
        others = [second, *_children(worker)]
        worker.signal(signal.SIGKILL)
        await worker.ends()

        await until(lambda: not any(map(_runs, others)))


def _children(worker: Worker) -> list[int]:
    pid = worker.process.pid
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False
