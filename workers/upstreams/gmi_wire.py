"""The wire format of GMI Cloud's request queue: payloads and records. Pure.

Payloads have no common schema: every model names its own fields. The options of a catalog entry
state the names that its model uses; the defaults are the names that most models of the task use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import msgspec

from workers.contract.jobs import Job
from workers.contract.languages import name_of
from workers.contract.media import MediumKind
from workers.contract.models import ModelSpec

PREFIX: Final = "/api/v1/ie/requestqueue/apikey"
SEED_MAX: Final = 2**31
"""Exclusive upper limit of seeds that the upstream's models accept."""
MESSAGE_CHARS_MAX: Final = 300
"""Maximum length of an upstream's message that is passed on."""

OUTPUT_KINDS: Final[Mapping[str, MediumKind]] = {
    "text-to-image": "image",
    "image-to-image": "image",
    "image-edit": "image",
    "image-relight": "image",
    "image-restyle": "image",
    "image-blend": "image",
    "text-to-video": "video",
    "image-to-video": "video",
    "video-upscale": "video",
    "talking-head": "video",
    "text-to-speech": "audio",
    "voice-clone": "audio",
    "text-to-music": "audio",
}
"""Kind of output by supported task."""

SizeStyle: TypeAlias = Literal["size", "aspect_ratio", "width_height", "none"]
_SIZES: Final[Mapping[MediumKind, SizeStyle]] = {
    "image": "size",
    "video": "aspect_ratio",
    "audio": "none",
}
_RATIOS: Final = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16), (21, 9), (9, 21))
_FIELDS: Final[Mapping[str, str]] = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "text": "text",
    "voice": "voice",
    "voice_id": "voice_id",
    "language": "language",
    "speed": "speed",
    "instructions": "instructions",
    "transcript": "transcript",
    "format": "format",
    "sample_rate": "sample_rate",
    "bitrate": "bitrate",
    "lyrics": "lyrics",
    "key": "key",
    "tempo": "tempo",
    "mood": "mood",
    "n": "n",
    "steps": "steps",
    "guidance": "guidance",
    "strength": "strength",
    "scheduler": "scheduler",
    "seed": "seed",
    "quality": "quality",
    "fps": "fps",
    "seconds": "duration",
    "size": "size",
    "aspect_ratio": "aspect_ratio",
    "resolution": "resolution",
}
"""Default field name of the upstream, by our name."""
_NOT_FORWARDED: Final = frozenset(
    {"images", "mask", "video", "width", "height", "duration_ms", "format", "compression"}
    | {"previews", "parameters", "scale"}
)
"""Fields of images and videos that are not sent under their own name."""
_FREE_FORM_TASKS: Final = frozenset(
    {"talking-head", "text-to-speech", "voice-clone", "text-to-music"}
)
"""Tasks whose inputs are passed on unchanged, except for the fields above."""


