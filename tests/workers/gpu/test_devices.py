"""Device and precision on a GPU: placement, quantised products, memory, progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workers import devices, pulse
from workers.contract.models import ModelSpec, read_specs
from workers.engines import registry
from workers.engines.devices import DeviceProgress
from workers.engines.options import TorchOptions, read
from workers.engines.precision import Fp8Linear, Int8Linear, quantize
from workers.protocol.engine import Placed, Weighed

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[3]
SHIPPED = [spec for spec in read_specs(ROOT / "catalog.yaml") if spec.engine is not None]


def test_driver_and_torch_count_the_same_devices() -> None:
    assert devices.cuda_devices() == torch.cuda.device_count()
    assert not devices.torch_lacks_cuda()
    assert devices.choose("auto")[0][0] == "cuda:0"


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_entry_is_on_the_gpu_in_the_type_of_its_checkpoint(name: str) -> None:
    spec = next(spec for spec in SHIPPED if spec.name == "pocket-chat")

    options = read(
        ModelSpec("m", spec.task, "llm", spec.checkpoint, {"device": name}), TorchOptions
    )

    assert options.torch_device == torch.device("cuda:0")
    assert options.dtype == "bfloat16"
    assert options.hardware.device == torch.cuda.get_device_name(0)


@pytest.mark.parametrize("spec", SHIPPED, ids=lambda spec: spec.name)
def test_shipped_model_loads_on_the_gpu_and_leaves_it(spec: ModelSpec) -> None:
    options: dict[str, Any] = spec.options | {"device": "cuda:0"}
    before = torch.cuda.memory_allocated()
    engine = registry.create(ModelSpec(**{**_fields(spec), "options": options}))

    engine.load()

    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated() > before
    if isinstance(engine, Placed):
        assert engine.hardware.device == torch.cuda.get_device_name(0)
    if isinstance(engine, Weighed):
        assert engine.memory.device_bytes > 0
    engine.unload()
    assert torch.cuda.memory_allocated() - before < 64 << 20


def _fields(spec: ModelSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


@pytest.mark.parametrize(("kind", "most"), [(Int8Linear, 0.02), (Fp8Linear, 0.06)])
@pytest.mark.parametrize("rows", [1, 16, 17, 300])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(96, 48), (1024, 4096), (4096, 1000), (90, 48), (96, 41)]
)
def test_quantised_products_are_close(
    kind: type[nn.Module], most: float, rows: int, inputs: int, outputs: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs).requires_grad_(False)
    x = torch.randn(rows, inputs)
    expected = linear(x)

    layer = kind(linear.to(device, torch.bfloat16))
    got = layer(x.to(device, torch.bfloat16)).cpu().float()

    assert float((got - expected).norm() / expected.norm()) < most


@pytest.mark.parametrize("kind", [Int8Linear, Fp8Linear])
def test_rows_of_quantised_products_are_independent(
    kind: type[nn.Module], device: torch.device
) -> None:
    torch.manual_seed(0)
    layer = kind(nn.Linear(512, 512, dtype=torch.bfloat16, device=device).requires_grad_(False))
    x = torch.randn(64, 512, dtype=torch.bfloat16, device=device)

    assert torch.equal(layer(x[:32]), layer(x)[:32])


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantising_needs_room_for_one_layer_in_full_precision(
    dtype: str, device: torch.device
) -> None:
    size, count = 4096, 6
    model = nn.Sequential(*(nn.Linear(size, size, dtype=torch.bfloat16) for _ in range(count)))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    quantize(model, dtype, device)

    kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert kept < 1.05 * count * size * size
    # One layer in bfloat16, in float32, scaled, and in eight bits.
    assert peak < kept + 16 * size * size


def test_products_of_float32_use_tf32(device: torch.device) -> None:
    registry.create(next(spec for spec in SHIPPED if spec.name == "pocket-chat"))
    a, b = torch.randn(2, 512, 512, device=device)

    exact = (a.double() @ b.double()).float()

    assert 1e-5 < float((a @ b - exact).norm() / exact.norm()) < 1e-2


def test_progress_is_reported_while_the_device_computes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[int] = []
    monkeypatch.setattr(pulse, "EVERY_S", 0.0)
    monkeypatch.setattr(pulse.PULSE, "send", lambda: beats.append(1))
    progress = DeviceProgress()
    x = torch.randn(2048, 2048, device=device)

    for _ in range(20):
        x = torch.tanh(x @ x)
        progress.mark()
    progress.wait()

    assert len(beats) == 20
    assert bool(torch.isfinite(x).all())
