"""Loads outputs that are too large for SQL and for the queue, where they are shown or flow on.

Small outputs, nearly all, are in SQL and pass through untouched.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from gateway.errors import RequestFailed
from gateway.ledger.closed import ClosedRequest, Output
from workers.contract.blobs import BlobError, BlobMissing, Blobs
from workers.contract.jobs import unpack_value


async def load(blobs: Blobs, output: Output) -> Output:
    """Return an output with its value. Raise ``BlobError`` or ``msgspec.DecodeError``."""
    if output.stored is None or output.is_loaded:
        return output
    value = unpack_value(await blobs.get(output.stored))
    return msgspec.structs.replace(output, value=value)


async def with_output(blobs: Blobs, closed: ClosedRequest) -> ClosedRequest:
    """Return a closed request with its output, or without any if that was deleted.

    Raise ``RequestFailed`` if the store cannot be read: an error that clients do not answer with
    the same order once more, since this one has been charged.
    """
    if closed.output is None or closed.output.is_loaded:
        return closed
    try:
        return replace(closed, output=await load(blobs, closed.output))
    except BlobMissing:
        return replace(closed, output=None, kept_until=None)
    except (BlobError, msgspec.DecodeError):
        raise RequestFailed(
            "blobs_unavailable",
            "The output is complete and charged, but the store that holds it does not answer; "
            f"fetch it later: GET /v1/requests/{closed.request_id}.",
            request_id=closed.request_id,
        ) from None
