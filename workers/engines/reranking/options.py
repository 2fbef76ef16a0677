"""Options of the reranking engine in a catalog entry, validated."""

from __future__ import annotations

from typing import ClassVar, Literal

from workers.contract.models import ModelSpec
from workers.engines.options import UNQUANTIZED, TorchOptions, read


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the catalog entry, beside those of every torch engine (``TorchOptions``)."""

    dtypes: ClassVar = UNQUANTIZED

    slots: int = 32
    activation: Literal["sigmoid", "none"] = "sigmoid"
    """How the model's output becomes a score: between 0 and 1, or as it is."""


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is unknown or not supported here."""
    return read(spec, Options)
