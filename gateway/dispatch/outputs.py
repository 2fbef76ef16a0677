"""Loads outputs that are too large for SQL and for the queue.

Small outputs, which are nearly all, are in SQL and pass through unchanged.
"""

from __future__ import annotations

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
    """Return a closed request with its output, or without any if it was deleted.

    Raise ``RequestFailed`` if the blob store cannot be read. Clients do not retry on this error,
    because the request has been charged.
    """
    if closed.output is None or closed.output.is_loaded:
        return closed
    try:
        return msgspec.structs.replace(closed, output=await load(blobs, closed.output))
    except BlobMissing:
        return msgspec.structs.replace(closed, output=None, kept_until=None)
    except (BlobError, msgspec.DecodeError):
        raise RequestFailed(
            "blobs_unavailable",
            "The output is complete and charged, but its blob store does not respond; "
            f"fetch it later: GET /v1/requests/{closed.request_id}.",
            request_id=closed.request_id,
        ) from None
