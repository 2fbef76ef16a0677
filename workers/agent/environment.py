"""The environment variables that an engine process inherits: an allow-list.

Engine processes parse untrusted files in C libraries. An exploit of one of these must not find any
credential of the database, the queue, a payment provider or an upstream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NAMES: Final = frozenset(
    {
        *("PATH", "HOME", "USER", "SHELL", "TMPDIR", "TMP", "TEMP", "TZ", "LANG", "LANGUAGE"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "GLIBC_TUNABLES", "XDG_CACHE_HOME"),
        "TOLLGATE_LOG_LEVEL",
    }
)
_PREFIXES: Final = (
    *("LC_", "PYTHON", "MALLOC_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "CUDNN_", "CUBLAS_", "HIP_", "ROCR_", "HSA_"),
    *("TORCH", "PYTORCH_", "TRITON_", "HF_", "TRANSFORMERS_", "DIFFUSERS_", "TOKENIZERS_"),
)
_SECRET: Final = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
"""Words in names that are excluded despite an allowed prefix, such as HF_TOKEN: engines read local
files only."""

_ALLOCATION: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""Lets the C library keep what is freed for what is allocated next. Otherwise it returns each block
above 32 MB to the system, and every layer of a large picture waits for new pages."""


def allowed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process of the worker inherits."""
    return {name: value for name, value in environ.items() if _is_allowed(name)}


def engine_environment(environ: Mapping[str, str], *, threads: int | None) -> dict[str, str]:
    """Return the environment of an engine process, with torch's number of threads."""
    allowed = _ALLOCATION | allowed_environment(environ)
    if threads is not None:
        allowed["OMP_NUM_THREADS"] = allowed["MKL_NUM_THREADS"] = str(threads)
    return allowed


def _is_allowed(name: str) -> bool:
    if name in _NAMES:
        return True
    words = name.split("_")
    return name.startswith(_PREFIXES) and not any(word in _SECRET for word in words)
