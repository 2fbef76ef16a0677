"""Outcomes of requests whose images or video are encoded after they have left the engine."""

from __future__ import annotations

import logging
from typing import Protocol

import av

from workers.contract.jobs import Completed, Failed, Outcome, RequestId, Usage
from workers.contract.media import File, Medium

log = logging.getLogger(__name__)


class VisualOutput(Protocol):
    def finish(self) -> tuple[list[Medium], list[File]]: ...

    def close(self) -> None: ...


def complete(request_id: RequestId, output: VisualOutput, usage: Usage) -> Outcome:
    """Encode the files of a request and close its output."""
    try:
        media, files = output.finish()
        return Completed(usage, output={"media": media}, files=tuple(files))
    except av.FFmpegError:
        return encoding_failed(request_id)
    finally:
        output.close()


def encoding_failed(request_id: RequestId) -> Failed:
    """Log the encoder's exception, which is being handled, and return the outcome for it."""
    log.exception("result could not be encoded", extra={"request_id": request_id})
    return Failed("engine_error", "The result could not be encoded.")
