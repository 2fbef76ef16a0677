"""Requests in the request queue's shape, with their cost.

A payload is returned as it was interpreted: with the seed that was used, and a new presigned URL
for each source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NotRequired, TypeAlias, TypedDict

from gateway.api.gmi.payloads import is_visual
from gateway.api.http.answers import exact_number
from gateway.api.http.media_views import EXPIRED, blob_of, media_of
from gateway.files.download_urls import UrlSigner
from gateway.files.retention import Record
from gateway.ledger.closed import ClosedRequest
from gateway.tasks.registry import RECORDING
from gateway.tasks.submission import OpenRequest
from workers.contract.jobs import BlobRef, Progress, PromptWarning, Usage

State: TypeAlias = Literal["queued", "dispatched", "processing", "success", "failed", "cancelled"]


class AcceptedView(TypedDict):
    """An accepted request of the queue; times are Unix seconds."""

    request_id: str
    model: str
    status: State
    created_at: int
    updated_at: int
    queued_at: int
    warnings: NotRequired[list[PromptWarning]]


class QueuedRequestView(AcceptedView):
    """A request of the queue with its outcome and its cost."""

    org_id: str
    is_public: bool
    qworker_id: str | None
    payload: dict[str, Any]
    outcome: dict[str, Any]
    usage: dict[str, Any] | None
    progress: NotRequired[int]
    queue_position: NotRequired[int | None]
    error: NotRequired[str]


_STATES: Final[Mapping[str, State]] = {
    "succeeded": "success",
    "failed": "failed",
    "expired": "failed",
    "cancelled": "cancelled",
}
_REPORTED: Final = ("media", "media_urls", "error", "message", "failed", "duration_ms")
_RENAMED_VISUAL: Final = ("width", "height", "duration_ms", "images", "mask", "video", "parameters")
_RENAMED_AUDIO: Final = ("recording", "duration_ms")
"""Fields of an input that a payload has under other names."""


def accepted_view(
    found: OpenRequest | ClosedRequest, progress: Progress | None = None
) -> AcceptedView:
    """Return the immediate answer to a new request."""
    created_at = int(found.accepted_at.timestamp())
    ended_at = found.settled_at if isinstance(found, ClosedRequest) else found.accepted_at
    view: AcceptedView = {
        "request_id": found.request_id,
        "model": found.model,
        "status": state_of(found, progress),
        "created_at": created_at,
        "updated_at": int(ended_at.timestamp()),
        "queued_at": created_at,
    }
    if found.warnings:
        view["warnings"] = list(found.warnings)
    return view


def request_view(
    found: OpenRequest | ClosedRequest,
    record: Record | None,
    progress: Progress | None,
    links: UrlSigner,
) -> QueuedRequestView:
    view: QueuedRequestView = {
        **accepted_view(found, progress),  # type: ignore[typeddict-item]  # optional fields are added below
        "org_id": str(found.account_id),
        "is_public": False,
        "qworker_id": None,
        "payload": _payload(record, links) if record is not None else {},
        "outcome": {},
        "usage": None,
    }
    if isinstance(found, OpenRequest):
        view["progress"] = _progress(progress)
        view["queue_position"] = found.position
        return view
    view["outcome"] = _outcome(found, links)
    if "error" in view["outcome"]:
        view["error"] = view["outcome"]["error"]
    view["usage"] = {**_usage(found.usage), "cost": exact_number(found.cost_nanos)}
    return view


def state_of(found: OpenRequest | ClosedRequest, progress: Progress | None) -> State:
    """Return GMI's state; a running request is ``dispatched`` until it reports progress."""
    if isinstance(found, ClosedRequest):
        return _STATES[found.status]
    if found.status == "queued":
        return "queued"
    return "dispatched" if progress is None else "processing"


def _progress(progress: Progress | None) -> int:
    """Return the progress in percent; 100 only when the request is charged."""
    if progress is None or not progress.steps:
        return 0
    return min(99, progress.step * 100 // progress.steps)


def _payload(record: Record, links: UrlSigner) -> dict[str, Any]:
    stored = record.asked
    if stored is None:
        return {}
    given = stored.input
    if not is_visual(record.task):
        # Blobs of the account's stored voices do not belong to the request and get no URL.
        own = [blob for blob in stored.attachments if record.request_id in blob.key]
        voices = [links.link(blob).url for blob in own]
        payload = {name: value for name, value in given.items() if name not in _RENAMED_AUDIO}
        return payload | _duration(given) | dict(zip((RECORDING,), voices, strict=False))
    payload = {name: value for name, value in given.items() if name not in _RENAMED_VISUAL}
    payload |= given.get("parameters", {})
    if given.get("width") and given.get("height"):
        payload["size"] = f"{given['width']}x{given['height']}"
    payload |= _duration(given)
    left = [links.link(blob).url for blob in stored.attachments]
    count = given.get("images", 0)
    if isinstance(count, int) and count:
        payload["image"] = left[:count]
        left = left[count:]
    for name, key in (("mask", "mask"), ("video", "video_url")):
        if given.get(name) is True and left:
            payload[key] = left.pop(0)
    return payload


def _duration(given: Mapping[str, Any]) -> dict[str, Any]:
    if not given.get("duration_ms"):
        return {}
    seconds = given["duration_ms"] / 1000
    return {"duration": int(seconds) if seconds.is_integer() else seconds}


def _outcome(closed: ClosedRequest, links: UrlSigner) -> dict[str, Any]:
    if closed.status != "succeeded":
        message = closed.error.message if closed.error else f"The request was {closed.status}."
        code = closed.error.code if closed.error else closed.status
        ended: dict[str, Any] = {"error": message, "error_code": code}
        delivered = [
            {"id": str(medium.index), "url": links.link(blob).url}
            for medium in media_of(closed)
            if (blob := blob_of(closed, medium)) is not None
        ]
        return {**ended, "previews": delivered} if delivered else ended
    if closed.output is None:
        return {"media_urls": [], "error": EXPIRED}
    outcome: dict[str, Any] = {"media_urls": []}
    failed = []
    for medium in media_of(closed):
        blob = blob_of(closed, medium)
        if medium.role == "output" and blob is not None:
            _add_output(outcome, f"{medium.kind}_url", str(medium.index), blob, links)
            if medium.duration_ms:
                outcome.setdefault("duration_ms", medium.duration_ms)
        elif medium.role == "thumbnail" and blob is not None:
            outcome.setdefault("thumbnail_image_url", links.link(blob).url)
        elif medium.error is not None:
            failed.append({"id": str(medium.index), "reason": medium.error})
    if failed:
        outcome["failed"] = failed
    more = {
        name: value
        for name, value in closed.output.value.items()
        if name not in _REPORTED and isinstance(value, str | int | float | bool)
    }
    return {**more, **outcome}


def _add_output(
    outcome: dict[str, Any], key: str, id: str, blob: BlobRef, links: UrlSigner
) -> None:
    """Add an output to the list, and the first of its kind to the field that older models use."""
    link = links.link(blob)
    outcome["media_urls"].append({"id": id, "url": link.url, "content_type": blob.content_type})
    outcome.setdefault(key, link.url)
    outcome.setdefault("expires_at", link.expires_at)


def _usage(usage: Usage) -> dict[str, Any]:
    counted = {
        "images": usage.images,
        "video_seconds": usage.video_ms / 1000,
        "audio_seconds": usage.audio_ms / 1000,
        "characters": usage.characters,
        "steps": usage.steps,
    }
    return {name: count for name, count in counted.items() if count}