_NO_WORD: Final = re.compile(r"[^A-Za-z0-9_]")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the catalog entry: the field names of its model."""

    images: str = "image"
    """Key of the source images, such as ``image``, ``images`` or ``image_url``."""
    list: bool | None = None
    """Whether a single source image is sent as a list, too. Default: true if the output is an
    image."""
    mask: str = "mask"
    video: str = "video"
    audio: str = ""
    """Key of a recording. Default: ``source_audio`` for voice cloning, otherwise ``audio``."""
    size: SizeStyle | None = None
    """Format of a size. Default: ``size`` for images, ``aspect_ratio`` for videos."""
    language: Literal["tag", "name"] = "tag"
    """Whether a language is sent as a tag or, for MiniMax, as a name."""
    scale: str = "scale"
    """Key of the upscaling factor of a video."""
    fields: dict[str, str | None] = {}
    """Field names by our names, such as ``{seconds: length}``; null omits a field."""
    strings: tuple[str, ...] = ()
    """Names of numbers, ours or the model's, that the model takes as strings."""
    values: dict[str, dict[str, str]] = {}
    """The model's values by our names and values, such as ``{format: {mp3: MP3}}``."""
    constants: dict[str, Any] = {}
    """Default fields of every payload."""
    request_id: str = ""
    """Key that is sent the id of our request, unless the client sets it, to name a new voice."""
    submit_timeout_s: float = 300.0
    """Timeout of a submission; some models respond only when they have finished."""
    queued_timeout_s: float = 900.0
    """Time after which a request is given up that no model has started on: ids of retired models
    can be accepted and stay queued. Such requests were seen not to be charged."""
    poll_min_s: float = 0.5
    poll_max_s: float = 10.0


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is invalid."""
    if spec.task not in OUTPUT_KINDS:
        raise ValueError(
            f"the dialect 'gmi' does not support {spec.task!r}; "
            f"it supports {', '.join(OUTPUT_KINDS)}"
        )
    try:
        options = msgspec.convert(spec.options, Options)
    except msgspec.ValidationError as error:
        raise ValueError(f"invalid options: {error}") from error
    unknown = options.fields.keys() - _FIELDS.keys()
    if unknown:
        raise ValueError(
            f"invalid options: unknown field {min(unknown)!r}; "
            f"known fields are {', '.join(_FIELDS)}"
        )
    if not 0 < options.poll_min_s <= options.poll_max_s:
        raise ValueError("invalid options: poll_min_s must be above 0 and at most poll_max_s")
    return options


# --- Payload -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sources:
    """URLs of the attachments."""

    images: list[str] = field(default_factory=list)
    mask: str | None = None
    video: str | None = None
    audio: str | None = None


def sort_sources(job: Job, addresses: Sequence[str]) -> Sources:
    """Assign the attachments of a job to their roles, by type and order."""
    sources = Sources()
    for ref, address in zip(job.attachments, addresses, strict=True):
        kind = ref.content_type.partition("/")[0]
        if kind == "image":
            sources.images.append(address)
        elif kind == "video":
            sources.video = address
        else:
            sources.audio = address
    if job.input.get("mask") and sources.images:
        sources.mask = sources.images.pop()
    return sources


def payload(job: Job, options: Options, sources: Sources) -> dict[str, Any]:
    """Return the payload of a job. The client's ``parameters`` override only ``constants``."""
    given, output_kind = job.input, OUTPUT_KINDS[job.task]
    body: dict[str, Any] = dict(options.constants)
    if options.request_id:
        body[options.request_id] = _NO_WORD.sub("_", job.request_id)
    for name, value in (given.get("parameters") or {}).items():
        body[options.fields.get(name) or name] = value
    hidden = (
        frozenset({"parameters", "duration_ms"}) if job.task in _FREE_FORM_TASKS else _NOT_FORWARDED
    )
    for name, value in _values(given, hidden).items():
        if name == "language" and options.language == "name":
            value = name_of(value) or value
        if name in options.values:
            value = options.values[name].get(value, value)
        theirs = options.fields.get(name, _FIELDS.get(name, name))
        if theirs is not None:
            body[theirs] = value
    body |= {
        options.fields.get(name) or name: value
        for name, value in _size(given, options.size or _SIZES[output_kind]).items()
    }
    if given.get("scale") and job.task == "video-upscale":
        body[options.scale] = given["scale"]
    as_list = options.list if options.list is not None else output_kind == "image"
    if sources.images:
        several = as_list or len(sources.images) > 1
        body[options.images] = sources.images if several else sources.images[0]
    if sources.mask is not None:
        body[options.mask] = sources.mask
    if sources.video is not None:
        body[options.video] = sources.video
    if sources.audio is not None:
        body[options.audio or ("source_audio" if job.task == "voice-clone" else "audio")] = (
            sources.audio
        )
    for name in options.strings:
        theirs = options.fields.get(name) or _FIELDS.get(name, name)
        if isinstance(number := body.get(theirs), int | float):
            body[theirs] = f"{number:.15g}"
    return body


