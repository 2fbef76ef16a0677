"""Options of the music engine in a catalog entry, validated."""

from __future__ import annotations

from typing import ClassVar

from workers.contract.models import ModelSpec
from workers.engines.llm import options as llm
from workers.engines.options import TorchOptions, read


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    seconds: float = 30.0
    """Length of a piece if the request names none."""
    temperature: float = 0.85
    """Sampling temperature; below 1, likely tokens are preferred."""


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is unknown or not supported here."""
    options = read(spec, Options)
    for name in ("seconds", "temperature"):
        if getattr(options, name) <= 0:
            raise ValueError(f"{name} is {getattr(options, name)}; it must be positive")
    return options


def decoding(options: Options) -> llm.Options:
    """Return the options for the decoder of language models."""
    return llm.Options(
        dtype=options.dtype, device=options.device, slots=options.slots, threads=options.threads
    )
