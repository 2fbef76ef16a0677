"""Capacity planning, checked by hand calculations, and reading of checkpoints."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
from safetensors import safe_open

from gateway.plan.hardware import GPUS, Device, find_gpu
from gateway.plan.roofline import (
    Load,
    cost,
    plan,
    price_of_million,
    step_bytes,
    token_bytes,
    weight_bytes,
)
from gateway.plan.shapes import SHAPES, Shape, find_shape, read_checkpoint
from gateway.plan.this_machine import devices_here, measure_bandwidth, read_gpus
from gateway.pricing import Component, Price

POCKET = Path(__file__).parents[2] / "workers" / "pocket" / "chat"
SEVENTY = Shape(70_000_000_000, 80, 8, 128)
GB = 10**9


def load(precision: str = "fp8", context: int = 8192, batch: int = 1) -> Load:
    return Load(precision, "bfloat16", context, batch)


def test_seventy_billion_weights_in_fp8_are_seventy_gigabytes_read_for_each_token() -> None:
    assert weight_bytes(SEVENTY, "fp8") == 70 * GB
    assert weight_bytes(SEVENTY, "bfloat16") == 140 * GB
    assert weight_bytes(SEVENTY, "float32") == 280 * GB
    # Keys and values, 80 layers, 8 heads of 128, two bytes.
    assert token_bytes(SEVENTY, "bfloat16") == 2 * 80 * 8 * 128 * 2 == 327_680
    assert step_bytes(SEVENTY, load(context=1), 1) == 70 * GB + 327_680


def test_decode_step_reads_the_weights_once_and_all_kv_caches() -> None:
    made = plan(SEVENTY, load(context=1000, batch=10), find_gpu("h200"))

    one = 70 * GB + 327_680_000
    ten = 70 * GB + 3_276_800_000
    assert made.speed.decode_one == Fraction(4800 * GB, one)
    assert made.speed.decode == Fraction(10 * 4800 * GB, ten)
    assert round(float(made.speed.decode_one), 2) == 68.25


def test_kv_room_is_nine_tenths_of_memory_less_the_weights() -> None:
    fit = plan(SEVENTY, load(), find_gpu("H200 SXM")).fit

    assert fit.devices == 1
    assert fit.kv_room_bytes == 126_900_000_000 - 70 * GB
    assert fit.kv_room_tokens == 56_900_000_000 // 327_680 == 173_645
    assert fit.sequences == 173_645 // 8192 == 21


def test_too_large_model_reports_the_required_number_of_devices() -> None:
    # One sequence of 8,192 tokens is 2.68 GB; two times 72 GB hold it beside 70 GB of weights,
    # one does not; in bfloat16, 142.68 GB still fit into 144.
    assert plan(SEVENTY, load(), find_gpu("h100")).fit.devices == 2
    assert plan(SEVENTY, load("bfloat16"), find_gpu("h100")).fit.devices == 2
    assert plan(SEVENTY, load("float32"), find_gpu("h100")).fit.devices == 4
    assert plan(SEVENTY, load(), find_gpu("l4")).fit.devices == 4


def test_batch_is_limited_by_the_kv_room() -> None:
    made = plan(SEVENTY, load(batch=64), find_gpu("h200"))

    assert made.speed.batch == 21


def test_a_prompt_is_bound_by_operations_unless_it_is_short() -> None:
    h200 = find_gpu("h200")

    assert plan(SEVENTY, load(), h200).speed.prefill == Fraction(1979 * 10**12, 140 * GB)
    # Ten tokens take 0.7 ms of operations, and 14.6 ms to read the weights for.
    assert plan(SEVENTY, load(context=10), h200).speed.prefill == 10 / Fraction(70, 4800)


def test_the_ridge_is_operations_for_each_byte_and_its_tokens_do_not_depend_on_the_precision() -> (
    None
):
    fp8 = plan(SEVENTY, load("fp8"), find_gpu("h200")).speed
    bf16 = plan(SEVENTY, load("bfloat16"), find_gpu("h200")).speed

    assert fp8.ridge == Fraction(1979, 4800) * 1000
    assert bf16.ridge == Fraction(989, 4800) * 1000
    # Two operations per weight: 412.3 / 2 of one byte, 206.04 of two bytes.
    assert (fp8.ridge_tokens, bf16.ridge_tokens) == (207, 207)


def test_a_large_batch_is_bound_by_operations() -> None:
    small = Shape(10**9, 1, 1, 1)

    made = plan(small, load(context=1, batch=1000), find_gpu("h200"))

    assert made.speed.decode == Fraction(1979 * 10**12, 2 * 10**9)


def test_a_device_without_fp8_computes_in_bfloat16_and_an_unknown_one_has_no_prefill() -> None:
    unknown = Device("ours", 100 * GB, 10 * GB)

    assert find_gpu("a100").peak("fp8") == 312 * 10**12
    assert find_gpu("a100").peak("int8") == 624 * 10**12
    made = plan(SEVENTY, load(), unknown)
    assert (made.speed.prefill, made.speed.ridge, made.speed.ridge_tokens) == (None, None, None)
    assert made.speed.decode_one == Fraction(10 * GB, 70 * GB + 8192 * 327_680)


def test_cost_of_a_million_tokens_is_rounded_up() -> None:
    # 100 tokens per second are 360,000 per hour; a million takes 2.777… hours at $3.60.
    made = cost(
        Fraction(100),
        hour_nanos=3_600_000_000,
        efficiency=Fraction(1, 2),
        price_nanos=Fraction(25_000_000_000),
    )

    assert made.roofline_nanos == 10_000_000_000
    assert made.expected_nanos == 20_000_000_000
    assert made.margin_percent == 20
    rounded = cost(Fraction(7), hour_nanos=1, efficiency=Fraction(1), price_nanos=None)
    assert rounded.roofline_nanos == math.ceil(10**6 / (3600 * 7)) == 40
    assert rounded.margin_percent is None


def test_price_of_a_million_follows_the_catalog() -> None:
    price = Price((Component("output_token", 80, 1000), Component("input_token", 5)))

    assert price_of_million(price, "output_token") == 80_000
    assert price_of_million(price, "input_token") == 5_000_000
    assert price_of_million(price, "image") is None


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h200", "H200 SXM"),
        ("H200 SXM", "H200 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100-sxm5", "H100 SXM"),
        ("a100", "A100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("A100 80 GB", "A100 80GB"),
        ("l4", "L4"),
    ],
)
def test_a_gpu_is_found_however_its_name_is_written(written: str, name: str) -> None:
    assert find_gpu(written).name == name


@pytest.mark.parametrize("written", ["", "b300", "NVIDIA L40S", "H100 PCIe", "A100 40GB", "NVIDIA"])
def test_unknown_gpu_error_lists_the_known_ones(written: str) -> None:
    with pytest.raises(LookupError, match="known are H100 SXM, H200 SXM, A100 80GB, L4"):
        find_gpu(written)


def test_a_checkpoint_is_counted_from_its_headers() -> None:
    with safe_open(POCKET / "model.safetensors", framework="pt") as tensors:
        names = list(tensors.keys())
        counted = sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)

    shape = read_checkpoint(POCKET)

    config = json.loads((POCKET / "config.json").read_text())
    assert shape.parameters == counted
    assert (shape.layers, shape.kv_heads) == (
        config["num_hidden_layers"],
        config["num_key_value_heads"],
    )
    assert (shape.head_dim, shape.precision) == (config["head_dim"], "bfloat16")


def write_checkpoint(path: Path, *, dtype: str = "BF16", length: int | None = None) -> Path:
    config = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (path / "config.json").write_text(json.dumps({"text_config": config}))
    tensor = {"dtype": dtype, "shape": [3, 5], "data_offsets": [0, 30]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": tensor}).encode()
    size = len(header) if length is None else length
    (path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + header + bytes(30))
    return path


def test_heads_that_a_configuration_leaves_out_follow_from_its_others(tmp_path: Path) -> None:
    shape = read_checkpoint(write_checkpoint(tmp_path))

    assert (shape.parameters, shape.kv_heads, shape.head_dim) == (15, 4, 16)


def test_a_checkpoint_that_cannot_be_counted_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a packed type, which is not supported"):
        read_checkpoint(write_checkpoint(tmp_path, dtype="U8"))
    with pytest.raises(ValueError, match="its header has 99999999999 bytes"):
        read_checkpoint(write_checkpoint(tmp_path, length=99_999_999_999))
    with pytest.raises(ValueError, match="is not a safetensors file"):
        read_checkpoint(write_checkpoint(tmp_path, length=20))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no \*.safetensors"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no 'num_attention_heads'"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_checkpoint(tmp_path)


def test_table_of_shapes_matches_the_configurations() -> None:
    def decoder(
        vocabulary: int, width: int, inner: int, heads: int, *, bias: bool = False, of: Shape
    ) -> int:
        """Count parameters: untied embeddings, gated feed-forward and two norms per layer."""
        queries, keys = heads * of.head_dim, of.kv_heads * of.head_dim
        attention = 2 * width * queries + 2 * width * keys + (queries + 2 * keys if bias else 0)
        layer = attention + 3 * width * inner + 2 * width
        return 2 * vocabulary * width + of.layers * layer + width

    shapes = SHAPES
    eight, seventy = shapes["llama-3.1-8b"], shapes["llama-3.3-70b"]
    assert eight.parameters == decoder(128_256, 4096, 14_336, 32, of=eight)
    assert seventy.parameters == decoder(128_256, 8192, 28_672, 64, of=seventy)
    mistral, qwen = shapes["mistral-7b"], shapes["qwen2.5-7b"]
    assert mistral.parameters == decoder(32_768, 4096, 14_336, 32, of=mistral)
    assert qwen.parameters == decoder(152_064, 3584, 18_944, 28, bias=True, of=qwen)
    assert find_shape("meta-llama/Llama-3.3-70B-Instruct") == seventy
    assert find_shape("gpt-oss-120b") is None


def test_bandwidth_of_this_processor_is_measured() -> None:
    here = [device for device in devices_here() if device.name == "CPU here"]

    assert len(here) == 1
    assert here[0].memory > GB
    assert "measured" in (here[0].note or "")
    assert measure_bandwidth() > GB / 10


def test_gpus_are_read_from_the_output_of_their_driver() -> None:
    said = "NVIDIA H200, 143771\nNVIDIA H200, 143771\nNVIDIA T1000, 4096\nfailed\n"

    [found] = read_gpus(said)

    assert (found.name, found.memory) == ("H200 SXM here", 143_771 * 2**20)
    assert found.bandwidth == find_gpu("h200").bandwidth


def test_every_gpu_has_a_peak_for_each_supported_precision() -> None:
    for gpu in GPUS:
        for precision in ("float32", "bfloat16", "float16", "int8", "fp8"):
            assert gpu.peak(precision) is not None


def test_invalid_load_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown precision 'int3'; known are float32"):
        Load("int3", "bfloat16", 1, 1)
    with pytest.raises(ValueError, match="context is 0"):
        Load("fp8", "bfloat16", 0, 1)
    with pytest.raises(ValueError, match="layers is 0"):
        Shape(1, 0, 1, 1)
