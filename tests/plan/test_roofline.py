"""Capacity planning, checked by hand calculations, and reading of checkpoints."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from gateway.plan.hardware import Device, find_gpu, gpus, own_gpu
from gateway.plan.roofline import (
    Load,
    cost,
    plan,
    price_of_million,
    step_bytes,
    token_bytes,
    weight_bytes,
)
from gateway.plan.shapes import Shape, find_shape, read_checkpoint, shapes
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
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx5090", "RTX 5090"),
        ("4090", "RTX 4090"),
    ],
)
def test_a_gpu_is_found_however_its_name_is_written(written: str, name: str) -> None:
    assert find_gpu(written).name == name


@pytest.mark.parametrize("written", ["", "b300", "L40", "RTX", "H100 PCIe", "A100 40GB", "NVIDIA"])
def test_unknown_gpu_error_lists_the_known_ones(written: str) -> None:
    with pytest.raises(LookupError, match="known are H100 SXM, H200 SXM, B200, A100 80GB, L40S"):
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


def test_experts_of_a_checkpoint_are_counted(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())["text_config"]
    config |= {"num_experts": 4, "num_experts_per_tok": 1}
    (path / "config.json").write_text(json.dumps(config))
    tensor = {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]}
    names = ["model.embed", *(f"model.layers.0.mlp.experts.{n}.up" for n in range(4))]
    header = json.dumps(dict.fromkeys(names, tensor)).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    shape = read_checkpoint(path)

    assert (shape.parameters, shape.active_parameters) == (75, 30)
    assert (shape.experts, shape.experts_used) == (4, 1)


@pytest.mark.parametrize(
    ("config", "name", "weights"),
    [
        ({"quant_method": "gptq", "bits": 4}, "qweight", 8 * 6 + 15),
        ({"quant_method": "gptq", "bits": 8}, "qweight", 4 * 6 + 15),
        ({"quant_method": "awq", "w_bit": 4}, "qweight", 8 * 6 + 15),
        (
            {
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            "weight_packed",
            8 * 6 + 15,
        ),
    ],
)
def test_packed_weights_of_a_checkpoint_are_counted(
    config: dict[str, Any], name: str, weights: int, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path)
    document = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(document))
    header = {
        f"model.layers.0.up.{name}": {"dtype": "I32", "shape": [2, 3], "data_offsets": [0, 24]},
        "model.layers.0.up.qzeros": {"dtype": "I32", "shape": [9], "data_offsets": [24, 60]},
        "model.embed.weight": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [60, 90]},
    }
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)

    assert read_checkpoint(path).parameters == weights


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

    eight, seventy = shapes()["llama-3.1-8b"], shapes()["llama-3.3-70b"]
    assert eight.parameters == decoder(128_256, 4096, 14_336, 32, of=eight)
    assert seventy.parameters == decoder(128_256, 8192, 28_672, 64, of=seventy)
    mistral, qwen = shapes()["mistral-7b"], shapes()["qwen2.5-7b"]
    assert mistral.parameters == decoder(32_768, 4096, 14_336, 32, of=mistral)
    assert qwen.parameters == decoder(152_064, 3584, 18_944, 28, bias=True, of=qwen)
    assert find_shape("meta-llama/Llama-3.3-70B-Instruct") == seventy
    seventy_two = shapes()["llama-2-70b"]
    assert seventy_two.parameters == decoder(32_000, 8192, 28_672, 64, of=seventy_two)
    assert find_shape("gpt-oss-120b") is None


def test_table_of_mixtures_matches_the_configurations() -> None:
    def mixture(
        vocabulary: int, width: int, inner: int, heads: int, *, used: int, of: Shape
    ) -> int:
        """Count parameters with ``used`` experts: gates, and norms of queries and keys in Qwen."""
        queries, keys = heads * of.head_dim, of.kv_heads * of.head_dim
        norms = 2 * width + (2 * of.head_dim if of.experts == 128 else 0)
        layer = 2 * width * queries + 2 * width * keys + norms
        layer += (of.experts or 0) * width + used * 3 * width * inner
        return 2 * vocabulary * width + of.layers * layer + width

    for name, sizes in (
        ("mixtral-8x7b", (32_000, 4096, 14_336, 32)),
        ("qwen3-30b-a3b", (151_936, 2048, 768, 32)),
    ):
        shape = shapes()[name]
        assert shape.experts is not None
        assert shape.experts_used is not None
        assert shape.parameters == mixture(*sizes, used=shape.experts, of=shape)
        assert shape.active_parameters == mixture(*sizes, used=shape.experts_used, of=shape)


def test_a_mixture_stores_all_experts_reads_those_of_the_batch_and_computes_with_few() -> None:
    # Two of four experts of 10 GB each, and 10 GB that every token uses.
    mixture = Shape(50 * GB, 1, 1, 1, experts=4, experts_used=2, active_parameters=30 * GB)
    h200 = find_gpu("h200")

    assert weight_bytes(mixture, "fp8") == 50 * GB
    assert mixture.parameters_read(1) == 30 * GB
    # Half of the experts stay idle for one token, a quarter for two.
    assert mixture.parameters_read(2) == 40 * GB
    assert mixture.parameters_read(10_000) == 50 * GB
    one = plan(mixture, load(context=1), h200).speed
    assert one.decode_one == Fraction(4800 * GB, 30 * GB + 4)
    assert plan(mixture, load(context=8192), h200).speed.prefill == Fraction(
        1979 * 10**12, 2 * 30 * GB
    )


def test_a_latent_cache_is_smaller_than_keys_and_values() -> None:
    deepseek = shapes()["deepseek-v3"]

    assert token_bytes(deepseek, "bfloat16") == 61 * (512 + 64) * 2


def test_a_request_is_prefilled_then_decoded_in_its_share_of_the_batch() -> None:
    asked = Load("fp8", "bfloat16", 8192, 2, input_tokens=1000, output_tokens=100)

    made = plan(SEVENTY, asked, find_gpu("h200"))

    prefill = Fraction(2 * 70 * GB * 1000, 1979 * 10**12)
    decode = Fraction(100 * (70 * GB + 2 * 8192 * 327_680), 2 * 4800 * GB)
    assert made.request_seconds == prefill + decode
    assert plan(SEVENTY, asked, Device("ours", 100 * GB, 10 * GB)).request_seconds is None


def test_an_own_gpu_needs_all_of_its_figures() -> None:
    own = own_gpu({"memory": 96, "bandwidth": 1800, "tflops": 500})

    assert own is not None
    assert (own.memory, own.bandwidth, own.peak("fp8")) == (96 * GB, 1800 * GB, 500 * 10**12)
    assert own_gpu({"memory": None, "bandwidth": None, "tflops": None}) is None
    with pytest.raises(ValueError, match="bandwidth, tflops is required"):
        own_gpu({"memory": 96, "bandwidth": None, "tflops": None})
    with pytest.raises(ValueError, match="tflops is -1; it must be above 0"):
        own_gpu({"memory": 96, "bandwidth": 1, "tflops": -1})


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
    for gpu in gpus():
        for precision in ("float32", "bfloat16", "float16", "int8", "fp8"):
            assert gpu.peak(precision) is not None


def test_invalid_load_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown precision 'int3'; known are float32"):
        Load("int3", "bfloat16", 1, 1)
    with pytest.raises(ValueError, match="context is 0"):
        Load("fp8", "bfloat16", 0, 1)
    with pytest.raises(ValueError, match="layers is 0"):
        Shape(1, 0, 1, 1)
