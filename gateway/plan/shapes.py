"""Sizes of language models: read from a checkpoint, from a short table, or given explicitly.

Reads ``config.json`` and the headers of ``*.safetensors``, but no weights, so it needs no torch.
All problems are raised as ``ValueError`` with a message for the operator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HEADER_BYTES_MAX: Final = 100_000_000
"""Maximum size of a header, as in the format's specification."""
_NUMBERS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8"})
"""Types that store one weight per number; others can pack several weights into one number."""
_PRECISIONS: Final = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a decoder that determine memory and time."""

    parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    context: int | None = None
    """Maximum context length, in tokens."""
    precision: str | None = None
    """Precision of the stored weights, if known."""
    source: str = "spelled out"
    experts: int | None = None
    """Number of experts of a mixture. A token uses a few; the calculation counts all."""

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


_TABLE: Final = "a shape from tollgate's table, not weights"
SHAPES: Final[Mapping[str, Shape]] = {
    # Parameters as computed from the published config.json; tied weights are counted once.
    "llama-3.1-8b": Shape(8_030_261_248, 32, 8, 128, 131_072, "bfloat16", _TABLE),
    "llama-3.2-1b": Shape(1_235_814_400, 16, 8, 64, 131_072, "bfloat16", _TABLE),
    "llama-3.3-70b": Shape(70_553_706_496, 80, 8, 128, 131_072, "bfloat16", _TABLE),
    "mistral-7b": Shape(7_248_023_552, 32, 8, 128, 32_768, "bfloat16", _TABLE),
    "qwen2.5-7b": Shape(7_615_616_512, 28, 4, 128, 32_768, "bfloat16", _TABLE),
    "qwen2.5-72b": Shape(72_706_203_648, 80, 8, 128, 32_768, "bfloat16", _TABLE),
    "qwen3-8b": Shape(8_190_735_360, 36, 8, 128, 40_960, "bfloat16", _TABLE),
}


def find_shape(name: str) -> Shape | None:
    """Find a model in the table; owner and suffixes such as ``-instruct`` are optional."""
    plain = name.lower().rsplit("/", 1)[-1]
    for ending in ("-instruct", "-chat", "-base"):
        plain = plain.removesuffix(ending)
    return SHAPES.get(plain)


def read_checkpoint(path: Path) -> Shape:
    """Read the shape of a Hugging Face directory."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
        config = config.get("text_config") or config
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        layers, context = config["num_hidden_layers"], config.get("max_position_embeddings")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} is not a valid configuration: {error}") from error
    except KeyError as error:
        raise ValueError(f"{file} has no {error}; it is not a supported decoder") from None
    stored = config.get("dtype") or config.get("torch_dtype")
    return Shape(
        parameters=_count_parameters(path),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        precision=stored if stored in _PRECISIONS else None,
        source=f"counted in {path}",
        experts=config.get("num_local_experts") or config.get("num_experts"),
    )


def _count_parameters(path: Path) -> int:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has no *.safetensors; other formats are not supported")
    total = 0
    for file in files:
        for name, tensor in _read_header(file).items():
            if name == "__metadata__":
                continue
            if tensor["dtype"] not in _NUMBERS:
                raise ValueError(
                    f"{file} has weights in {tensor['dtype']}, "
                    "a packed type, which is not supported; "
                    "describe the model with --params, --layers, --kv-heads and --head-dim"
                )
            total += math.prod(tensor["shape"])
    return total


def _read_header(file: Path) -> dict[str, Any]:
    """Read a safetensors header: eight bytes of length (little-endian), then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= HEADER_BYTES_MAX:
            raise ValueError(f"{file} is not a safetensors file: its header has {length} bytes")
        text = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    return header
