"""The supported families of checkpoints. Each was compared with its own library, value by value.

Other checkpoints are refused by name when they are loaded.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.speech.model import SpeechModel
from workers.engines.speech.options import Options

MUSIC_TASK: Final = "text-to-music"
CLONING_TASK: Final = "voice-clone"


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of checkpoint, with the class that runs it."""

    model_class: str
    module: str = "workers.engines.speech.sentence_models"
    tasks: tuple[str, ...] = ("text-to-speech",)
    sentence_characters: int = 400
    """Maximum length of a segment; longer sentences are split."""
    turn_tags: bool = False
    """Whether each sentence needs a tag that names its speaker."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Types in which the library's modules compute."""
    has_speaker_encoder: bool = False
    """Whether a ``reference`` encoder in the checkpoint enables voices from recordings."""

    def load(self, path: Path, options: Options) -> SpeechModel:
        """Load a checkpoint. Raise ``ValueError`` with the reason if that fails."""
        model_class = getattr(importlib.import_module(self.module), self.model_class)
        return cast(Callable[[Path, Options], SpeechModel], model_class)(path, options)


_CODEC_MODELS: Final = "workers.engines.speech.codec_models"

_FASTSPEECH: Final = Family("FastSpeechSynthesizer", dtypes=("float32",), has_speaker_encoder=True)

FAMILIES: Final = {
    "vits": Family("VitsSynthesizer"),
    "speecht5": Family("SpeechT5Synthesizer"),
    "fastspeech2_conformer": _FASTSPEECH,
    "fastspeech2_conformer_with_hifigan": _FASTSPEECH,
    "musicgen": Family("MusicgenSynthesizer", _CODEC_MODELS, (MUSIC_TASK,)),
    "bark": Family("BarkSynthesizer", _CODEC_MODELS, sentence_characters=150),
    "dia": Family(
        "DiaSynthesizer", _CODEC_MODELS, ("text-to-speech", CLONING_TASK), turn_tags=True
    ),
    "csm": Family("CsmSynthesizer", _CODEC_MODELS, ("text-to-speech", CLONING_TASK)),
}
"""By the ``model_type`` of a checkpoint's ``config.json``."""


def family_of(spec: ModelSpec) -> Family:
    """Return the family of an entry. Raise ``ValueError`` if it is not supported."""
    config = Path(spec.checkpoint or "") / "config.json"
    if not config.is_file():
        raise ValueError(f"{config} is missing; is this a directory in transformers' format?")
    try:
        kind = str(json.loads(config.read_text())["model_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} cannot be read: {error}") from error
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"unsupported model type {kind!r}; supported types are {known}")
    family = FAMILIES[kind]
    cloning = family.has_speaker_encoder and (config.parent / "reference").is_dir()
    tasks = (*family.tasks, *([CLONING_TASK] if cloning else []))
    for task in (spec.task, *spec.also):
        if task not in tasks:
            raise ValueError(f"{kind} does not support {task}; it supports {', '.join(tasks)}")
    return family


def with_dtype(options: Options, family: Family, spec: ModelSpec) -> Options:
    """Choose a type that the family computes in, where the entry leaves it open.

    Raise ``ValueError`` if the entry names another one.
    """
    if options.dtype in family.dtypes:
        return options
    if spec.options.get("dtype", "auto") != "auto":
        accepted = " or ".join(family.dtypes)
        raise ValueError(f"dtype is {options.dtype!r}; this family computes in {accepted}")
    return msgspec.structs.replace(options, dtype=family.dtypes[0])
