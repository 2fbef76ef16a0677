"""Models in the request queue's shape: parameters of payloads, and prices. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, get_args

from gateway.api.gmi.payloads import is_visual, nearest
from gateway.catalog.availability import availability
from gateway.catalog.listing import decimal, from_price, modalities, price_view
from gateway.catalog.market.contract import Contract, contract_of
from gateway.catalog.schema import (
    FPS_MAX,
    GUIDANCE_MAX,
    SCALE_MAX,
    SIDE_MAX,
    SOURCES_MAX,
    CatalogEntry,
)
from gateway.catalog.tasks import TASKS, Task
from gateway.catalog.views import PriceLineView
from gateway.errors import NotFound
from gateway.pricing import format_usd
from gateway.tasks.visual import PROMPT_MAX, SEED_MAX, STEPS_MAX
from workers.contract.announcements import Announcement
from workers.contract.media import (
    RATE_MAX,
    RATE_MIN,
    SPEED_MAX,
    SPEED_MIN,
    AudioFormat,
    ImageFormat,
    VideoFormat,
)

TASKS_OF_QUEUE: Final[tuple[Task, ...]] = tuple(
    task for task, kind in TASKS.items() if kind.makes in ("image", "video", "audio")
)
"""Tasks that generate images, videos or audio. Text is not offered in this dialect."""

_TYPES: Final[Mapping[str, str]] = {
    "number": "float",
    "size": "string",
    "language": "string",
    "images": "image",
}
"""GMI Cloud's names of our types."""
_RATIOS: Final = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16), (21, 9), (9, 21))


class QueueModalitiesView(TypedDict):
    input: Sequence[str]
    output: Sequence[str]


class PriceInfoView(TypedDict):
    """``price`` is the lowest per ``pricing_type``; ``lines`` is the complete price."""

    price: str | None
    pricing_type: str
    unit: Literal["USD"]
    minimum: str | None
    lines: list[PriceLineView]


class QueueModelView(TypedDict):
    """A model of the queue; times are Unix seconds."""

    model: str
    org_id: str
    brief_description: str
    detailed_description: str
    model_type: str
    tasks: list[str]
    modalities: QueueModalitiesView
    parameters: list[dict[str, Any]]
    internal_parameters: dict[str, Any]
    accepts_other_parameters: bool
    price_info: PriceInfoView
    tags: list[str]
    aliases: list[str]
    host_type: str
    external_provider: str
    icon_link: str
    background_image_url: str
    available: bool
    reason: str | None
    created_at: int
    updated_at: int


def check_in_queue(entry: CatalogEntry) -> CatalogEntry:
    """Return the entry. Raise ``NotFound`` if its task is not offered in this dialect."""
    if entry.task not in TASKS_OF_QUEUE:
        raise NotFound(
            "model_not_found",
            f"The model {entry.name!r} is not in this queue: its task is {entry.task}; use /v1.",
            param="model",
        )
    return entry


def model_view(
    entry: CatalogEntry, announcements: Sequence[Announcement], *, created_at: int, updated_at: int
) -> QueueModelView:
    """Return the view of one model."""
    missing = availability(entry, announcements)
    reads, makes = modalities(entry)
    contract = contract_of(entry)
    return {
        "model": entry.name,
        "org_id": "",
        "brief_description": entry.description.partition(". ")[0].rstrip("."),
        "detailed_description": entry.description,
        "model_type": TASKS[entry.task].makes,
        "tasks": [entry.task, *entry.also],
        "modalities": {"input": reads, "output": makes},
        "parameters": list(_parameters(entry) if contract is None else _known(contract)),
        "internal_parameters": {},
        "accepts_other_parameters": (
            entry.upstream is not None if contract is None else not contract.is_complete
        ),
        "price_info": {
            "price": None if (least := from_price(entry)) is None else decimal(least),
            "pricing_type": entry.price[0].unit if entry.price else "steps",
            "unit": "USD",
            "minimum": format_usd(entry.minimum) if entry.minimum else None,
            "lines": price_view(entry),
        },
        "tags": list(entry.good_for),
        "aliases": list(entry.aliases),
        "host_type": "upstream" if entry.upstream else "local",
        "external_provider": entry.vendor or "",
        "icon_link": "",
        "background_image_url": "",
        "available": missing is None,
        "reason": None if missing is None else missing.reason,
        "created_at": created_at,
        "updated_at": updated_at,
    }


