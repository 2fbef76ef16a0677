"""Which engine runs a catalog entry; its module is imported only when it is asked for.

So an agent, which asks only whether an engine could run, imports neither torch nor any engine.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import msgspec

from workers.contract.models import ModelSpec
from workers.protocol.engine import Engine


class Serving(msgspec.Struct, frozen=True):
    """The options that every engine of ours has in common, whatever else its entry says."""

    slots: int | None = None
    """Jobs in a step at a time; the engine has a default of its own."""
    concurrency: int | None = None
    """Jobs leased at a time: by default those in a step, and as many as will start within two
    seconds, at most twice as many in all."""
    weight: float = 1.0
    """This model's part of the device while others compete for it."""
    step_limit_s: float | None = None
    """A process that shows no progress for so long hangs, and is killed; by default the engine's.
    """
    load_limit_s: float = 600.0


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """Where an engine is, what must be installed for it, and how many jobs share its steps."""

    module: str
    factory: str
    packages: tuple[str, ...] = ()
    slots: int = 8
    step_limit_s: float = 60.0
    """Without progress: of those that show it within a step, the longest single kernel."""


ENGINES: Final = {
    "diffusion": EngineEntry(
        "workers.engines.diffusion.engine",
        "DiffusionEngine",
        packages=("torch", "diffusers", "transformers", "safetensors", "greenlet", "PIL", "av"),
        step_limit_s=180.0,
    ),
    "echo": EngineEntry("workers.engines.echo", "EchoEngine", slots=256),
    "embedding": EngineEntry(
        "workers.engines.embedding.engine",
        "EmbeddingEngine",
        packages=("torch", "transformers", "safetensors", "tokenizers"),
        slots=32,
    ),
    "llm": EngineEntry(
        "workers.engines.llm.engine",
        "LlmEngine",
        packages=("torch", "transformers", "safetensors", "tokenizers", "llguidance"),
    ),
    "music": EngineEntry(
        "workers.engines.music.engine",
        "MusicEngine",
        packages=("torch", "transformers", "safetensors", "tokenizers", "av", "mido"),
    ),
    "speech": EngineEntry(
        "workers.engines.speech.engine",
        "SpeechEngine",
        packages=(
            *("torch", "transformers", "diffusers", "greenlet", "safetensors", "av"),
            *("babel", "num2words", "sentencex"),
        ),
    ),
    "talking": EngineEntry(
        "workers.engines.talking.engine",
        "TalkingEngine",
        packages=("torch", "safetensors", "av", "PIL"),
    ),
    "upscale": EngineEntry(
        "workers.engines.upscale.engine",
        "UpscaleEngine",
        packages=("torch", "safetensors", "av", "PIL"),
    ),
}


def obstacle(spec: ModelSpec) -> str | None:
    """Say in a sentence why no engine process here could run this entry, if none could."""
    entry = ENGINES.get(spec.engine or "")
    if entry is None:
        return f"this worker has no engine called {spec.engine!r}; it has {', '.join(ENGINES)}"
    for package in entry.packages:
        if importlib.util.find_spec(package) is None:
            return f"the engine {spec.engine} needs {package}, which is not installed"
    try:
        serving(spec)
    except ValueError as error:
        return str(error)
    return None


def serving(spec: ModelSpec) -> Serving:
    """Raise ``ValueError`` if an option has the wrong type."""
    try:
        return msgspec.convert(spec.options, Serving)
    except msgspec.ValidationError as error:
        raise ValueError(f"its options are wrong: {error}") from error


def step_limit_s(spec: ModelSpec) -> float:
    """After how long without progress the process that serves this entry hangs."""
    return serving(spec).step_limit_s or ENGINES[spec.engine or ""].step_limit_s


def slots(spec: ModelSpec) -> int:
    """How many jobs of this model run at a time, or are leased if its entry says how many."""
    options = serving(spec)
    return options.concurrency or options.slots or ENGINES[spec.engine or ""].slots


def create(spec: ModelSpec) -> Engine:
    """Make the engine of an entry, without loading it."""
    entry = ENGINES[spec.engine or ""]
    factory = getattr(importlib.import_module(entry.module), entry.factory)
    return cast(Callable[[ModelSpec], Engine], factory)(spec)
