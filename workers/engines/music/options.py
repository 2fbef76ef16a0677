"""The options of a catalog entry that this engine understands, checked."""

from __future__ import annotations

from typing import ClassVar

from workers.contract.models import ModelSpec
from workers.engines.llm import options as llm
from workers.engines.options import TorchOptions, read


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``TorchOptions``."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    seconds: float = 30.0
    """Of a piece whose length is left open."""
    temperature: float = 0.85
    """Below 1 a piece keeps to what is likely."""


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    options = read(spec, Options)
    for name in ("seconds", "temperature"):
        if getattr(options, name) <= 0:
            raise ValueError(f"{name} is {getattr(options, name)}; more than 0 is needed")
    return options


def decoding(options: Options) -> llm.Options:
    """What the decoder of language models is to be told."""
    return llm.Options(
        dtype=options.dtype, device=options.device, slots=options.slots, threads=options.threads
    )
