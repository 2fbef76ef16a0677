"""Reads results of GMI Cloud's request queue. Pure.

Each vendor's model has its own shape of result, and a thumbnail can stand beside it, or be the same
file. So results are read by the names that were seen in use, never by the first URL found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from workers.contract.attempts import UNREAD_CHARS_MAX
from workers.contract.kinds import can_contain
from workers.contract.kinds import kind_of as type_before_slash
from workers.contract.media import MediumKind

SCALAR_CHARS_MAX: Final = 2000
SCALARS_MAX: Final = 32
KEPT_CHARS_MAX: Final = 4000
"""Length to which strings in a result are shortened that is kept because it cannot be read."""
REFUSAL_CHARS_MAX: Final = 300

_LISTS: Final = ("media_urls", "media", "medias")
_URLS: Final[Mapping[str, MediumKind]] = {
    "video_url": "video",
    "image_url": "image",
    "audio_url": "audio",
}
_BASE64: Final[Mapping[str, MediumKind]] = {
    "video_base64": "video",
    "image_base64": "image",
    "b64_json": "image",
    "audio_base64": "audio",
}
_BARE: Final[Mapping[str, MediumKind]] = {"video": "video", "image": "image", "audio": "audio"}
"""Names that can also be those of inputs, so they are read last."""
_THUMBNAILS: Final = ("thumbnail_image_url", "thumbnail_url")
_CONTAINERS: Final = ("data", "result", "output")
"""Names under which the result proper can lie, one level deeper."""
_DATA_URI: Final = re.compile(r"data:([a-z]+)/[^,]{0,200};base64,", re.IGNORECASE)
_ANIMATIONS: Final = ("image/gif", "image/webp")


@dataclass(frozen=True, slots=True)
class FoundMedium:
    """An output and its probable kind: a URL, or the file itself in base64."""

    kind: MediumKind
    url: str = ""
    data: str = ""
    is_thumbnail: bool = False


def find_media(outcome: Mapping[str, Any], output_kind: MediumKind) -> list[FoundMedium]:
    """Return the distinct outputs of a result, thumbnails last."""
    found: dict[tuple[str, str], FoundMedium] = {}
    for one in (*_outputs(outcome, output_kind), *_thumbnails(outcome)):
        found.setdefault((one.url, one.data), one)
    return sorted(found.values(), key=lambda one: one.is_thumbnail)


def _outputs(outcome: Mapping[str, Any], output_kind: MediumKind) -> list[FoundMedium]:
    """Return the outputs of the first shape that has any."""
    for read in (_listed, _named, _candidates, _inline):
        found = list(read(outcome, output_kind))
        if any(not one.is_thumbnail for one in found):
            return found
    for name in _CONTAINERS:
        inner = outcome.get(name)
        for one in inner if isinstance(inner, list) else (inner,):
            if isinstance(one, dict) and (found := _outputs(one, output_kind)):
                return found
    return []


def _listed(outcome: Mapping[str, Any], output_kind: MediumKind) -> Iterator[FoundMedium]:
    for name in _LISTS:
        listed = outcome.get(name)
        seen = False
        for entry in listed if isinstance(listed, list) else (listed,):
            for one in _entry(entry, output_kind):
                seen = True
                yield one
        if seen:
            return


def _entry(entry: Any, output_kind: MediumKind) -> Iterator[FoundMedium]:
    if isinstance(entry, str):
        yield from _medium(entry, output_kind)
    elif isinstance(entry, dict):
        role = str(entry.get("type") or entry.get("role") or "")
        if role.startswith("thumb") and isinstance(url := entry.get("url"), str) and url:
            yield FoundMedium("image", url, is_thumbnail=True)
        elif isinstance(url := entry.get("url"), str) and url:
            yield from _medium(url, output_kind)
        else:
            yield from _named(entry, output_kind)
            yield from _inline(entry, output_kind)


def _named(outcome: Mapping[str, Any], output_kind: MediumKind) -> Iterator[FoundMedium]:
    for name, kind in _URLS.items():
        value = outcome.get(name)
        for url in value if isinstance(value, list) else (value,):
            for one in _medium(url, kind):
                is_still = kind == "image" and output_kind == "video"
                yield FoundMedium(one.kind, one.url, one.data, is_thumbnail=is_still)
    if isinstance(url := outcome.get("url"), str):
        yield from _medium(url, output_kind)


def _candidates(outcome: Mapping[str, Any], output_kind: MediumKind) -> Iterator[FoundMedium]:
    """Yield the files in the parts of Gemini's candidates; other parts are texts."""
    for part in _parts(outcome):
        inline = part.get("inlineData") or part.get("inline_data")
        if isinstance(inline, dict) and isinstance(data := inline.get("data"), str) and data:
            kind = kind_of(str(inline.get("mimeType") or inline.get("mime_type") or "image/png"))
            yield FoundMedium(kind, data=data)