def _parameters(entry: CatalogEntry) -> Iterator[dict[str, Any]]:
    if not is_visual(entry.task):
        yield from _audio_parameters(entry)
        return
    kinds = [TASKS[task] for task in (entry.task, *entry.also)]
    local, limits, default = entry.upstream is None, entry.limits, entry.default_parameters
    makes, makes_images = kinds[0].makes, kinds[0].makes == "image"
    reads_image = any("image" in kind.reads for kind in kinds)
    if any("text" in kind.reads for kind in kinds):
        required = all(kind.reads == ("text",) for kind in kinds)
        longest = limits.characters or PROMPT_MAX
        yield _one("prompt", "string", required=required, max_length=longest)
        yield _one("negative_prompt", "string", max_length=PROMPT_MAX)
    if reads_image:
        most = limits.sources or (1 if local else SOURCES_MAX)
        required = all("image" in kind.reads for kind in kinds)
        yield _one("image", "array", required=required, max_items=most)
        if makes_images:
            yield _one("mask", "string")
    if any("video" in kind.reads for kind in kinds):
        required = all("video" in kind.reads for kind in kinds)
        yield _one("video_url", "string", required=required)
    if makes_images:
        yield _one("n", "integer", default=1, min=1, max=limits.images or 1)
    yield from _sizes(entry)
    for name, known, usual in (
        ("resolution", entry.resolutions, None),
        ("quality", tuple(entry.qualities), default.quality),
        ("scheduler", entry.schedulers, default.scheduler),
    ):
        if known:
            yield _one(name, "string", default=usual, options=known)
    if makes == "video" and "video" not in kinds[0].reads:
        yield _one("duration", "number", default=default.seconds, above=0, max=limits.seconds)
        yield _one("fps", "integer", default=default.fps, min=1, max=limits.fps or FPS_MAX)
    upscales = [kind for kind in kinds if "text" not in kind.reads]
    if len(upscales) < len(kinds):
        yield _one("steps", "integer", default=default.steps, min=1, max=limits.steps or STEPS_MAX)
        most_guidance = GUIDANCE_MAX if limits.guidance is None else limits.guidance
        yield _one("guidance_scale", "number", default=default.guidance, min=0, max=most_guidance)
        yield _one("seed", "integer", min=0, max=SEED_MAX - 1)
    if reads_image and makes_images:
        yield _one("strength", "number", default=default.strength, min=0, max=1)
    if upscales or limits.scale:
        yield _one("scale", "integer", min=1, max=limits.scale or SCALE_MAX)
    if local:
        formats = get_args(ImageFormat if makes_images else VideoFormat)
        yield _one("output_format", "string", default=formats[0], options=formats)


def _known(contract: Contract) -> Iterator[dict[str, Any]]:
    """List a vendor's parameters under the vendor's names, as GMI Cloud lists them."""
    for one in contract.parameters:
        is_enum = bool(one.options) and one.is_sure("options") and one.pixels is None
        yield {
            "name": one.sent_as,
            "display_name": one.name,
            "description": one.description or "",
            "type": "enum" if is_enum else _TYPES.get(one.type, one.type),
            "required": one.required and one.default is None,
            "default_value": one.default,
            "options": list(one.options),
            "min_value": one.min,
            "max_value": one.max,
            "guesses": one.guessed(),
        }


def _sizes(entry: CatalogEntry) -> Iterator[dict[str, Any]]:
    limits = entry.limits
    if entry.sizes:
        yield _one("size", "string", default=entry.sizes[0], options=entry.sizes)
        ratios = [f"{w}:{h}" for w, h in _RATIOS if nearest(entry, w / h) is not None]
        if ratios:
            yield _one("aspect_ratio", "string", options=ratios)
        return
    yield _one("size", "string")
    for side in ("width", "height"):
        most, step = limits.side or SIDE_MAX, limits.side_step
        yield _one(side, "integer", min=1, max=most, multiple_of=step)


def _audio_parameters(entry: CatalogEntry) -> Iterator[dict[str, Any]]:
    """List the parameters of speech, cloning, music and talking heads. An upstream's model has
    further ones."""
    local, limits = entry.upstream is None, entry.limits
    longest = limits.characters
    if local and entry.task == "talking-head":
        yield _one("image", "string", required=True)
        yield _one("audio", "string", required=True)
        yield _one("fps", "integer", min=1, max=limits.fps or FPS_MAX)
        return
    if entry.task == "text-to-music":
        yield _one("prompt", "string", max_length=longest)
        yield _one("lyrics", "string")
        if local:
            yield _one("duration", "number", above=0, max=limits.seconds)
    else:
        speaks = entry.task in ("text-to-speech", "voice-clone")
        yield _one("text", "string", required=speaks, max_length=longest)
    if "voice-clone" in (entry.task, *entry.also):
        yield _one("source_audio", "string", required=entry.task == "voice-clone")
    if entry.known_voices:
        yield _one("voice_id", "string", options=entry.known_voices)
    if not local:
        return
    if entry.task != "text-to-music":
        yield _one("language", "string", options=entry.known_languages or None)
        yield _one("speed", "number", default=1, min=SPEED_MIN, max=SPEED_MAX)
    yield _one("format", "string", default="mp3", options=get_args(AudioFormat))
    yield _one("audio_sample_rate", "integer", min=RATE_MIN, max=RATE_MAX)
    yield _one("bitrate", "integer")
    yield _one("seed", "integer", min=0, max=SEED_MAX - 1)


def _one(name: str, kind: str, *, required: bool = False, **bounds: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "type": kind, "required": required}
    for bound, value in bounds.items():
        if value is not None:
            found[bound] = list(value) if isinstance(value, tuple) else value
    return found
