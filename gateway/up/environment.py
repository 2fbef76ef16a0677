"""The environment of each child of ``tollgate up``: what it needs, and no secret of another one.

The worker has the credentials of upstreams that the catalog names, but neither the database nor the
payment provider nor the pepper; the gateway has those, but no upstream's credential; the queue
server has none of them. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from pydantic import SecretStr

from gateway.catalog.schema import CatalogEntry
from gateway.settings import Settings

SYSTEM: Final = frozenset(
    {
        "HOME",
        "HOSTNAME",
        "LANG",
        "LANGUAGE",
        "LOGNAME",
        "NO_COLOR",
        "PATH",
        "SHELL",
        "TEMP",
        "TERM",
        "TMP",
        "TMPDIR",
        "TZ",
        "TZDIR",
        "USER",
        "VIRTUAL_ENV",
    }
)
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
NETWORK: Final = frozenset(
    {
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        *_PROXIES,
        *(name.lower() for name in _PROXIES),
    }
)
LOADER: Final = ("LC_", "LD_", "DYLD_", "PYTHON", "MALLOC_", "XDG_")
STORE: Final = ("AWS_",)
"""Prefix of the variables by which a blob store in S3 is configured."""
POSTGRES: Final = ("PG",)
"""Prefix of libpq's variables, such as ``PGPASSWORD`` and ``PGSSLMODE``."""
COMPUTE: Final = (
    "CUDA_",
    "CUBLAS_",
    "CUDNN_",
    "DIFFUSERS_",
    "GGML_",
    "HF_",
    "HIP_",
    "HSA_",
    "HUGGINGFACE_",
    "KMP_",
    "LLAMA_",
    "MKL_",
    "NCCL_",
    "NUMEXPR_",
    "NVIDIA_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "ROCM_",
    "ROCR_",
    "SAFETENSORS_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
)
OURS: Final = "TOLLGATE_"


def secret_names(settings: type[Settings] = Settings) -> frozenset[str]:
    """Names of the variables of settings that are secrets."""
    names: set[str] = set()
    for name, field in settings.model_fields.items():
        if SecretStr in getattr(field.annotation, "__args__", (field.annotation,)):
            names.add(f"{OURS}{name}".upper())
            names.add(name.upper())
    return frozenset(names)


def credentials(entries: Iterable[CatalogEntry]) -> frozenset[str]:
    """Names of the variables that hold the credentials of a catalog's upstreams."""
    found: set[str] = set()
    for entry in entries:
        if entry.upstream is not None:
            named = [entry.upstream.credential]
            named += [place.credential for place in entry.upstream.endpoints]
            found.update(name for name in named if name)
    return frozenset(found)


def of_queue_server(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the embedded queue server."""
    return _chosen(environ, SYSTEM, LOADER)


def of_gateway(environ: Mapping[str, str], *, credentials: Collection[str]) -> dict[str, str]:
    """The environment of the gateway, without the credentials of upstreams."""
    names = SYSTEM | NETWORK | {"DATABASE_URL", "REDIS_URL", "BLOB_URL"} | secret_names()
    found = _chosen(environ, names, (*LOADER, *STORE, *POSTGRES, OURS))
    return {name: value for name, value in found.items() if name not in credentials}


def of_worker(
    environ: Mapping[str, str], *, credentials: Collection[str], more: Collection[str] = ()
) -> dict[str, str]:
    """The environment of a worker; ``more`` are the names that the operator adds."""
    names = SYSTEM | NETWORK | {"REDIS_URL", "BLOB_URL"} | {*credentials, *more}
    found = _chosen(environ, names, (*LOADER, *STORE, *COMPUTE, OURS))
    return {name: value for name, value in found.items() if name not in secret_names()}


def _chosen(
    environ: Mapping[str, str], names: Collection[str], prefixes: tuple[str, ...]
) -> dict[str, str]:
    return {
        name: value for name, value in environ.items() if name in names or name.startswith(prefixes)
    }