def _parts(outcome: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    candidates = outcome.get("candidates")
    for candidate in candidates if isinstance(candidates, list) else ():
        content = candidate.get("content") if isinstance(candidate, dict) else None
        parts = content.get("parts") if isinstance(content, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                yield part


def _inline(outcome: Mapping[str, Any], output_kind: MediumKind) -> Iterator[FoundMedium]:
    for name, kind in _BASE64.items():
        if isinstance(data := outcome.get(name), str) and data:
            yield FoundMedium(kind, data=_DATA_URI.sub("", data, count=1))
    for name, kind in _BARE.items():
        value = outcome.get(name)
        if kind != output_kind or not value:
            continue
        if isinstance(value, dict):
            yield from _entry(value, kind)
        elif isinstance(value, str) and ("://" in value or value.startswith("data:")):
            yield from _medium(value, kind)
        elif isinstance(value, str):
            yield FoundMedium(kind, data=value)


def _thumbnails(outcome: Mapping[str, Any]) -> Iterator[FoundMedium]:
    for name in _THUMBNAILS:
        if isinstance(url := outcome.get(name), str) and url:
            yield FoundMedium("image", url, is_thumbnail=True)


def _medium(url: Any, kind: MediumKind) -> Iterator[FoundMedium]:
    if not isinstance(url, str) or not url:
        return
    if found := _DATA_URI.match(url):
        yield FoundMedium(kind, data=url[found.end() :])
    else:
        yield FoundMedium(kind, url)


def kind_of(content_type: str) -> MediumKind:
    """Return the kind of a content type."""
    kinds: tuple[MediumKind, ...] = ("image", "audio")
    kind = type_before_slash(content_type)
    return next((one for one in kinds if one == kind), "video")


def is_output(content_type: str, wanted: MediumKind) -> bool:
    """Whether a file of this type is what a task delivers. Animations count as videos."""
    return can_contain(content_type, wanted) or (wanted == "video" and content_type in _ANIMATIONS)


def refusal(outcome: Mapping[str, Any]) -> str:
    """Return the text with which a model declined to produce an output, or an empty string.

    Gemini's models answer with text instead of a file, or with a reason alone.
    """
    texts = [part["text"] for part in _parts(outcome) if isinstance(part.get("text"), str)]
    if said := " ".join(" ".join(texts).split()):
        return said[:REFUSAL_CHARS_MAX]
    candidates = outcome.get("candidates")
    first = candidates[0] if isinstance(candidates, list) and candidates else None
    feedback = outcome.get("promptFeedback")
    for found, name in ((first, "finishReason"), (feedback, "blockReason")):
        reason = found.get(name) if isinstance(found, dict) else None
        if isinstance(reason, str) and reason and reason != "STOP":
            return reason[:REFUSAL_CHARS_MAX]
    return ""


def scalars(outcome: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return scalar fields of an outcome, such as ``voice_id``, without URLs and files."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in outcome.items():
        if name in ("media", "error", *_BASE64, *_BARE):
            continue
        if not isinstance(value, str | int | float | bool):
            continue
        if isinstance(value, str) and (
            "://" in value or value.startswith("data:") or len(value) > SCALAR_CHARS_MAX
        ):
            continue
        if len(found) < SCALARS_MAX:
            found[name] = value
    return found


def kept(value: Any) -> str:
    """Return a result as JSON of at most ``UNREAD_CHARS_MAX`` characters, for the operator."""
    text = msgspec.json.encode(_shortened(value, depth=8)).decode(errors="replace")
    return text if len(text) <= UNREAD_CHARS_MAX else text[: UNREAD_CHARS_MAX - 1] + "…"


def _shortened(value: Any, *, depth: int) -> Any:
    if isinstance(value, str) and len(value) > KEPT_CHARS_MAX:
        return f"{value[:KEPT_CHARS_MAX]}… ({len(value)} characters)"
    if not depth and isinstance(value, dict | list):
        return "…"
    if isinstance(value, dict):
        return {str(name): _shortened(one, depth=depth - 1) for name, one in value.items()}
    if isinstance(value, list):
        return [_shortened(one, depth=depth - 1) for one in value]
    return value
