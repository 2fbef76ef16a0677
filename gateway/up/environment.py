"""The environment of each child of ``tollgate up``: what it needs, without the secrets of others.

The worker gets the credentials of the catalog's upstreams, but no access to the database, the
payment provider or the pepper. The gateway gets those, but no credentials of upstreams. The queue
server gets neither. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from pydantic import SecretStr

from gateway.settings import Settings
from workers.contract.models import ModelSpec

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
"""Prefix of the variables that configure a blob store in S3."""
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
    """Return the names of the environment variables of secret settings."""
    names: set[str] = set()
    for name, field in settings.model_fields.items():
        if SecretStr in getattr(field.annotation, "__args__", (field.annotation,)):
            names.add(f"{OURS}{name}".upper())
            names.add(name.upper())
    return frozenset(names)


def credentials(specs: Iterable[ModelSpec]) -> frozenset[str]:
    """Return the names of the environment variables with credentials of a catalog's upstreams."""
    found: set[str] = set()
    for spec in specs:
        if spec.upstream is not None:
            named = [spec.upstream.credential]
            named += [place.credential for place in spec.upstream.endpoints]
            found.update(name for name in named if name)
    return frozenset(found)


def of_queue_server(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the embedded queue server."""
    return _chosen(environ, SYSTEM, LOADER)


def of_gateway(environ: Mapping[str, str], *, credentials: Collection[str]) -> dict[str, str]:
    """Return the environment of the gateway, without credentials of upstreams."""
    names = SYSTEM | NETWORK | {"DATABASE_URL", "REDIS_URL", "BLOB_URL"} | secret_names()
    found = _chosen(environ, names, (*LOADER, *STORE, *POSTGRES, OURS))
    return {name: value for name, value in found.items() if name not in credentials}


def of_worker(
    environ: Mapping[str, str], *, credentials: Collection[str], more: Collection[str] = ()
) -> dict[str, str]:
    """Return the environment of a worker; ``more`` are names added by the operator."""
    names = SYSTEM | NETWORK | {"REDIS_URL", "BLOB_URL"} | {*credentials, *more}
    found = _chosen(environ, names, (*LOADER, *STORE, *COMPUTE, OURS))
    return {name: value for name, value in found.items() if name not in secret_names()}


def of_trial(environ: Mapping[str, str], *, threads: int | None) -> dict[str, str]:
    """Return the environment of a process that loads a model from local files, without secrets."""
    found = _chosen(environ, SYSTEM, (*LOADER, *COMPUTE))
    found = {name: value for name, value in found.items() if not name.endswith(("TOKEN", "KEY"))}
    if threads is not None:
        found["OMP_NUM_THREADS"] = found["MKL_NUM_THREADS"] = str(threads)
    return found


def _chosen(
    environ: Mapping[str, str], names: Collection[str], prefixes: tuple[str, ...]
) -> dict[str, str]:
    return {
        name: value for name, value in environ.items() if name in names or name.startswith(prefixes)
    }
