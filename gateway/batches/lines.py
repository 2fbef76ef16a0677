"""The lines of a batch's input and output files: one JSON object each. Pure.

A line is ``{"custom_id", "method", "url", "body"}``; its result is ``{"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}``.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Annotated, Any, Final, Literal

import msgspec
from pydantic import Field, ValidationError

from gateway.batches.endpoint import BatchEndpoint, Entries
from gateway.checks.decoding import decode_json
from gateway.checks.strict import StrictModel
from gateway.errors import (
    InvalidRequest,
    RequestFailed,
    TollgateError,
    TooLarge,
    rename,
    render_openai,
)
from gateway.ledger.closed import ClosedRequest
from gateway.requests.ticket import raise_unless_succeeded
from gateway.tasks.mistakes import invalid_field
from gateway.tasks.submission import Submission
from workers.contract.jobs import RequestId

CUSTOM_ID_MAX: Final = 512
CHUNK_BYTES: Final = 256 * 1024

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the file; ``number`` counts from 1, ``text`` is None if the line is too long."""

    number: int
    text: bytes | None


class LineBody(StrictModel):
    """The JSON of a line."""

    custom_id: Annotated[str, Field(min_length=1, max_length=CUSTOM_ID_MAX)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckedLine:
    """A checked line."""

    custom_id: str
    body: Mapping[str, Any]
    submission: Submission


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of a line, as text for the output file (``succeeded``) or the error file."""

    number: int
    succeeded: bool
    text: bytes
    closed: ClosedRequest | None = None
    """The line's request, if one was accepted."""


def pages(file: IO[bytes], bytes_max: int) -> Iterator[list[BatchLine]]:
    """Yield the lines of a file in pages. Empty lines are counted but not yielded."""
    number, rest, too_long = 1, bytearray(), False
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        first, *others = chunk.split(b"\n")
        rest += first
        whole = []
        if others:
            *whole, last = bytes(rest), *others
            rest = bytearray(last)
        found = []
        for text in whole:
            if too_long or len(text) > bytes_max:
                found.append(BatchLine(number, None))
            elif text.strip():
                found.append(BatchLine(number, text))
            number, too_long = number + 1, False
        if len(rest) > bytes_max:
            rest, too_long = bytearray(), True
        yield found
    if too_long:
        yield [BatchLine(number, None)]
    elif rest.strip():
        yield [BatchLine(number, bytes(rest))]


def read_line(
    line: BatchLine, endpoint: BatchEndpoint, entries: Entries, *, bytes_max: int
) -> CheckedLine:
    """Check a single line, its body like the live endpoint. Raise ``TollgateError``."""
    if line.text is None:
        raise TooLarge("line_too_long", f"The line is longer than {bytes_max} bytes.")
    try:
        value = decode_json(_without_mark(line))
    except msgspec.DecodeError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest("invalid_json_line", "The line is not a JSON object.")
    try:
        parsed = LineBody.model_validate(value)
    except ValidationError as error:
        raise invalid_field(error.errors(include_url=False)) from None
    if parsed.url != endpoint.path:
        raise InvalidRequest(
            "mismatched_url",
            f"url is {parsed.url!r}, but the batch is for {endpoint.path}.",
            param="url",
        )
    try:
        submission = endpoint.read(parsed.body, entries)
    except TollgateError as error:
        raise within_body(error) from None
    return CheckedLine(parsed.custom_id, parsed.body, submission)


def within_body(error: TollgateError) -> TollgateError:
    """Make an error's field relative to the line instead of its body."""
    if error.param:
        error.param = f"body.{error.param}"
    return error


def read_checked(line: BatchLine) -> tuple[str, dict[str, Any]]:
    """Return ``custom_id`` and body of a line that was checked before."""
    assert line.text is not None
    value = msgspec.json.decode(_without_mark(line))
    return value["custom_id"], value["body"]


def completed_result(
    batch_id: str, line: BatchLine, closed: ClosedRequest, endpoint: BatchEndpoint
) -> LineResult:
    """Return the result of a line whose request has ended."""
    number, (custom_id, body) = line.number, read_checked(line)
    try:
        raise_unless_succeeded(closed)
        if closed.output is None:
            raise RequestFailed(
                "output_expired",
                "The answer expired before it could be written to the file.",
                request_id=closed.request_id,
            )
    except TollgateError as error:
        rename(error, endpoint.names)
        return refused_result(batch_id, line, error, closed=closed)
    # Without the batch's metadata, which the live endpoint would not return.
    as_submitted = msgspec.structs.replace(closed, metadata=body.get("metadata") or {})
    return LineResult(
        number,
        succeeded=True,
        text=_line(
            batch_id,
            number,
            custom_id,
            _response(200, closed.request_id, endpoint.answer(as_submitted, body)),
            None,
        ),
        closed=closed,
    )


def refused_result(
    batch_id: str, line: BatchLine, error: TollgateError, *, closed: ClosedRequest | None = None
) -> LineResult:
    """Return the result of a line that failed, with the live endpoint's error response."""
    request_id = closed.request_id if closed is not None else None
    response = _response(error.http_status, request_id, _encode(render_openai(error)))
    text = _line(batch_id, line.number, read_checked(line)[0], response, error)
    return LineResult(line.number, succeeded=False, text=text, closed=closed)


def unrun_result(
    batch_id: str, line: BatchLine, error: TollgateError, *, closed: ClosedRequest | None = None
) -> LineResult:
    """Return the result of a line without a response, because its batch ended before."""
    text = _line(batch_id, line.number, read_checked(line)[0], None, error)
    return LineResult(line.number, succeeded=False, text=text, closed=closed)


def _without_mark(line: BatchLine) -> bytes:
    """Return a line's text; the first line of a file may begin with a byte order mark."""
    text = line.text or b""
    return text.removeprefix(codecs.BOM_UTF8) if line.number == 1 else text


def _response(status: int, request_id: RequestId | None, body: bytes) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}


def _line(
    batch_id: str,
    number: int,
    custom_id: str,
    response: dict[str, Any] | None,
    error: TollgateError | None,
) -> bytes:
    return _encode(
        {
            "id": f"batch_req_{batch_id.removeprefix('batch_')}_{number}",
            "custom_id": custom_id,
            "response": response,
            "error": None if error is None else {"code": error.code, "message": error.message},
        }
    )
