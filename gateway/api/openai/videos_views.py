"""Videos in OpenAI's shape: status, progress, size, cost and expiry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

from gateway.api.http.answers import ExactUsd, exact_number
from gateway.api.http.media_views import media_of
from gateway.ledger.closed import ClosedRequest
from gateway.tasks.submission import OpenRequest
from workers.contract.jobs import Progress, PromptWarning, RequestId


class VideoUsageView(TypedDict):
    seconds: float
    steps: int
    cost: ExactUsd


class VideoErrorView(TypedDict):
    code: str
    message: str
    param: str | None


class VideoView(TypedDict):
    """A video and its progress."""

    id: str
    object: Literal["video"]
    model: str
    status: str
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    remixed_from_video_id: str | None
    error: VideoErrorView | None
    usage: VideoUsageView | None
    seconds: str | None
    size: str | None
    warnings: NotRequired[list[PromptWarning]]


def video_view(
    found: OpenRequest | ClosedRequest,
    asked: Mapping[str, Any],
    *,
    origin: str | None = None,
    progress: Progress | None = None,
) -> VideoView:
    """Return the view of a request with the input ``asked``; ``origin`` is the one it remixes."""
    width, height = asked.get("width"), asked.get("height")
    duration_ms = asked.get("duration_ms")
    status = video_status(found)
    view: VideoView = {
        "id": video_id_of(found.request_id),
        "object": "video",
        "model": found.model,
        "status": status,
        "progress": 0,
        "created_at": int(found.accepted_at.timestamp()),
        "completed_at": None,
        "expires_at": None,
        "prompt": asked.get("prompt") or "",
        "remixed_from_video_id": video_id_of(RequestId(origin)) if origin is not None else None,
        "error": None,
        "usage": None,
        "seconds": None,
        "size": None,
    }
    if found.warnings:
        view["warnings"] = list(found.warnings)
    if status == "completed":
        view["progress"] = 100
    elif progress is not None and progress.steps:
        # 100 percent only when it is charged.
        view["progress"] = min(99, progress.step * 100 // progress.steps)
    if isinstance(found, ClosedRequest):
        view["completed_at"] = int(found.settled_at.timestamp())
        view["usage"] = {
            "seconds": found.usage.video_ms / 1000,
            "steps": found.usage.steps,
            "cost": exact_number(found.cost_nanos),
        }
        if status == "completed":
            if found.kept_until is not None:
                view["expires_at"] = int(found.kept_until.timestamp())
            for medium in media_of(found):
                if medium.role == "output":
                    width, height = medium.width or width, medium.height or height
                    duration_ms = medium.duration_ms or duration_ms
        else:
            view["error"] = _error(found)
    view["seconds"] = f"{duration_ms / 1000:g}" if duration_ms else None
    view["size"] = f"{width}x{height}" if width and height else None
    return view


def video_status(found: OpenRequest | ClosedRequest) -> str:
    names = {"queued": "queued", "running": "in_progress", "succeeded": "completed"}
    return names.get(found.status, "failed")


def video_id_of(request_id: RequestId) -> str:
    return f"video_{request_id.removeprefix('req_')}"


def _error(closed: ClosedRequest) -> VideoErrorView:
    if closed.error is not None:
        return {
            "code": closed.error.code,
            "message": closed.error.message,
            "param": closed.error.param,
        }
    return {
        "code": closed.status,
        "message": f"The video was {closed.status} ({closed.reason})"
        + ("." if closed.cost_nanos else "; nothing was charged."),
        "param": None,
    }
