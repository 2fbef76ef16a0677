"""The fields of a task's form, from what the model accepts, and the input that they make. Pure.

Names are those of the API. What a vendor's model has beyond them is sent under ``parameters``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from pydantic import TypeAdapter, ValidationError

from gateway.catalog.market.contract import SOURCES, Parameter, contract_of
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.console.playground.chat import STOP, chat_fields, completion_fields
from gateway.console.playground.parts import (
    COMPLETION,
    Field,
    FieldKind,
    FormName,
    ValueType,
    make_choice,
    make_field,
    make_number,
    task_of,
)
from gateway.errors import InvalidRequest
from gateway.tasks.registry import schema_of

SAYS: Final = (
    "What it says; or write a text below.",
    "What it says. To have a text spoken, order it under Speech, and take the sound on from there.",
)
_PIXELS: Final = re.compile(r"\d+x\d+|auto")
"""Sizes that the API takes; other names of sizes are a vendor's."""
FORMATS: Final = ("mp3", "wav", "opus", "flac", "aac")
"""Formats of sound that browsers play."""
LINES: Final = frozenset({"input", "documents", STOP})
"""Lists of texts, which a form has as lines."""
_LONG: Final = ("prompt", "text", "lyrics", "negative_prompt", "instructions", "transcript")


def forms_of(entry: CatalogEntry) -> tuple[FormName, ...]:
    """Return the forms of a model: of its tasks, and of a text to continue if it writes texts."""
    tasks = (entry.task, *entry.also)
    dialect = entry.upstream.dialect if entry.upstream is not None else "openai"
    continues = entry.task == "text-generation" and entry.workflow is None and dialect == "openai"
    return (*tasks, COMPLETION) if continues else tasks


def fields_of(entry: CatalogEntry, form: FormName) -> list[Field]:
    """Return the fields of one of a model's forms."""
    task = task_of(form)
    if entry.workflow is not None:
        return list(_of_workflow(entry))
    contract = contract_of(entry)
    if contract is not None:
        found = [_of_parameter(each, task) for each in contract.parameters]
        # A file can be attached only where the API has a field for it.
        return [each for each in found if each.kind != "file" or not each.theirs]
    if form == COMPLETION:
        return list(completion_fields(entry))
    if task == "text-generation":
        return list(chat_fields(entry))
    if task == "text-embedding":
        most = entry.limits.dimensions
        return [
            make_field("input", "text", required=True),
            make_number("dimensions", type="integer", least=1, most=most, aside=True),
        ]
    if task == "rerank":
        return [
            make_field("query", "line", required=True),
            make_field("documents", "text", required=True),
            make_number("top_n", type="integer", least=1, most=entry.limits.inputs, aside=True),
        ]
    if task == "speech-to-text":
        return list(_recordings(entry))
    makes = TASKS[task].makes
    return list(
        _pictures(entry, task)
        if makes in ("image", "video") and task != "talking-head"
        else _sounds(entry, task)
    )


