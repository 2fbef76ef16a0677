"""Writes quantised checkpoints, in the layouts that are published for them.

Independent of the engine: every format is packed number by number, as its own documentation says,
and the weights that it stands for are returned, to be compared with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.workers.llm.checkpoints import make_checkpoint

Tensors = dict[str, torch.Tensor]


@dataclass
class Packed:
    """The tensors of a quantised layer, and the weights that they stand for."""

    tensors: Tensors
    weights: torch.Tensor


Pack = Callable[[torch.Tensor, torch.Generator], Packed]


@dataclass(frozen=True)
class Format:
    config: Mapping[str, Any]
    pack: Pack
    kind: str | None = None
    """Value of ``dtype`` that keeps the weights."""


def _groups(weights: torch.Tensor, size: int, *, bits: int, sym: bool) -> tuple[Any, Any, Any]:
    """Round weights by groups of inputs; return values, float16 scales and zero points."""
    outputs, inputs = weights.shape
    top = 2**bits - 1
    parts = weights.view(outputs, inputs // size, size)
    if sym:
        scale = parts.abs().amax(-1) * 2 / top
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = parts.amin(-1).clamp_max(0), parts.amax(-1).clamp_min(0)
        scale = (high - low) / top
        zero = (-low / scale).round()
    scale = scale.half()
    values = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    return values.view(outputs, inputs).long(), scale, zero.long()


def _words(values: list[int], bits: int) -> int:
    """Pack numbers into an int32, the first in the lowest bits."""
    word = sum(value << (bits * place) for place, value in enumerate(values))
    return word - 2**32 if word >= 2**31 else word


def _pack_down(values: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Pack ``(rows, columns)`` along rows: each int32 has the numbers of a few rows."""
    per = 32 // bits
    order = order or list(range(per))
    rows, columns = values.shape
    assert rows % per == 0
    words = [
        [
            _words([int(values[per * row + place, column]) for place in order], bits)
            for column in range(columns)
        ]
        for row in range(rows // per)
    ]
    return torch.tensor(words, dtype=torch.int32)


def gptq(
    bits: int, size: int, *, sym: bool = True, desc_act: bool = False, version: str = "gptq"
) -> Format:
    def pack(weights: torch.Tensor, generator: torch.Generator) -> Packed:
        outputs, inputs = weights.shape
        group = inputs if size == -1 else size
        order = torch.arange(inputs)
        if desc_act:
            order = torch.randperm(inputs, generator=generator)
        values, scale, zero = _groups(weights[:, order], group, bits=bits, sym=sym)
        of_input = torch.empty(inputs, dtype=torch.int32)
        of_input[order] = (torch.arange(inputs) // group).int()
        own = torch.empty_like(values)
        own[:, order] = values
        wide = torch.empty(outputs, inputs)
        for column in range(inputs):
            at = int(of_input[column])
            wide[:, column] = scale[:, at].float() * (own[:, column] - zero[:, at])
        written = zero - 1 if version == "gptq" else zero
        return Packed(
            {
                "qweight": _pack_down(own.t(), bits),
                "qzeros": _pack_down(written % 2**bits, bits).t().contiguous(),
                "scales": scale.t().contiguous(),
                "g_idx": of_input,
            },
            wide,
        )

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": sym,
        "desc_act": desc_act,
        "checkpoint_format": version,
        "lm_head": False,
    }
    return Format(config, pack, "int4" if bits == 4 else None)


def awq(size: int) -> Format:
    def pack(weights: torch.Tensor, generator: torch.Generator) -> Packed:
        values, scale, zero = _groups(weights, size, bits=4, sym=False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        wide = (values - zero.repeat_interleave(size, 1)) * scale.float().repeat_interleave(size, 1)
        return Packed(
            {
                # Each int32 has eight outputs of an input.
                "qweight": _pack_down(values, 4, order).t().contiguous(),
                "qzeros": _pack_down(zero, 4, order).t().contiguous(),
                "scales": scale.t().contiguous(),
            },
            wide,
        )

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return Format(config, pack, "int4")


def _eight(weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weights / scale).to(torch.float8_e4m3fn)


def fp8_blocks(size: int) -> Format:
    def pack(weights: torch.Tensor, generator: torch.Generator) -> Packed:
        outputs, inputs = weights.shape
        scale = torch.empty(-(-outputs // size), -(-inputs // size))
        values = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
        wide = torch.empty(outputs, inputs)
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                rows, columns = (slice(size * at, size * (at + 1)) for at in (row, column))
                block = weights[rows, columns]
                scale[row, column] = block.abs().max() / 448
                values[rows, columns] = _eight(block, scale[row, column])
                wide[rows, columns] = values[rows, columns].float() * scale[row, column]
        return Packed({"weight": values, "weight_scale_inv": scale}, wide)

    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [size, size],
    }
    return Format(config, pack, "fp8")


def fp8_tensor() -> Format:
    def pack(weights: torch.Tensor, generator: torch.Generator) -> Packed:
        scale = weights.abs().max() / 448
        values = _eight(weights, scale)
        parts = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
        return Packed(parts, values.float() * scale)

    return Format({"quant_method": "fp8", "activation_scheme": "static"}, pack, "fp8")


def _compressed(name: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def fp8_channels() -> Format:
    def pack(weights: torch.Tensor, generator: torch.Generator) -> Packed:
        scale = (weights.abs().amax(1, keepdim=True) / 448).bfloat16()
        values = _eight(weights, scale.float())
        parts = {"weight": values, "weight_scale": scale}
        return Packed(parts, values.float() * scale.float())

    config = _compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    return Format(config, pack, "fp8")


def int8_channels() -> Format:
    def pack(weights: torch.Tensor, generator: torch.Generator) -> Packed:
        scale = (weights.abs().amax(1, keepdim=True) / 127).bfloat16()
        values = (weights / scale.float()).round().clamp(-128, 127).to(torch.int8)
        parts = {"weight": values, "weight_scale": scale}
        return Packed(parts, values.float() * scale.float())

    config = _compressed(
        "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True
    )
    return Format(config, pack, "int8")


def packed(bits: int, size: int, *, sym: bool = True) -> Format:
    def pack(weights: torch.Tensor, generator: torch.Generator) -> Packed:
        values, half, zero = _groups(weights, size, bits=bits, sym=sym)
        scale = half.bfloat16()
        wide = values - zero.repeat_interleave(size, 1)
        parts = {
            "weight_packed": _pack_down(values.t(), bits).t().contiguous(),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weights.shape),
        }
        if not sym:
            parts["weight_zero_point"] = _pack_down(zero, bits)
        return Packed(parts, wide * scale.float().repeat_interleave(size, 1))

    config = _compressed(
        "pack-quantized",
        num_bits=bits,
        type="int",
        strategy="group",
        group_size=size,
        symmetric=sym,
    )
    return Format(config, pack, "int4" if bits == 4 else None)


def write_both(family: str, path: Path, written: Format, **changes: Any) -> tuple[Path, Path]:
    """Write a random checkpoint quantised, and one of the float32 weights that it stands for."""
    wide = make_checkpoint(family, path / "wide", **changes)
    short = make_checkpoint(family, path / "short", **changes)
    tensors = load_file(wide / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    parts: Tensors = {}
    for name, weights in list(tensors.items()):
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj") and ".w" not in layer:
            parts[name] = weights
            continue
        made = written.pack(weights, generator)
        tensors[name] = made.weights
        parts |= {f"{layer}.{part}": tensor for part, tensor in made.tensors.items()}
    save_file(tensors, wide / "model.safetensors", {"format": "pt"})
    # Two files, so that the parts of a layer are apart.
    (short / "model.safetensors").unlink()
    names = sorted(parts)
    for number in range(2):
        some = {name: parts[name].contiguous() for name in names[number::2]}
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file(some, short / file, {"format": "pt"})
    config = json.loads((short / "config.json").read_text())
    config["quantization_config"] = dict(written.config)
    (short / "config.json").write_text(json.dumps(config))
    return wide, short
