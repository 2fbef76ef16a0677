"""What a plan is for: a catalog entry, a well-known model, a directory, or given dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.plan.generators import Generator, find_generator, generators, read_generator
from gateway.plan.shapes import Shape, find_shape, read_checkpoint, read_config, shapes
from workers.contract.models import locate

DIMENSIONS: Final = ("params", "layers", "kv_heads", "head_dim")
PIPELINE_TASKS: Final[Mapping[str, Task]] = {
    "PocketVideoPipeline": "text-to-video",
    "WanPipeline": "text-to-video",
    "WanImageToVideoPipeline": "image-to-video",
    "LTXPipeline": "text-to-video",
    "LTX2Pipeline": "text-to-video",
    "CogVideoXPipeline": "text-to-video",
    "CogVideoXImageToVideoPipeline": "image-to-video",
    "HunyuanVideo15Pipeline": "text-to-video",
    "HunyuanVideo15ImageToVideoPipeline": "image-to-video",
    "MochiPipeline": "text-to-video",
    "StableDiffusionInpaintPipeline": "image-edit",
    "StableDiffusionXLInpaintPipeline": "image-edit",
    "StableDiffusionInstructPix2PixPipeline": "image-edit",
    "FluxFillPipeline": "image-edit",
    "FluxKontextPipeline": "image-edit",
    "QwenImageEditPipeline": "image-edit",
    "QwenImageEditPlusPipeline": "image-edit",
    "musicgen": "text-to-music",
    "csm": "text-to-speech",
    "bark": "text-to-speech",
    "dia": "text-to-speech",
    "vits": "text-to-speech",
    "speecht5": "text-to-speech",
    "fastspeech2_conformer": "text-to-speech",
    "fastspeech2_conformer_with_hifigan": "text-to-speech",
    "compact": "image-upscale",
    "tollgate-talking-1": "talking-head",
}
"""Tasks by pipeline or kind of checkpoint. Other pipelines make pictures, other kinds text."""
_TEXT: Final = ("text-generation", "text-embedding")
Model: TypeAlias = Shape | Generator


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to be planned, and its catalog entry if it has one."""

    name: str
    task: Task
    model: Model
    entry: CatalogEntry | None = None


def find_subject(
    name: str,
    entries: Sequence[CatalogEntry],
    *,
    root: Path,
    dimensions: Mapping[str, int | None] | None = None,
    directories: bool = False,
) -> Subject:
    """Find a model by name, or build it from its dimensions, which take precedence.

    ``root`` is the directory of the catalog; ``directories`` allows names of others. Raise
    ``LookupError`` if the model is unknown, ``ValueError`` if it cannot be planned.
    """
    entry = _find_entry(name, entries)
    given = {key: value for key, value in (dimensions or {}).items() if value is not None}
    if given:
        if missing := [key for key in DIMENSIONS if key not in given]:
            raise ValueError(f"to describe a model, {_named(missing)} is required as well")
        parameters, layers, kv_heads, head_dim = (given[key] for key in DIMENSIONS)
        shape = Shape(parameters, layers, kv_heads, head_dim)
        return Subject(name, "text-generation", shape, entry)
    if entry is not None:
        return Subject(name, entry.task, _of_entry(entry, root), entry)
    if (known := find_shape(name) or find_generator(name)) is not None:
        return Subject(name, _task(known), known)
    if directories and Path(name).is_dir():
        model = _read(Path(name))
        return Subject(name, _task(model), model)
    raise LookupError(
        f"{name!r} is neither in the catalog nor a directory; {_known()}"
        if directories
        else f"{name!r} is not in the catalog; {_known()}"
    )


def _find_entry(name: str, entries: Sequence[CatalogEntry]) -> CatalogEntry | None:
    """Find an entry by its name or an alias; the case matters only if it must."""
    for spelled in (str, str.lower):
        for entry in entries:
            if spelled(name) in map(spelled, (entry.name, *entry.aliases)):
                return entry
    return None


def _of_entry(entry: CatalogEntry, root: Path) -> Model:
    if entry.workflow is not None:
        models = ", ".join(step.model for step in entry.workflow.steps)
        raise ValueError(f"{entry.name} is a workflow; plan its steps instead: {models}")
    if entry.checkpoint is not None:
        path = locate(root, entry.checkpoint)
        return read_checkpoint(path) if entry.task in _TEXT else read_generator(path)
    named = entry.upstream.model if entry.upstream is not None else None
    for name in filter(None, (entry.name, named)):
        if found := find_shape(name) or find_generator(name):
            return found
    raise LookupError(f"{entry.name!r} is a model of unknown size; {_known()}")


def _read(path: Path) -> Model:
    if (path / "model_index.json").is_file():
        return read_generator(path)
    config = read_config(path / "config.json")
    kinds = (config.get("model_type"), config.get("architecture"))
    return (
        read_generator(path)
        if any(kind in PIPELINE_TASKS for kind in kinds)
        else read_checkpoint(path)
    )


def _task(model: Model) -> Task:
    if isinstance(model, Shape):
        return "text-generation"
    return model.task or PIPELINE_TASKS.get(model.pipeline, "text-to-image")


def _known() -> str:
    return (
        f"known models are {', '.join((*shapes(), *generators()))}; describe any other language "
        f"model by {_named(DIMENSIONS)}"
    )


def _named(dimensions: Sequence[str]) -> str:
    return ", ".join(name.replace("_", "-") for name in dimensions)
