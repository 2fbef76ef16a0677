"""The options of a catalog entry that this engine understands, and what the checkpoint says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias

from workers.contract.models import ModelSpec
from workers.engines.options import UNQUANTIZED, TorchOptions, read

Pooling: TypeAlias = Literal["mean", "cls", "last"]
_SAID: Final[dict[str, Pooling]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``TorchOptions``."""

    dtypes: ClassVar = UNQUANTIZED

    slots: int = 32
    pooling: Pooling | None = None
    """How a vector is made of a text's tokens; by default what the checkpoint says."""
    normalize: bool | None = None
    """Whether vectors have length one; by default what the checkpoint says, or yes."""
    prefix: str = ""
    """What stands before every text, such as ``query: ``; not before token ids."""
    matryoshka: bool = False
    """Whether the first numbers of a vector are a vector of their own, so that clients may ask for
    fewer ``dimensions``."""


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    return read(spec, Options)


def pooling_of(path: Path, options: Options, *, is_decoder: bool) -> Pooling:
    """How a checkpoint's vectors are made: as asked, as it says, or as its kind usually is."""
    if options.pooling is not None:
        return options.pooling
    said = _read_json(path / "1_Pooling" / "config.json")
    modes = [name for name, on in said.items() if name.startswith("pooling_mode_") and on is True]
    if not modes:
        return "last" if is_decoder else "mean"
    if len(modes) > 1 or modes[0] not in _SAID:
        raise ValueError(
            f"the checkpoint pools by {', '.join(modes)}, which is not computed here; one of "
            f"{', '.join(_SAID)} is"
        )
    return _SAID[modes[0]]


def normalizes(path: Path, options: Options) -> bool:
    """Raise ``ValueError`` if vectors are made by more than pooling."""
    modules = path / "modules.json"
    if not modules.is_file():
        return options.normalize is not False
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in _read_json(modules)]
    if others := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
        raise ValueError(f"the checkpoint has a module {min(others)}, which is not computed here")
    return "Normalize" in kinds if options.normalize is None else options.normalize


def _read_json(path: Path) -> Any:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found
