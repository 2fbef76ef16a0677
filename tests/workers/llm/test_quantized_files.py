"""Checkpoints in GPTQ, AWQ, FP8 and compressed-tensors: the same tokens as of their weights in
float32, and what stays packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.workers.llm import quantized_files as files
from tests.workers.llm.checkpoints import Reference, make_engine, make_spec
from tests.workers.llm.driver import Driver, choices, job, run_alone, texts
from tests.workers.llm.pictures import make_pictured, pictured_engine
from tests.workers.llm.test_engine import QUESTIONS
from workers.contract.jobs import Completed
from workers.engines.footprint import weights_estimate
from workers.engines.llm.engine import LlmEngine
from workers.engines.precision import Fp8Linear, Int8Linear
from workers.engines.quantized.formats import read_format
from workers.engines.quantized.layers import BlockFp8Linear, Int4Linear

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
FORMATS = {
    "gptq": files.gptq(4, 32),
    "gptq, one group": files.gptq(4, -1),
    "gptq, asymmetric": files.gptq(4, 32, sym=False),
    "gptq, act order": files.gptq(4, 32, sym=False, desc_act=True),
    "gptq 2": files.gptq(4, 64, sym=False, version="gptq_v2"),
    "gptq, 8 bits": files.gptq(8, 32),
    "gptq, 8 bits, act order": files.gptq(8, 16, sym=False, desc_act=True),
    "awq": files.awq(32),
    "fp8, blocks": files.fp8_blocks(48),
    "fp8, whole blocks": files.fp8_blocks(32),
    "fp8, tensor": files.fp8_tensor(),
    "fp8, channels": files.fp8_channels(),
    "int8, channels": files.int8_channels(),
    "packed, 4 bits": files.packed(4, 32),
    "packed, 4 bits, asymmetric": files.packed(4, 32, sym=False),
    "packed, 8 bits": files.packed(8, 32),
}
KEPT = {"int4": Int4Linear, "int8": Int8Linear, "fp8": (Fp8Linear, BlockFp8Linear)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    made: dict[str, tuple[Path, Path]] = {}

    def write(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = files.write_both(
                "qwen3", tmp_path_factory.mktemp("quantized"), FORMATS[name], **SIZES
            )
        return made[name]

    return write


Written = Callable[[str], tuple[Path, Path]]


@pytest.mark.parametrize("name", FORMATS)
def test_expanded_weights_give_the_tokens_of_generate(name: str, written: Written) -> None:
    wide, short = written(name)
    engine, reference = make_engine(short, dtype="float32"), Reference(wide)

    for number, question in enumerate(QUESTIONS[:3]):
        outcome = run_alone(engine, job(f"r{number}", question, max_tokens=20))

        assert isinstance(outcome, Completed)
        assert texts(outcome) == [reference.generate(question, 20)[2]]


@pytest.mark.parametrize("name", [name for name, made in FORMATS.items() if made.kind])
def test_kept_weights_are_those_that_were_stored(name: str, written: Written) -> None:
    wide, short = written(name)
    kind = FORMATS[name].kind
    assert kind is not None
    kept = make_engine(short, dtype=kind).checkpoint
    exact = load_file(wide / "model.safetensors")

    for layer, module in kept.model.named_modules():
        if layer.endswith("_proj"):
            assert isinstance(module, KEPT[kind]), layer
            weights = exact[f"{layer}.weight"]
            made = module(torch.eye(weights.shape[1])).t()
            tolerance = {"int4": 0.004, "fp8": 1e-6, "int8": 0.01}[kind]
            assert float((made - weights).norm() / weights.norm()) < tolerance, layer


@pytest.mark.parametrize("name", ["gptq, act order", "awq", "fp8, blocks", "int8, channels"])
def test_answers_of_kept_weights_do_not_depend_on_other_requests(
    name: str, written: Written
) -> None:
    engine = make_engine(written(name)[1], dtype=FORMATS[name].kind)
    jobs = [
        job(f"r{number}", question, max_tokens=20, logprobs=True, seed=4, temperature=number % 2)
        for number, question in enumerate(QUESTIONS[:3])
    ]
    alone = [choices(run_alone(engine, wanted)) for wanted in jobs]

    driver = Driver(engine)
    for wanted in jobs:
        driver.admit(wanted)
        driver.step()
    driver.finish("r0", "r1", "r2")

    assert [choices(driver.outcomes[wanted.request_id]) for wanted in jobs] == alone


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kept", [True, False])
def test_memory_is_estimated_as_it_is_measured(name: str, kept: bool, written: Written) -> None:
    short = written(name)[1]
    dtype = (FORMATS[name].kind if kept else None) or "bfloat16"

    engine = make_engine(short, dtype=dtype)

    # Rotary tables are not in the files.
    assert weights_estimate(short, dtype) == pytest.approx(engine.memory.weights_bytes, rel=0.03)


def test_weights_that_are_kept_are_never_expanded(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[int] = []
    replace = nn.Module.set_submodule

    def record(model: nn.Module, name: str, layer: nn.Module) -> None:
        weight = model.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        replaced.append(weight.untyped_storage().nbytes())
        replace(model, name, layer)

    monkeypatch.setattr(nn.Module, "set_submodule", record)

    make_engine(written("awq")[1], dtype="int4")

    assert replaced == [2] * 14


def test_four_bits_stay_on_a_cpu_by_default_and_eight_are_expanded(written: Written) -> None:
    found = {
        name: LlmEngine(make_spec(written(name)[1])).hardware.dtype
        for name in ("gptq", "awq", "packed, 4 bits", "gptq, 8 bits", "fp8, blocks")
    }

    assert list(found.values()) == ["int4", "int4", "int4", "float32", "float32"]


def test_four_bits_of_other_weights_are_refused(written: Written) -> None:
    with pytest.raises(ValueError, match="weights are not stored in four bits"):
        make_engine(written("fp8, tensor")[0], dtype="int4")


def test_stored_weights_can_be_rounded_to_another_type(written: Written) -> None:
    engine = make_engine(written("awq")[1], dtype="int8")

    assert isinstance(run_alone(engine, job("a", "fox")), Completed)
    assert engine.checkpoint.model.model.layers[0].mlp.up_proj.packed_bytes == 0


@pytest.mark.parametrize("family", ["phi3", "mixtral", "gemma3"])
def test_other_families_read_quantised_weights(family: str, tmp_path: Path) -> None:
    wide, short = files.write_both(family, tmp_path, files.gptq(4, 32), **SIZES)
    reference = Reference(wide)

    expanded, kept = make_engine(short, dtype="float32"), make_engine(short)

    outcome = run_alone(expanded, job("a", QUESTIONS[2], max_tokens=20))
    assert texts(outcome) == [reference.generate(QUESTIONS[2], 20)[2]]
    assert isinstance(run_alone(kept, job("a", QUESTIONS[2], max_tokens=20)), Completed)
    modules = list(kept.checkpoint.model.modules())
    assert any(isinstance(module, Int4Linear) for module in modules)
    assert weights_estimate(short, "int4") == pytest.approx(kept.memory.weights_bytes, rel=0.03)


def test_configuration_of_older_checkpoints_is_a_file_of_its_own(
    written: Written, tmp_path: Path
) -> None:
    short = written("gptq")[1]
    for file in short.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    own = config.pop("quantization_config")
    del own["quant_method"], own["checkpoint_format"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(own))

    assert read_format(tmp_path) == read_format(short)
    assert isinstance(run_alone(make_engine(tmp_path), job("a", "fox")), Completed)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"bits": 4}, "an unknown method"),
        ({"quant_method": "gptq", "bits": 3}, "gptq, 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq, checkpoint_fo"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {"bits": 8}}}, "layers of differe"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, version gemv"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "awq, without zero points"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8, fmt e5m2"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "0 kinds of weights"),
        (
            files._compressed("nvfp4-pack-quantized", num_bits=4, type="float"),
            "nvfp4-pack-quantized of 4 bits",
        ),
        (files.packed(4, 32).config | {"transform_config": {"R1": {}}}, "transforms"),
        (files.packed(4, 32).config | {"sparsity_config": {"format": "2:4"}}, "sparsity 2:4"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_do(
    config: dict[str, Any], what: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))

    with pytest.raises(ValueError, match=what) as refused:
        read_format(tmp_path)

    assert "supported: GPTQ" in str(refused.value)
    assert "use the model's original weights" in str(refused.value)


def _damage(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("dtype", ["int4", "float32"])
def test_parts_that_are_missing_or_do_not_fit_are_named(dtype: str, tmp_path: Path) -> None:
    layer = "model.layers.1.mlp.up_proj"
    first = files.write_both("qwen3", tmp_path / "a", files.gptq(4, 32), **SIZES)[1]
    _damage(first, lambda tensors: tensors.pop(f"{layer}.qzeros", None))
    with pytest.raises(ValueError, match=f"{layer} has no qzeros"):
        make_engine(first, dtype=dtype)

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        if f"{layer}.scales" in tensors:
            tensors[f"{layer}.scales"] = tensors[f"{layer}.scales"][:1].clone()

    second = files.write_both("qwen3", tmp_path / "b", files.gptq(4, 32), **SIZES)[1]
    _damage(second, shorten)
    with pytest.raises(ValueError, match=rf"{layer} in .* cannot be read: scales of shape"):
        make_engine(second, dtype=dtype)


def test_quantized_weights_of_a_vision_model_are_refused(tmp_path: Path) -> None:
    path = make_pictured("qwen2vl", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ValueError, match=r"quantised weights of Qwen2VL.* are not supported"):
        pictured_engine(path)
