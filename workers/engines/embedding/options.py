"""Reads the options of a catalog entry for this engine, with defaults from the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias

from workers.contract.models import ModelSpec
from workers.engines.options import UNQUANTIZED, TorchOptions, read

Pooling: TypeAlias = Literal["mean", "cls", "last"]
_POOLINGS: Final[dict[str, Pooling]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the catalog entry, beside those of every torch engine (``TorchOptions``)."""

    dtypes: ClassVar = UNQUANTIZED

    slots: int = 32
    pooling: Pooling | None = None
    """How token vectors are combined into one. Default: as the checkpoint configures it."""
    normalize: bool | None = None
    """Whether vectors are normalised. Default: as the checkpoint configures it, otherwise yes."""
    prefix: str = ""
    """Text put before every input, such as ``query: ``; not before token ids."""
    matryoshka: bool = False
    """Whether vectors can be truncated (matryoshka), so that clients may request fewer
    ``dimensions``."""


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is unknown or not supported here."""
    return read(spec, Options)


def pooling_of(path: Path, options: Options, *, is_decoder: bool) -> Pooling:
    """Return the pooling: from the options, the checkpoint, or the default of its kind of model."""
    if options.pooling is not None:
        return options.pooling
    config = _read_json(path / "1_Pooling" / "config.json")
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if not modes:
        return "last" if is_decoder else "mean"
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise ValueError(
            f"unsupported pooling {', '.join(modes)}; supported: one of {', '.join(_POOLINGS)}"
        )
    return _POOLINGS[modes[0]]


def normalizes(path: Path, options: Options) -> bool:
    """Raise ``ValueError`` if the checkpoint has further modules after pooling."""
    modules = path / "modules.json"
    if not modules.is_file():
        return options.normalize is not False
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in _read_json(modules)]
    if others := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
        raise ValueError(f"unsupported module {min(others)} in the checkpoint")
    return "Normalize" in kinds if options.normalize is None else options.normalize


def _read_json(path: Path) -> Any:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found
