"""The options of a catalog entry that this engine understands, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import TorchOptions, read


class VoiceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One voice; which of these a checkpoint understands depends on its family.

    Paths start at the checkpoint's directory.
    """

    speaker: int | None = None
    """Number of a speaker that the model was trained on."""
    embedding: str | None = None
    """File with a vector, ``.npy`` or ``.safetensors`` with one tensor."""
    preset: str | None = None
    """File with the arrays of a voice, ``.npz``, or its name in the checkpoint's own list."""
    recording: str | None = None
    """File with somebody speaking."""
    transcript: str = ""
    """What is said there."""


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``TorchOptions``."""

    dtypes: ClassVar = ("float32", "bfloat16")

    languages: tuple[str, ...] = ("en",)
    """That the model speaks; the first is taken where a request names none."""
    voices: Mapping[str, VoiceOptions] = {}
    """By the names that requests use; the first is taken where a request names none."""
    vocoder: str | None = None
    """Directory of the vocoder, or codec, of a model that has none itself; by default ``vocoder``
    in the checkpoint's own."""
    normalize: bool = True
    """Whether numbers, dates and abbreviations are written out before the model reads them."""
    sentence_characters: int | None = None
    """A longer sentence is spoken in parts; by default what the family takes well."""
    sentence_seconds: float = 30.0
    """A model that has not found the end of a sentence by then is stopped."""
    pause_ms: int = 120
    """Between two sentences."""
    recording_seconds: float = 30.0
    """Of a voice that is sent along, at most."""
    seconds: float = 8.0
    """Of music whose length is left open."""


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    options = read(spec, Options, counts=("sentence_characters",))
    for name in ("sentence_seconds", "recording_seconds", "seconds"):
        if getattr(options, name) <= 0:
            raise ValueError(f"{name} is {getattr(options, name)}; more than 0 is needed")
    if options.pause_ms < 0:
        raise ValueError(f"pause_ms is {options.pause_ms}; at least 0 is needed")
    if not options.languages:
        raise ValueError("languages is empty; name at least one")
    return options
