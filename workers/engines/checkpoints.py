"""Loads transformers checkpoints for the engines of language models and embeddings.

Nothing is downloaded, no code of a checkpoint is run, and weights are safetensors only. Every
problem is a ``ValueError`` with a message for the operator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.utils import logging as library_logging

from workers.contract.models import ModelSpec
from workers.engines.options import TorchOptions
from workers.engines.precision import quantize
from workers.engines.quantized.formats import read_format
from workers.engines.quantized.loading import load


def checkpoint_path(spec: ModelSpec) -> Path:
    if spec.checkpoint is None:
        raise ValueError("the entry names no checkpoint; it is the directory of the weights")
    return Path(spec.checkpoint)


def read_architecture(path: Path) -> tuple[dict[str, Any], str]:
    """Return the content of ``config.json`` and the first architecture in it, or ``unknown``."""
    try:
        config = json.loads((path / "config.json").read_text())
        return config, str((config.get("architectures") or ["unknown"])[0])
    except (OSError, ValueError, AttributeError, LookupError) as error:
        raise ValueError(f"{path / 'config.json'} cannot be read: {error}") from error


def check_family(family: str, supported: Sequence[str], alternative: str) -> None:
    if family not in supported:
        names = ", ".join(supported)
        raise ValueError(f"unsupported model family {family}; supported: {names}; {alternative}")


def read_tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def read_model(loader: Any, path: Path, options: TorchOptions, *, unused: str | None = None) -> Any:
    """Load a model for inference, quantised if its ``dtype`` is, on its device, by one of
    transformers' ``AutoModel`` classes.

    Weights that are stored in four or eight bits stay so if that is the ``dtype``. ``unused``:
    substring of the names of weights that may be missing, because nothing uses them.
    """
    # The log has one JSON object per line; the library's progress bars and log handler break that.
    log: Any = library_logging
    log.disable_progress_bar()
    log.disable_default_handler()
    log.enable_propagation()
    arguments: dict[str, Any] = {
        "dtype": options.torch_dtype,
        "local_files_only": True,
        "trust_remote_code": False,
        "use_safetensors": True,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    stored, device = read_format(path), options.torch_device
    keeps = stored is not None and stored.keeps == options.dtype
    try:
        if stored is None:
            loaded: Any = loader.from_pretrained(path, **arguments)
        else:
            loaded = load(loader, path, stored, device if keeps else None, arguments)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"the weights in {path} cannot be read: {error}") from error
    model, report = loaded
    # The library replaces missing and mismatched weights by random numbers.
    for problem in ("missing", "mismatched"):
        keys = [str(key if isinstance(key, str) else key[0]) for key in report[f"{problem}_keys"]]
        if problem == "missing" and unused is not None:
            keys = [key for key in keys if unused not in key]
        if keys:
            raise ValueError(
                f"the weights in {path} do not fit config.json: {len(keys)} {problem}, "
                f"including {min(keys)}"
            )
    if not keeps:
        quantize(model, options.dtype, device)
    return model.to(device).requires_grad_(False).eval()
