"""Estimates how much memory the weights of a checkpoint take, from the headers of its files.

Reads no weights and imports no torch. A checkpoint is a directory, whose subdirectories count as
well. Where it has the same weights in several forms, those that a loader reads count: safetensors
before pickles, and plain files before variants such as ``model.fp16.safetensors``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from workers.engines.quantized.formats import StoredFormat, read_format

_SAFETENSORS: Final = ".safetensors"
_OTHERS: Final = (".bin", ".pt", ".pth", ".ckpt")
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_STORED_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
}
_DTYPE_BYTES: Final[Mapping[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "fp8": 1,
    "int4": 2,  # of what is not stored in four bits
}
_QUANTIZED: Final = ("int8", "fp8")
_WIDE_BYTES: Final = 2
"""Bytes of a weight that is not quantised in a model of which others are."""
_SCALES: Final = ("scales", "weight_scale", "weight_scale_inv")
_SCALE_BYTES: Final = 4
_INDEX_BYTES: Final = 4
_UNUSED: Final = frozenset(
    (
        *("qzeros", "weight_zero_point", "weight_shape"),
        *("input_scale", "activation_scale", "k_scale", "v_scale"),
    )
)
"""Parts of quantised matrices that are not kept, or are small."""


def weights_estimate(checkpoint: Path, dtype: str) -> int:
    """Return the bytes of a checkpoint's weights once they are loaded as ``dtype``.

    Raise ``OSError`` or ``ValueError`` if a file cannot be read.
    """
    if checkpoint.is_file():
        return _file_bytes(checkpoint, dtype)
    folders = [checkpoint, *(path for path in checkpoint.rglob("*") if path.is_dir())]
    stored = read_format(checkpoint)
    return sum(
        _file_bytes(file, dtype, stored) for folder in folders for file in _read_files(folder)
    )


def _read_files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder that a loader reads."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    chosen = [path for path in files if path.suffix == _SAFETENSORS]
    chosen = chosen or [path for path in files if path.suffix in _OTHERS]
    plain = [path for path in chosen if not _is_variant(path, chosen)]
    return plain or chosen


def _is_variant(path: Path, files: Iterable[Path]) -> bool:
    """Whether a name is that of another file with a word more, such as ``fp16``."""
    stem, _, word = path.stem.rpartition(".")
    return bool(stem and word) and any(other.stem == stem for other in files)


def _file_bytes(file: Path, dtype: str, stored: StoredFormat | None = None) -> int:
    size = file.stat().st_size
    if file.suffix != _SAFETENSORS:
        return size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size:
            raise ValueError(f"{file} is not a safetensors file")
        header = json.loads(opened.read(length))
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    if stored is None:
        return sum(_tensor_bytes(tensor, dtype) for tensor in tensors.values())
    return sum(_part_bytes(name, tensor, dtype, stored) for name, tensor in tensors.items())


def _part_bytes(name: str, tensor: Mapping[str, object], dtype: str, stored: StoredFormat) -> int:
    """Return what a tensor of a checkpoint with quantised weights takes once it is loaded."""
    part = name.rpartition(".")[2]
    kind, shape = str(tensor["dtype"]), tensor["shape"]
    assert isinstance(shape, list)
    count = math.prod(shape)
    # Layers of experts are expanded, and so is a head.
    keeps = dtype == stored.keeps and ".experts." not in name and "lm_head" not in name
    if part in _UNUSED:
        return 0
    if part in _SCALES:
        return count * _SCALE_BYTES if keeps else 0
    if part in ("g_idx", "weight_g_idx"):
        return count * _INDEX_BYTES if keeps and stored.reorders else 0
    if part in ("qweight", "weight_packed"):
        count = count * 32 // stored.bits
        return count * stored.bits // 8 if keeps else count * _DTYPE_BYTES[dtype]
    if kind in ("I8", "F8_E4M3"):
        return count if keeps else count * _DTYPE_BYTES[dtype]
    if dtype == stored.keeps:
        return count * _WIDE_BYTES
    return _tensor_bytes(tensor, dtype)


def _tensor_bytes(tensor: Mapping[str, object], dtype: str) -> int:
    kind, shape = str(tensor["dtype"]), tensor["shape"]
    assert isinstance(shape, list)
    count = math.prod(shape)
    if kind not in _FLOATS:
        return count * _STORED_BYTES.get(kind, 1)
    if dtype in _QUANTIZED and len(shape) < 2:  # only matrices are quantised
        return count * 2
    return count * _DTYPE_BYTES[dtype]