def _values(given: Mapping[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
    """Return the given fields under our names. Unknown ones are passed on unchanged."""
    values = {
        name: value
        for name, value in given.items()
        if name not in hidden
        and value is not None
        and value != ""
        # Implied by the attachment; any other value of this name is passed on.
        and not (name == "recording" and value is True)
    }
    if given.get("duration_ms"):
        values["seconds"] = given["duration_ms"] / 1000
    if "seconds" in values and float(values["seconds"]).is_integer():
        values["seconds"] = int(values["seconds"])
    if isinstance(values.get("seed"), int):
        values["seed"] %= SEED_MAX
    if values.get("n") == 1:
        del values["n"]
    return values


def _size(given: Mapping[str, Any], style: SizeStyle) -> dict[str, Any]:
    width, height = given.get("width"), given.get("height")
    if not (width and height) or style == "none":
        return {}
    if style == "width_height":
        return {"width": width, "height": height}
    if style == "size":
        return {"size": f"{width}x{height}"}
    wide, high = min(_RATIOS, key=lambda ratio: abs(math.log(ratio[0] / ratio[1] * height / width)))
    return {"aspect_ratio": f"{wide}:{high}"}


# --- Records -------------------------------------------------------------------------------------

_STAGES: Final = ("created", "queued", "dispatched", "processing")
_WAITING: Final = ("", "created", "queued")
_ENDS: Final[Mapping[str, Literal["success", "failed", "cancelled"]]] = {
    "success": "success",
    "succeeded": "success",
    "completed": "success",
    "failed": "failed",
    "cancelled": "cancelled",
    "canceled": "cancelled",
}
_COMPLAINTS: Final = ("error", "error_message", "message", "reason", "fail_reason")
_VENDOR_STATUS: Final = re.compile(r"backend error \((4\d\d)\)", re.IGNORECASE)
_RATE_LIMIT: Final = re.compile(r"rate limit|too many requests", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Record:
    """A request at the upstream."""

    request_id: str = ""
    status: str = ""
    outcome: Mapping[str, Any] = field(default_factory=dict)
    value: Mapping[str, Any] = field(default_factory=dict)
    """The whole record."""

    @property
    def end(self) -> Literal["success", "failed", "cancelled"] | None:
        """Final status; None while it is running."""
        return _ENDS.get(self.status.lower())

    @property
    def is_waiting(self) -> bool:
        """Whether no model has started on it."""
        return self.status.lower() in _WAITING

    @property
    def stage(self) -> tuple[int, int] | None:
        """Number of the stage and of all stages; None for an unknown status."""
        status = self.status.lower()
        return (_STAGES.index(status), len(_STAGES)) if status in _STAGES else None

    @property
    def error_message(self) -> str:
        """The upstream's error message, or an empty string."""
        own = {name: one for name, one in self.value.items() if name != "outcome"}
        return (
            _message_of(self.outcome.get("error"))
            or _message_of(own)
            or _message_of({name: self.outcome.get(name) for name in _COMPLAINTS})
        )


class Upload(msgspec.Struct, frozen=True):
    upload_url: str
    public_url: str


_upload_decoder = msgspec.json.Decoder(Upload)


def decode_record(body: bytes) -> Record:
    """Read a record whatever the types of its fields are: it can be of a request that is paid for.

    Raise ``msgspec.DecodeError`` if it is not a JSON object.
    """
    value = msgspec.json.decode(body)
    if not isinstance(value, dict):
        raise msgspec.DecodeError("not an object")
    outcome = value.get("outcome")
    if isinstance(outcome, list):
        outcome = {"media_urls": outcome}
    elif isinstance(outcome, str) and outcome:
        outcome = {"url": outcome} if "://" in outcome else {"message": outcome}
    return Record(
        _text(value.get("request_id")),
        _text(value.get("status")),
        outcome if isinstance(outcome, dict) else {},
        value,
    )


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | int) else ""


def decode_upload(body: bytes) -> Upload:
    """Raise ``msgspec.DecodeError``."""
    return _upload_decoder.decode(body)


def read_error_message(body: bytes) -> str:
    """Return the message in an error's body, or an empty string."""
    try:
        return _message_of(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return ""


def vendor_status(message: str) -> int | None:
    """Return the status with which the vendor refused a request, such as 422 for ``Backend error
    (422)``: the queue wraps it in its own 500, or in a failed request."""
    found = _VENDOR_STATUS.search(message)
    return int(found[1]) if found else None


def is_rate_limit(message: str) -> bool:
    """Whether a request failed because too many were sent."""
    return vendor_status(message) == 429 or _RATE_LIMIT.search(message) is not None


def _message_of(error: Any) -> str:
    """Find a message in a nested error: ``{"error": "…"}``, ``{"error": {"message": "…"}}``."""
    for _ in range(4):
        if not isinstance(error, dict):
            break
        error = next((error[key] for key in (*_COMPLAINTS, "detail") if error.get(key)), "")
    return error.strip()[: 4 * MESSAGE_CHARS_MAX] if isinstance(error, str) else ""
