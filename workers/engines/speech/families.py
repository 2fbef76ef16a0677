"""Which checkpoints can speak here. Each was compared with its own library, value by value.

Whatever is not on this list is refused by name instead of being tried on somebody's request.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from workers.contract.models import ModelSpec
from workers.engines.speech.options import Options
from workers.engines.speech.talker import Talker

MUSIC_TASK: Final = "text-to-music"
CLONING_TASK: Final = "voice-clone"


@dataclass(frozen=True, slots=True)
class Family:
    """How a kind of checkpoint is spoken with."""

    talker: str
    module: str = "workers.engines.speech.whole"
    tasks: tuple[str, ...] = ("text-to-speech",)
    sentence_characters: int = 400
    """A longer sentence is spoken in parts."""

    def load(self, path: Path, options: Options) -> Talker:
        """Raise ``ValueError`` with the reason."""
        made = getattr(importlib.import_module(self.module), self.talker)
        return cast(Callable[[Path, Options], Talker], made)(path, options)


FAMILIES: Final = {
    "vits": Family("VitsTalker"),
    "speecht5": Family("SpeechT5Talker"),
    "fastspeech2_conformer": Family("FastSpeechTalker"),
    "fastspeech2_conformer_with_hifigan": Family("FastSpeechTalker"),
}
"""By the ``model_type`` of a checkpoint's ``config.json``."""


def family_of(spec: ModelSpec) -> Family:
    """The family of an entry. Raise ``ValueError`` with the reason if it cannot run."""
    config = Path(spec.checkpoint or "") / "config.json"
    if not config.is_file():
        raise ValueError(f"{config} is missing; is this a directory in transformers' format?")
    try:
        kind = str(json.loads(config.read_text())["model_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} cannot be read: {error}") from error
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"the checkpoint is a {kind}; proven to speak here are {known}")
    family = FAMILIES[kind]
    for task in (spec.task, *spec.also):
        if task not in family.tasks:
            raise ValueError(f"{kind} does not do {task}; it does {', '.join(family.tasks)}")
    return family
