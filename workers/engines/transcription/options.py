"""Options of the transcription engine in a catalog entry, validated."""

from __future__ import annotations

from typing import ClassVar

from workers.contract.models import ModelSpec
from workers.engines.options import UNQUANTIZED, TorchOptions, read


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Options of the catalog entry, beside those of every torch engine (``TorchOptions``)."""

    dtypes: ClassVar = UNQUANTIZED

    encode_rows: int | None = None
    """Maximum number of windows that are encoded together; None: 1 on a CPU, otherwise 2."""

    @property
    def windows(self) -> int:
        return self.encode_rows or (1 if self.torch_device.type == "cpu" else 2)


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is unknown or not supported here."""
    return read(spec, Options, counts=("encode_rows",))
