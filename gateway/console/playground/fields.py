"""The fields of a task's form, from what the model accepts, and the input that they make. Pure.

Names are those of the API. What a vendor's model has beyond them is sent under ``parameters``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, cast

from pydantic import TypeAdapter, ValidationError

from gateway.catalog.market.contract import SOURCES, Parameter, contract_of
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, Task
from gateway.errors import InvalidRequest
from gateway.tasks.registry import schema_of

FieldKind: TypeAlias = Literal["line", "text", "number", "choice", "file"]
ValueType: TypeAlias = Literal["text", "integer", "number", "boolean"]
MESSAGE: Final = "message"
"""The newest message of a conversation."""
ACCEPTED: Final[Mapping[str, str]] = {
    "image": "image/*",
    "images": "image/*",
    "mask": "image/*",
    "video": "video/*",
    "audio": "audio/*",
    "recording": "audio/*",
}
_LABELS: Final[Mapping[str, str]] = {
    "max_tokens": "At most, tokens",
    "n": "How many",
    "fps": "Frames per second",
    "seconds": "Length, s",
    "input": "Texts, one a line",
    "image": "Picture",
    "images": "Pictures",
}
_PIXELS: Final = re.compile(r"\d+x\d+|auto")
"""Sizes that the API takes; other names of sizes are a vendor's."""
_LONG: Final = ("prompt", "text", "lyrics", "negative_prompt", "instructions", "transcript")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a form; ``default`` is what the model takes if it is left empty."""

    name: str
    kind: FieldKind
    label: str
    hint: str = ""
    options: Sequence[str] = ()
    default: str = ""
    least: float | None = None
    most: float | None = None
    type: ValueType = "text"
    required: bool = False
    many: bool = False
    accepts: str = ""
    aside: bool = False
    """Whether it is among the further settings, which most people leave as they are."""
    theirs: bool = False
    """Whether it is sent under ``parameters``, because the API has no field for it."""


def fields_of(entry: CatalogEntry, task: Task) -> list[Field]:
    """Return the fields of a model's form for one of its tasks."""
    if entry.workflow is not None:
        return list(_of_workflow(entry))
    contract = contract_of(entry)
    if contract is not None:
        found = [_of_parameter(each, task) for each in contract.parameters]
        # A file can be attached only where the API has a field for it.
        return [each for each in found if each.kind != "file" or not each.theirs]
    if task == "text-generation":
        return _chat(entry)
    if task == "text-embedding":
        return [_field("input", "text", required=True)]
    makes = TASKS[task].makes
    return list(
        _pictures(entry, task)
        if makes in ("image", "video") and task != "talking-head"
        else _sounds(entry, task)
    )


