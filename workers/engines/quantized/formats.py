"""Reads from a checkpoint's configuration how its weights are quantised. Imports no torch.

Which layers are quantised is not read from the configuration, but from the names of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Layout = Literal["gptq", "awq", "plain", "packed"]

SUPPORTED: Final = (
    "GPTQ (4 and 8 bits), AWQ (gemm), FP8 (E4M3), and compressed-tensors (pack-quantized, "
    "int-quantized, float-quantized, naive-quantized)"
)
_ALTERNATIVE: Final = (
    "use the model's original weights, with dtype int8 or fp8 if they are too large, or serve this "
    "checkpoint with vLLM and point an `upstream` entry at it"
)
_PACKED_BITS: Final = (4, 8)


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """``layout`` tells the names and the order of a matrix's parts; see ``matrices``."""

    layout: Layout
    bits: int
    keeps: str | None = None
    """Value of the option ``dtype`` with which weights stay as they are stored. None: they are
    always expanded."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that have a scale in common, where shapes do not tell."""
    zeros_are_less_one: bool = False
    """Whether the stored zero points are less by one, as in the first version of GPTQ."""
    reorders: bool = False
    """Whether groups are not of neighbouring inputs."""


def read_format(path: Path) -> StoredFormat | None:
    """Return the format of a checkpoint directory, or None if its weights are not quantised.

    Raise ``ValueError`` if it is not supported, with what to do about it.
    """
    config = _read(path / "config.json").get("quantization_config")
    if config is None:
        # Older GPTQ checkpoints have it in a file of its own.
        config = _read(path / "quantize_config.json")
        if "bits" not in config:
            return None
        config = {"quant_method": "gptq", **config}
    if not isinstance(config, dict):
        raise _unsupported("an unknown method")
    method = str(config.get("quant_method", "an unknown method"))
    match method:
        case "gptq":
            return _read_gptq(config)
        case "awq":
            return _read_awq(config)
        case "fp8":
            return _read_fp8(config)
        case "compressed-tensors":
            return _read_compressed(config)
    raise _unsupported(method)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}  # the reader of the checkpoint reports what is wrong with config.json
    return content if isinstance(content, dict) else {}


def _unsupported(method: str, detail: str = "") -> ValueError:
    what = f"{method}, {detail}" if detail else method
    return ValueError(
        f"quantised weights ({what}) are not supported; supported: {SUPPORTED}; {_ALTERNATIVE}"
    )


def _read_gptq(config: Mapping[str, Any]) -> StoredFormat:
    bits = config.get("bits")
    if bits not in _PACKED_BITS:
        raise _unsupported("gptq", f"{bits} bits")
    version = "marlin" if config.get("is_marlin_format") else config.get("checkpoint_format")
    if version not in (None, "gptq", "gptq_v2"):
        raise _unsupported("gptq", f"checkpoint_format {version}")
    rules = config.get("dynamic") or {}
    if any(rule.get("bits", bits) != bits for rule in rules.values()):
        raise _unsupported("gptq", "layers of different bits")
    keeps = "int4" if bits == 4 else None
    return StoredFormat(
        *("gptq", bits, keeps),
        zeros_are_less_one=version != "gptq_v2",
        reorders=bool(config.get("desc_act")),
    )


def _read_awq(config: Mapping[str, Any]) -> StoredFormat:
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise _unsupported("awq", f"{bits} bits")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise _unsupported("awq", f"version {version}")
    if not config.get("zero_point", True):
        raise _unsupported("awq", "without zero points")
    return StoredFormat("awq", 4, "int4")


def _read_fp8(config: Mapping[str, Any]) -> StoredFormat:
    number = config.get("fmt", "e4m3")
    if number not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported("fp8", f"fmt {number}")
    block = config.get("weight_block_size")
    return StoredFormat("plain", 8, "fp8", block=_pair("fp8", block) if block else None)


def _read_compressed(config: Mapping[str, Any]) -> StoredFormat:
    method = "compressed-tensors"
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _unsupported(method, f"sparsity {sparsity}")
    if config.get("transform_config"):
        raise _unsupported(method, "transforms")
    groups = list((config.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups]
    kinds = {
        (each.get("type", "int"), each.get("num_bits"), each.get("strategy")) for each in weights
    }
    if len(kinds) != 1:
        raise _unsupported(method, f"{len(kinds)} kinds of weights")
    ((kind, bits, strategy),) = kinds
    formats = {str(group.get("format") or config.get("format")) for group in groups}
    name = formats.pop() if len(formats) == 1 else "mixed formats"
    block = _pair(method, weights[0]["block_structure"]) if strategy == "block" else None
    if name == "pack-quantized" and kind == "int" and bits in _PACKED_BITS:
        reorders = any(each.get("actorder") for each in weights)
        return StoredFormat("packed", bits, "int4" if bits == 4 else None, reorders=reorders)
    if name in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8:
        keeps = "fp8" if strategy in ("tensor", "channel", "block") else None
        return StoredFormat("plain", 8, keeps, block=block)
    if name in ("int-quantized", "naive-quantized") and kind == "int" and bits == 8:
        exact = strategy in ("tensor", "channel") and all(
            each.get("symmetric", True) for each in weights
        )
        return StoredFormat("plain", 8, "int8" if exact else None, block=block)
    raise _unsupported(method, f"{name} of {bits} bits, type {kind}")


def _pair(method: str, block: Any) -> tuple[int, int]:
    if isinstance(block, list | tuple) and len(block) == 2:
        return int(block[0]), int(block[1])
    raise _unsupported(method, f"blocks of {block!r}")
