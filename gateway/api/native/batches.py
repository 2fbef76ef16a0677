"""Requests of the native API in batches: any task of any model, such as music or upscaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.http.answers import encode_json
from gateway.api.http.bodies import read_body, refuse_in_batch
from gateway.api.http.media_views import blob_of, media_of, medium_view
from gateway.api.native.requests import RequestBody
from gateway.api.native.views import request_view
from gateway.batches.endpoint import BatchEndpoint, Entries
from gateway.batches.stored import place
from gateway.ledger.closed import ClosedRequest
from gateway.tasks.registry import parse
from gateway.tasks.submission import Submission
from gateway.tasks.workflow_submission import WorkflowSubmission


def batch_submission(body: Mapping[str, Any], entries: Entries) -> Submission:
    """Check one body of a batch."""
    data = read_body(RequestBody, body)
    refuse_in_batch(data, "webhook")
    entry = entries(data.model)
    return Submission(
        model=data.model,
        input=parse(data.task or entry.task, data.input)
        if entry.workflow is None
        else WorkflowSubmission(data.input),
        task=data.task,
        within="input",
        metadata=data.metadata,
    )


def _answer(closed: ClosedRequest, _: Mapping[str, Any]) -> bytes:
    """Return the request with placeholders; outputs are filled in when the file is written."""
    view = request_view(closed, None)
    if view["output"] is not None and "media" in view["output"]:
        media = []
        for medium in media_of(closed):
            blob = blob_of(closed, medium)
            found: dict[str, Any] = {} if blob is None else place(blob, None)
            media.append({**found, **medium_view(medium, blob)})
        view["output"] = {**view["output"], "media": media}
    return encode_json(view)


BATCHES: Final = BatchEndpoint(
    "/v1/requests",
    read=batch_submission,
    answer=_answer,
    brings_files=True,
)