def read_input(fields: Sequence[Field], task: Task, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input of ``POST /v1/requests``. ``given`` has texts, and lists of sources for
    files. Raise ``InvalidRequest`` if a number is none."""
    made: dict[str, Any] = {}
    for field in fields:
        value = _value(field, given.get(field.name))
        if value is None:
            continue
        if field.theirs or (field.name == "size" and not _PIXELS.fullmatch(value)):
            made.setdefault("parameters", {})[field.name] = value
        elif field.kind != "file" or len(value) > 1:
            made[field.name] = value
        else:
            made["image" if field.name == "images" else field.name] = value[0]
    return _with_lines(made) if task == "text-embedding" else made


def _value(field: Field, given: Any) -> Any:
    """Return a field's value as the API takes it; None if it was left empty."""
    if field.kind == "file":
        return given or None
    text = str(given or "").strip()
    if not text:
        return None
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


def _with_lines(made: dict[str, Any]) -> dict[str, Any]:
    lines = [line for line in made.get("input", "").splitlines() if line.strip()]
    return {**made, "input": lines}


def _field(name: str, kind: FieldKind, **more: Any) -> Field:
    label = _LABELS.get(name, name.replace("_", " ").capitalize())
    if kind == "file":
        more = {"accepts": ACCEPTED.get(name, ""), "many": name == "images", **more}
    return Field(name, kind, label, **more)


def _number(
    name: str, *, type: ValueType = "number", default: float | None = None, **more: Any
) -> Field:
    shown = "" if default is None else f"{default:g}"
    return _field(name, "number", type=type, default=shown, **more)


def _choice(name: str, options: Sequence[str], default: str | None = None, **more: Any) -> Field:
    return _field(name, "choice", options=tuple(options), default=default or "", **more)


def _chat(entry: CatalogEntry) -> list[Field]:
    default = entry.default_parameters
    return [
        _field("system", "text", aside=True, hint="How it should answer, before everything else."),
        _field(MESSAGE, "text", required=True),
        _number("temperature", least=0, most=2, default=default.temperature, aside=True),
        _number("max_tokens", type="integer", least=1, most=entry.limits.output_tokens, aside=True),
        _number("seed", type="integer", least=0, aside=True),
    ]


def _pictures(entry: CatalogEntry, task: Task) -> Iterator[Field]:
    reads, limits, default = TASKS[task].reads, entry.limits, entry.default_parameters
    makes_video = TASKS[task].makes == "video"
    if "text" in reads:
        yield _field("prompt", "text", required=reads == ("text",))
    if "image" in reads:
        several = TASKS[task].images_min > 1
        yield _field("images" if several else "image", "file", required=True)
    if "video" in reads:
        yield _field("video", "file", required=True)
    if task == "image-edit":
        yield _field("mask", "file", aside=True, hint="Transparent where it is to be changed.")
    if entry.sizes:
        yield _choice("size", entry.sizes, entry.sizes[0])
    if entry.resolutions:
        yield _choice("resolution", entry.resolutions)
    if entry.qualities:
        yield _choice("quality", tuple(entry.qualities), default.quality)
    if makes_video and limits.seconds and "text" in reads:
        yield _number("seconds", least=0.1, most=limits.seconds, default=default.seconds)
    if not makes_video and (limits.images or 1) > 1:
        yield _number("n", type="integer", least=1, most=limits.images, default=1)
    if task.endswith("-upscale"):
        yield _number("scale", type="integer", least=1, most=limits.scale or 8)
        return
    if "text" in reads:
        yield _field("negative_prompt", "text", aside=True, hint="What is not wanted.")
    if "image" in reads and not makes_video:
        yield _number("strength", least=0, most=1, default=default.strength, aside=True)
    yield _number(
        "steps", type="integer", least=1, most=limits.steps, default=default.steps, aside=True
    )
    yield _number("guidance", least=0, most=limits.guidance, default=default.guidance, aside=True)
    if entry.schedulers:
        yield _choice("scheduler", entry.schedulers, default.scheduler, aside=True)
    if makes_video and limits.fps:
        yield _number(
            "fps", type="integer", least=1, most=limits.fps, default=default.fps, aside=True
        )
    yield _number("seed", type="integer", least=0, hint="Empty: a new one each time.", aside=True)


def _sounds(entry: CatalogEntry, task: Task) -> Iterator[Field]:
    limits = entry.limits
    if task == "talking-head":
        yield _field("image", "file", required=True, hint="A portrait.")
        yield _field("audio", "file", required=entry.upstream is None, hint="What it says.")
        if entry.upstream is not None:
            yield _field("text", "text")
        return
    if task == "text-to-music":
        yield _field("prompt", "text")
        yield _field("lyrics", "text", aside=True)
        yield _field("mood", "line")
        yield _field("key", "line", hint="Such as C major.")
        yield _number("tempo", least=20, most=400)
        yield _number("seconds", least=0.1, most=limits.seconds)
    else:
        yield _field("text", "text", required=True)
        if entry.known_voices and task != "voice-clone":
            yield _choice("voice", entry.known_voices)
        if len(entry.known_languages) > 1:
            yield _choice("language", entry.known_languages)
        yield _number("speed", least=0.25, most=4, default=1, aside=True)
    if task == "voice-clone":
        yield _field("recording", "file", required=True, hint="The voice, 10 to 30 s.")
        yield _field("transcript", "text", hint="What the recording says.")
    yield _number("seed", type="integer", least=0, aside=True)


def _of_workflow(entry: CatalogEntry) -> Iterator[Field]:
    assert entry.workflow is not None
    for name, each in entry.workflow.inputs.items():
        kind: FieldKind = "file"
        if each.type == "text":
            kind = "text" if name in _LONG else "line"
        accepts = f"{each.type}/*" if kind == "file" else ""
        field = _field(
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
    field = _field(
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