def read_input(fields: Sequence[Field], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input of ``POST /v1/requests``. ``given`` has texts, and lists of sources for
    files. Raise ``InvalidRequest`` if a number is none."""
    made: dict[str, Any] = {}
    for field in fields:
        value = _value(field, given.get(field.name))
        if value is None:
            continue
        if field.theirs or (field.name == "size" and not _PIXELS.fullmatch(value)):
            made.setdefault("parameters", {})[field.name] = value
        elif field.name in LINES and field.kind == "text":
            made[field.name] = [line for line in value.splitlines() if line.strip()]
        elif field.kind != "file" or len(value) > 1:
            made[field.name] = value
        else:
            made["image" if field.name == "images" else field.name] = value[0]
    return made


def _value(field: Field, given: Any) -> Any:
    """Return a field's value as the API takes it; None if it was left empty."""
    if field.kind == "file":
        return given or None
    # Browsers end lines with two characters. Spaces at the ends of a text belong to it.
    whole = str(given or "").replace("\r\n", "\n")
    text = whole.strip()
    if not text:
        return None
    if field.kind == "text":
        return whole
    try:
        return _READ[field.type](text)
    except (ValueError, KeyError):
        wanted = "a whole number" if field.type == "integer" else f"a {field.type}"
        raise InvalidRequest(
            "invalid_value", f"{field.label}: {text!r} is not {wanted}.", param=field.name
        ) from None


_READ: Final[Mapping[ValueType, Callable[[str], Any]]] = {
    "text": str,
    "integer": int,
    "number": float,
    "boolean": {"true": True, "false": False}.__getitem__,
}


def _pictures(entry: CatalogEntry, task: Task) -> Iterator[Field]:
    reads, limits, default = TASKS[task].reads, entry.limits, entry.default_parameters
    makes_video = TASKS[task].makes == "video"
    if "text" in reads:
        yield make_field("prompt", "text", required=reads == ("text",))
    if "image" in reads:
        several = TASKS[task].images_min > 1
        yield make_field("images" if several else "image", "file", required=True)
    if "video" in reads:
        yield make_field("video", "file", required=True)
    if task == "image-edit":
        yield make_field("mask", "file", hint="Transparent where it is to be changed.")
    if not makes_video:
        yield from _guides(entry)
    if entry.sizes:
        yield make_choice("size", entry.sizes, entry.sizes[0])
    elif limits.side and "text" in reads:
        yield make_field("size", "line", hint=f"Such as 512x512; at most {limits.side} a side.")
    if entry.resolutions:
        yield make_choice("resolution", entry.resolutions)
    if entry.qualities:
        yield make_choice("quality", tuple(entry.qualities), default.quality)
    if makes_video and limits.seconds and "text" in reads:
        yield make_number("seconds", least=0.1, most=limits.seconds, default=default.seconds)
    if not makes_video and (limits.images or 1) > 1:
        yield make_number("n", type="integer", least=1, most=limits.images, default=1)
    if task.endswith("-upscale"):
        yield make_number("scale", type="integer", least=1, most=limits.scale or 8)
        return
    if (limits.scale or 1) > 1:
        yield make_number(
            "scale",
            type="integer",
            least=1,
            most=limits.scale,
            default=1,
            aside=True,
            hint="How many times larger than it is drawn.",
        )
    if "text" in reads:
        yield make_field("negative_prompt", "text", aside=True, hint="What is not wanted.")
    if "image" in reads and not makes_video:
        yield make_number("strength", least=0, most=1, default=default.strength, aside=True)
    yield make_number(
        "steps", type="integer", least=1, most=limits.steps, default=default.steps, aside=True
    )
    yield make_number(
        "guidance", least=0, most=limits.guidance, default=default.guidance, aside=True
    )
    if entry.schedulers:
        yield make_choice("scheduler", entry.schedulers, default.scheduler, aside=True)
    if makes_video and limits.fps:
        yield make_number(
            "fps", type="integer", least=1, most=limits.fps, default=default.fps, aside=True
        )
    yield make_number(
        "seed", type="integer", least=0, hint="Empty: a new one each time.", aside=True
    )


def _guides(entry: CatalogEntry) -> Iterator[Field]:
    """Fields of pictures that guide an image beside its prompt."""
    if controls := entry.known_controls:
        yield make_field("control_image", "file", hint="Its outlines, depth or pose are kept.")
        if len(controls) > 1:
            yield make_choice("control", tuple(controls), hint="What is read from the picture.")
        most = max(one.strength_max for one in controls.values())
        default = next(iter(controls.values())).strength if len(controls) == 1 else None
        yield make_number("control_strength", least=0, most=most, default=default, aside=True)
    if (reference := entry.known_references.get("image")) is not None:
        yield make_field("reference_image", "file", hint="Its subject and style are taken up.")
        yield make_number(
            "reference_strength",
            least=0,
            most=reference.strength_max,
            default=reference.strength,
            aside=True,
        )


def _sounds(entry: CatalogEntry, task: Task) -> Iterator[Field]:
    limits = entry.limits
    if task == "talking-head":
        yield make_field("image", "file", required=True, hint="A portrait.")
        yield make_field(
            "audio", "file", required=entry.upstream is None, hint=SAYS[entry.upstream is None]
        )
        if entry.upstream is not None:
            yield make_field("text", "text")
        return
    if task == "text-to-music":
        yield make_field("prompt", "text", required=True)
        yield make_field("lyrics", "text", aside=True)
        yield make_field("mood", "line")
        yield make_field("key", "line", hint="Such as C major.")
        yield make_number("tempo", least=20, most=400)
        yield make_number("seconds", least=0.1, most=limits.seconds)
    else:
        yield make_field("text", "text", required=True)
        if task == "voice-clone":
            yield make_choice("voice", (), hint="A stored voice, or the recording below.")
        elif entry.known_voices:
            yield make_choice("voice", entry.known_voices)
        if len(entry.known_languages) > 1:
            yield make_choice("language", entry.known_languages)
        yield make_number("speed", least=0.25, most=4, default=1, aside=True)
        if entry.upstream is not None:
            yield make_field(
                "instructions", "text", aside=True, hint="How it is to be spoken, such as: warmly."
            )
    if task == "voice-clone":
        yield make_field("recording", "file", hint="The voice, 10 to 30 s.")
        yield make_field("transcript", "text", hint="What the recording says.")
    yield make_choice("format", FORMATS, aside=True)
    yield make_number("seed", type="integer", least=0, aside=True)


def _recordings(entry: CatalogEntry) -> Iterator[Field]:
    """Yield the fields of a transcription."""
    hint = f"At most {entry.limits.seconds:g} s." if entry.limits.seconds else ""
    yield make_field("audio", "file", required=True, hint=hint)
    if len(entry.known_languages) > 1:
        yield make_choice("language", entry.known_languages)
    else:
        yield make_field("language", "line", hint="Such as en; empty: detected.")
    yield make_choice("timestamps", ("segment", "word"))
    yield replace(make_choice("translate", ("true", "false"), "false"), type="boolean")
    yield make_field("prompt", "text", aside=True, hint="Names that occur in the recording.")
    yield make_number("temperature", least=0, most=1, default=0, aside=True)


def _of_workflow(entry: CatalogEntry) -> Iterator[Field]:
    assert entry.workflow is not None
    for name, each in entry.workflow.inputs.items():
        kind: FieldKind = "file"
        if each.type == "text":
            kind = "text" if name in _LONG else "line"
        accepts = f"{each.type}/*" if kind == "file" else ""
        field = make_field(
            name,
            kind,
            required=each.required,
            default=each.default or "",
            hint=each.description,
        )
        yield replace(field, accepts=accepts, many=False)


def _of_parameter(parameter: Parameter, task: Task) -> Field:
    """Return the field of a parameter of a vendor's model."""
    name, kind = parameter.name, parameter.type
    field = make_field(
        name,
        "line",
        required=parameter.required and parameter.default is None and not parameter.unless,
        hint=parameter.description or "",
        default="" if parameter.default is None else str(parameter.default),
        least=parameter.min,
        most=parameter.max,
        theirs=not _is_ours(parameter, task),
    )
    if kind in SOURCES:
        accepts = f"{kind.removesuffix('s')}/*"
        many = kind == "images" and (parameter.max or 2) > 1
        return replace(field, kind="file", accepts=accepts, many=many, default="")
    aside = not field.required and name not in ("prompt", "text", "size", "seconds", "voice")
    if kind in ("integer", "number", "boolean"):
        field = replace(field, kind="number", type=cast("ValueType", kind))
    if name == "seed":
        # Vendors write -1 for a new one each time; here the field is left empty.
        return replace(field, least=0, default="", aside=aside)
    if kind == "boolean":
        return replace(field, kind="choice", options=("true", "false"), aside=aside)
    if parameter.options:
        options = tuple(map(str, parameter.options))
        return replace(field, kind="choice", options=options, aside=aside)
    return replace(field, kind="text" if name in _LONG else field.kind, aside=aside)


def _is_ours(parameter: Parameter, task: Task) -> bool:
    """Whether the API has a field for a parameter, and takes its values."""
    known = schema_of(task, {}).model_fields
    if parameter.name == "images":
        return bool({"image", "images"} & known.keys())
    if parameter.name not in known:
        return False
    # Sizes are told apart one by one.
    options = parameter.options if parameter.name != "size" else ()
    adapter: TypeAdapter[Any] = TypeAdapter(known[parameter.name].rebuild_annotation())
    try:
        for option in options:
            adapter.validate_python(option)
    except ValidationError:
        return False
    return True
