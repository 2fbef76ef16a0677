"""Sizes of language models: read from a checkpoint, from a short table, or given explicitly.

Reads ``config.json`` and the headers of ``*.safetensors``, but no weights, so it needs no torch.
All problems are raised as ``ValueError`` with a message for the operator. The table is in
``shapes.yaml``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

HEADER_BYTES_MAX: Final = 100_000_000
"""Maximum size of a header, as in the format's specification."""
_NUMBERS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8"})
"""Types that store one weight per number; others can pack several weights into one number."""
_PACKED: Final = (".qweight", ".weight_packed")
"""Names of tensors whose integers of 32 bits have several weights each."""
_PRECISIONS: Final = frozenset({"float32", "bfloat16", "float16"})
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_FILE: Final = Path(__file__).with_name("shapes.yaml")


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
    """Number of experts of a mixture; each token uses ``experts_used`` of them."""
    experts_used: int | None = None
    active_parameters: int | None = None
    """Weights that a token uses, of a mixture of experts."""
    kv_numbers: int | None = None
    """Numbers cached for a token in a layer, if not the keys and values of all KV heads."""
    packed_bits: int | None = None
    """Bits of a stored weight, if several share an integer. Plans count them as expanded."""

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def active(self) -> int:
        """Weights that multiply a token."""
        return self.active_parameters or self.parameters

    @property
    def cached_numbers(self) -> int:
        """Numbers cached for a token in all layers."""
        return self.layers * (self.kv_numbers or 2 * self.kv_heads * self.head_dim)

    def parameters_read(self, tokens: int) -> Fraction:
        """Return the weights that a forward pass of ``tokens`` reads.

        Those of a mixture's experts are read if a token uses them; each token counts as choosing
        its experts at random.
        """
        if self.active_parameters is None or not self.experts or not self.experts_used:
            return Fraction(self.parameters)
        idle = 1 - self.experts_used / self.experts
        in_experts = Fraction(self.parameters - self.active_parameters) / Fraction(idle)
        return self.parameters - in_experts * Fraction(idle**tokens)


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    context: int
    experts: int | None = None
    experts_used: int | None = None
    active: int | None = None
    kv_numbers: int | None = None


@cache
def shapes() -> Mapping[str, Shape]:
    """Return the table of well-known models."""
    document = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {
        name: Shape(
            row.parameters,
            row.layers,
            row.kv_heads,
            row.head_dim,
            row.context,
            "bfloat16",
            "a shape from tollgate's table, not weights",
            row.experts,
            row.experts_used,
            row.active,
            row.kv_numbers,
        )
        for name, row in msgspec.convert(document, dict[str, _Row]).items()
    }


def plain_name(name: str) -> str:
    """Return a model's name without its owner and suffixes such as ``-instruct``."""
    plain = name.lower().rsplit("/", 1)[-1]
    for ending in ("-instruct", "-chat", "-base", "-hf"):
        plain = plain.removesuffix(ending)
    return plain


def find_shape(name: str) -> Shape | None:
    """Find a model in the table; owner and suffixes such as ``-instruct`` are optional."""
    return shapes().get(plain_name(name))


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint."""
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a valid configuration: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a valid configuration: it is not an object")
    return config


def read_checkpoint(path: Path) -> Shape:
    """Read the shape of a Hugging Face directory of a language model."""
    file = path / "config.json"
    config = read_config(file)
    try:
        config = config.get("text_config") or config
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        layers, context = config["num_hidden_layers"], config.get("max_position_embeddings")
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{file} is not a valid configuration: {error}") from error
    except KeyError as error:
        raise ValueError(f"{file} has no {error}; it is not a supported decoder") from None
    bits = _packed_bits(read_config(file))
    parameters, in_experts = count_parameters(path, packed_bits=bits)
    experts = next((config[key] for key in _EXPERTS if config.get(key)), None)
    used = config.get("num_experts_per_tok")
    active = None
    if experts and used and in_experts:
        active = parameters - in_experts + in_experts * used // experts
    latent = config.get("kv_lora_rank")
    return Shape(
        parameters=parameters,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        precision=stored_precision(config),
        source=f"counted in {path}",
        experts=experts,
        experts_used=used if active else None,
        active_parameters=active,
        kv_numbers=latent + config.get("qk_rope_head_dim", 0) if latent else None,
        packed_bits=bits,
    )


def stored_precision(config: Mapping[str, Any]) -> str | None:
    stored = config.get("dtype") or config.get("torch_dtype")
    return stored if stored in _PRECISIONS else None


def _packed_bits(config: Mapping[str, Any]) -> int | None:
    """Return the bits of packed weights, from the forms of GPTQ, AWQ and compressed-tensors."""
    stored = config.get("quantization_config") or {}
    groups = (stored.get("config_groups") or {}).values()
    own = next((group["weights"].get("num_bits") for group in groups if group.get("weights")), None)
    bits = stored.get("bits") or stored.get("w_bit") or own
    packs = stored.get("quant_method") in ("gptq", "awq") or "pack" in stored.get("format", "")
    return bits if packs and bits in (4, 8) else None


def count_parameters(
    path: Path, *, skip_packed: bool = False, packed_bits: int | None = None
) -> tuple[int, int]:
    """Return the number of weights in a directory, and of those in a mixture's experts."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has no *.safetensors; other formats are not supported")
    total = in_experts = 0
    for file in files:
        for name, tensor in _read_header(file).items():
            if name == "__metadata__" or (skip_packed and tensor["dtype"] not in _NUMBERS):
                continue
            per_number = 1
            if packed_bits is not None and tensor["dtype"] in ("I32", "I64"):
                # The other integers are zero points and orders.
                per_number = 32 // packed_bits if name.endswith(_PACKED) else 0
            elif tensor["dtype"] not in _NUMBERS:
                raise ValueError(
                    f"{file} has weights in {tensor['dtype']}, "
                    "a packed type, which is not supported; "
                    "describe the model with --params, --layers, --kv-heads and --head-dim"
                )
            count = math.prod(tensor["shape"]) * per_number
            total += count
            if ".experts." in name:
                in_experts += count
    return total, in_experts


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
