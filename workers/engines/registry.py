"""Maps a catalog entry to its engine, whose module is imported only when one is created.

An agent, which only checks whether an engine could run, therefore imports neither torch nor
engines.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import msgspec

from workers.contract.models import ModelSpec
from workers.protocol.engine import Engine


class Serving(msgspec.Struct, frozen=True):
    """Options that every engine accepts, beside its own."""

    slots: int | None = None
    """Maximum jobs in a step. Default: that of the engine."""
    concurrency: int | None = None
    """Maximum jobs leased. Default: ``slots`` plus those that will start within two seconds, at
    most twice ``slots``."""
    weight: float = 1.0
    """Relative share of device time while other models compete for it."""
    step_limit_s: float | None = None
    """Time without progress after which the process counts as hung and is killed. Default: that
    of the engine."""
    load_limit_s: float = 600.0


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine: its location, required packages, and defaults of its options."""

    module: str
    factory: str
    packages: tuple[str, ...] = ()
    slots: int = 8
    step_limit_s: float = 60.0
    """Longest time without progress. Engines that report progress within a step need only cover
    the longest single kernel."""


VIDEO_SLOTS: Final = 2
"""Default slots of models that make video: one alone saturates a device, and each takes memory."""

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
    "rerank": EngineEntry(
        "workers.engines.reranking.engine",
        "RerankEngine",
        packages=("torch", "transformers", "safetensors", "tokenizers"),
        slots=32,
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
    "transcription": EngineEntry(
        "workers.engines.transcription.engine",
        "TranscriptionEngine",
        packages=("torch", "transformers", "safetensors", "tokenizers", "av"),
    ),
    "upscale": EngineEntry(
        "workers.engines.upscale.engine",
        "UpscaleEngine",
        packages=("torch", "safetensors", "av", "PIL"),
    ),
}


def obstacle(spec: ModelSpec) -> str | None:
    """Return why no engine process here could run this entry, or None if one could."""
    entry = ENGINES.get(spec.engine or "")
    if entry is None:
        return f"unknown engine {spec.engine!r}; this worker has {', '.join(ENGINES)}"
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
        raise ValueError(f"invalid options: {error}") from error


def step_limit_s(spec: ModelSpec) -> float:
    """Return the time without progress after which the entry's process counts as hung."""
    return serving(spec).step_limit_s or ENGINES[spec.engine or ""].step_limit_s


def slots(spec: ModelSpec) -> int:
    """Return the entry's ``concurrency`` or, without it, the jobs of this model in a step."""
    options = serving(spec)
    return options.concurrency or options.slots or default_slots(spec)


def default_slots(spec: ModelSpec) -> int:
    """Return the jobs of an entry in a step if its options do not say."""
    if spec.engine == "diffusion" and spec.task.endswith("-to-video"):
        return VIDEO_SLOTS
    return ENGINES[spec.engine or ""].slots


def create(spec: ModelSpec) -> Engine:
    """Create the engine of an entry, without loading it.

    Raise ``ValueError`` if an option is invalid, or the checkpoint does not exist.
    """
    if spec.checkpoint is not None and not Path(spec.checkpoint).exists():
        raise ValueError(
            f"{spec.checkpoint} does not exist; `checkpoint` is a directory, relative to the "
            "catalog's. Nothing is downloaded: fetch a model of a hub first, such as by "
            "`hf download OWNER/NAME --local-dir DIRECTORY`"
        )
    entry = ENGINES[spec.engine or ""]
    if "torch" in entry.packages:
        importlib.import_module("workers.engines.devices").select(spec.options.get("device"))
    factory = getattr(importlib.import_module(entry.module), entry.factory)
    return cast(Callable[[ModelSpec], Engine], factory)(spec)
