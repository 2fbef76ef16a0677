"""What ``tollgate try`` tries: a catalog entry that runs here, or a checkpoint directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from gateway.catalog.schema import Catalog, CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.commands.planning.proposal import picture_limits, reads_pictures
from gateway.plan.shapes import Shape
from gateway.plan.subjects import Subject, find_subject
from gateway.tasks.registry import parse, prepare
from workers.contract.models import ModelSpec, read_specs

CONTEXT: Final = 4096
"""Default context of a directory, in tokens, if its model supports as many."""
_PROMPTS: Final = Path(__file__).with_name("trial_prompts.yaml")
TRIED_TASKS: Final = (
    *("text-generation", "text-to-image", "text-to-video"),
    *("text-to-speech", "text-to-music"),
)
"""Tasks whose input is a text, or a text with pictures."""
_SEED: Final = 1
_PICTURE: Final = "data:image/png;base64,"
"""Stands for a picture, which the process gets as an attachment."""


@dataclass(frozen=True, slots=True)
class TrialSubject:
    """A model to be tried. ``reference`` is its precision now."""

    name: str
    task: Task
    spec: ModelSpec
    entry: CatalogEntry
    reference: str

    def inputs(
        self, prompts: Sequence[str], output_tokens: int, pictures: int = 0
    ) -> tuple[dict[str, Any], ...]:
        """Return the inputs of jobs, each with this number of pictures as attachments.

        Raise ``InvalidRequest`` if the entry refuses one.
        """
        if pictures and self.task != "text-generation":
            raise ValueError(f"{self.name} does {self.task}, which reads no pictures")
        most = self.entry.limits.output_tokens or output_tokens
        bodies = [
            self._body(text, number, min(output_tokens, most), pictures)
            for number, text in enumerate(prompts or self._own_prompts())
        ]
        return tuple(
            prepare(self.entry, parse(self.task, body), task=self.task).input for body in bodies
        )

    def _own_prompts(self) -> list[str]:
        """Return the texts of the entry's examples, or usual ones."""
        found = [example.get("prompt") or example.get("text") for example in self.entry.examples]
        usual = yaml.safe_load(_PROMPTS.read_text(encoding="utf-8"))[TASKS[self.task].makes]
        return [text for text in found if isinstance(text, str)] or usual

    def _body(self, text: str, number: int, output_tokens: int, pictures: int) -> dict[str, Any]:
        match self.task:
            case "text-generation":
                content: Any = text
                if pictures:
                    shown = {"type": "image_url", "image_url": {"url": _PICTURE}}
                    content = [*[shown] * pictures, {"type": "text", "text": text}]
                given = (
                    {"messages": [{"role": "user", "content": content}]}
                    if _has_template(Path(self.spec.checkpoint or ""))
                    else {"prompt": text}
                )
                return {**given, "max_tokens": output_tokens, "temperature": 0, "seed": _SEED}
            case "text-to-speech":
                voices = self.entry.known_voices
                return {"text": text, "seed": _SEED, **({"voice": voices[0]} if voices else {})}
        return {"prompt": text, "seed": _SEED + number}


def find_trial_subject(
    name: str, catalog: Catalog | None, path: Path, *, context: int | None, device: str | None
) -> TrialSubject:
    """Find an entry or a directory. Raise ``LookupError`` or ``ValueError`` if it cannot be tried.

    ``path`` is the catalog's file. ``context`` and ``device`` replace those of the entry.
    """
    entries = () if catalog is None else catalog.models
    entry = next((one for one in entries if one.name == name), None)
    if entry is not None:
        _check(entry)
        spec = next(spec for spec in read_specs(path) if spec.name == name)
    elif Path(name).is_dir():
        subject = find_subject(name, (), root=Path(), directories=True)
        entry, spec = _from_directory(subject, Path(name).resolve(), context)
    else:
        raise LookupError(f"{name!r} is neither in the catalog nor a directory")
    limits = {**spec.limits, "context_tokens": context} if context else spec.limits
    options = {**spec.options, "device": device} if device else spec.options
    spec = msgspec.structs.replace(spec, limits=limits, options=options)
    reference = str(spec.options.get("dtype") or "float32")
    return TrialSubject(name, entry.task, spec, entry, reference)


def _check(entry: CatalogEntry) -> None:
    if entry.workflow is not None:
        models = ", ".join(step.model for step in entry.workflow.steps)
        raise ValueError(f"{entry.name} is a workflow; try its steps instead: {models}")
    if entry.upstream is not None:
        raise ValueError(f"{entry.name} runs at an upstream, which chooses its precision")
    if entry.checkpoint is None:
        raise ValueError(f"{entry.name} has no weights, and so no precision")
    _check_task(entry.name, entry.task)


def _check_task(name: str, task: Task) -> None:
    if task not in TRIED_TASKS:
        raise ValueError(
            f"{name} does {task}; tried are models whose input is a text alone: "
            f"{', '.join(TRIED_TASKS)}; for its size, and figures measured here: "
            f"tollgate plan {name}"
        )


def _from_directory(
    subject: Subject, path: Path, context: int | None
) -> tuple[CatalogEntry, ModelSpec]:
    """Write an entry for a directory. Its price, which an entry needs, is not shown."""
    model, task = subject.model, subject.task
    _check_task(subject.name, task)
    engine = "diffusion"
    if isinstance(model, Shape):
        engine = "llm"
    elif TASKS[task].makes == "audio":
        engine = "speech"
    limits: dict[str, Any] = {}
    more: dict[str, Any] = {}
    precision = model.precision or "bfloat16"
    if isinstance(model, Shape):
        bound = context or min(CONTEXT, model.context or CONTEXT)
        limits = {"context_tokens": bound, "output_tokens": bound}
        if task == "text-generation" and reads_pictures(path):
            limits |= picture_limits(bound)
            more["input"] = ["text", "image"]
        if model.packed_bits == 4:
            precision = "int4"
    entry = CatalogEntry.model_validate(
        {
            "name": "trial",
            "task": task,
            "engine": engine,
            "checkpoint": str(path),
            "options": {"dtype": precision},
            "limits": limits,
            **more,
            "price": [{"unit": "request", "amount": "1"}],
        }
    )
    spec = ModelSpec(entry.name, task, engine, str(path), dict(entry.options), limits=limits)
    return entry, spec


def _has_template(path: Path) -> bool:
    """Whether a checkpoint has a chat template; one without continues texts."""
    if (path / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((path / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))
