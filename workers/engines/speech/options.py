"""Options of the speech engine in a catalog entry, validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import TorchOptions, read


class VoiceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A voice. Which fields a checkpoint supports depends on its family.

    Paths are relative to the checkpoint's directory.
    """

    speaker: int | None = None
    """Index of a speaker in the training data."""
    embedding: str | None = None
    """File with a speaker embedding: ``.npy``, or ``.safetensors`` with one tensor."""
    preset: str | None = None
    """File with the arrays of a voice, ``.npz``, or a name in the checkpoint's list."""
    recording: str | None = None
    """File with a recording of the voice."""
    transcript: str = ""
    """Transcript of the recording."""


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    dtypes: ClassVar = ("float32", "bfloat16")

    languages: tuple[str, ...] = ("en",)
    """Languages of the model; the first is the default."""
    voices: Mapping[str, VoiceOptions] = {}
    """Voices by name; the first is the default."""
    vocoder: str | None = None
    """Directory of the vocoder or codec, for models without one. Default: ``vocoder`` in the
    checkpoint's directory."""
    normalize: bool = True
    """Whether numbers, dates and abbreviations are written out before synthesis."""
    sentence_characters: int | None = None
    """Maximum length of a segment; longer sentences are split. Default: by family."""
    sentence_seconds: float = 30.0
    """Maximum duration of a segment, after which the model is stopped."""
    pause_ms: int = 120
    """Pause between two sentences."""
    recording_seconds: float = 30.0
    """Maximum length of a recording in a request."""
    seconds: float = 8.0
    """Length of music if the request names none."""


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is unknown or not supported here."""
    options = read(spec, Options, counts=("sentence_characters",))
    for name in ("sentence_seconds", "recording_seconds", "seconds"):
        if getattr(options, name) <= 0:
            raise ValueError(f"{name} is {getattr(options, name)}; it must be positive")
    if options.pause_ms < 0:
        raise ValueError(f"pause_ms is {options.pause_ms}; it must be at least 0")
    if not options.languages:
        raise ValueError("languages is empty; it needs at least one")
    return options
