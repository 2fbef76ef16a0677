"""Bodies sent either as a form or as JSON: OpenAI's clients use both for the same call.

A form's fields are strings: ``name[]`` repeats, ``name[part]`` nests. Files become sources, which
are read only at admission. Two forms are the same submission if their fields and files are equal,
whatever their boundaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import msgspec
from litestar.datastructures import UploadFile
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from pydantic import BaseModel

from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.api.http.schemas import REF
from gateway.checks.decoding import decode_json
from gateway.errors import InvalidRequest
from gateway.files.fetch import CHUNK_BYTES
from gateway.files.sources import SentSource

FORM: Final = "multipart/form-data"

Body = TypeVar("Body", bound=BaseModel)


@dataclass(slots=True)
class ReceivedForm:
    """A body's fields, and the canonical bytes by which a repetition is recognised."""

    fields: dict[str, Any]
    canonical: bytes
    files: list[UploadFile] = field(default_factory=list)

    def read(self, schema: type[Body]) -> Body:
        """Check the fields. Raise ``InvalidRequest``."""
        return read_body(schema, self.fields)

    async def close(self) -> None:
        for file in self.files:
            await file.close()


async def receive(request: ApiRequest, *, repeated: Mapping[str, str]) -> ReceivedForm:
    """Read a body. ``repeated`` maps file fields that can occur several times to the field that
    holds their list."""
    if request.content_type[0] == FORM:
        return await _form(request, repeated)
    body = await request.body()
    try:
        fields = decode_json(body)
    except msgspec.DecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest("invalid_json", "The body is neither a form nor a JSON object.")
    return ReceivedForm(fields, body)


async def _form(request: ApiRequest, repeated: Mapping[str, str]) -> ReceivedForm:
    fields: dict[str, Any] = {}
    digests = []
    files = []
    for name, value in (await request.form()).multi_items():
        plain = name.removesuffix("[]")
        if isinstance(value, UploadFile):
            files.append(value)
            digests.append([name, await _digest(value)])
            given: Any = SentSource(reader_of(value), value.filename or "")
            if plain in repeated:
                fields.setdefault(repeated[plain], []).append(given)
                continue
        else:
            given = value
            digests.append([name, value])
        _put(fields, name, given)
    for plain, several in repeated.items():
        if len(fields.get(several, ())) == 1:
            (fields[plain],) = fields.pop(several)
    # As JSON, because an idempotency key is bound to a JSON body.
    return ReceivedForm(fields, msgspec.json.encode(digests), files)


def _put(fields: dict[str, Any], name: str, value: Any) -> None:
    outer, bracket, inner = name.partition("[")
    if not bracket:
        if outer in fields:
            raise InvalidRequest(
                "invalid_value", f"{outer} is sent twice; send it once.", param=outer
            )
        fields[outer] = value
        return
    inner = inner.removesuffix("]")
    kind: Any = dict if inner else list
    holder = fields.setdefault(outer, kind())
    if not isinstance(holder, kind):
        raise InvalidRequest(
            "invalid_value",
            f"{outer} is sent both as a list and as an object; use one.",
            param=outer,
        )
    if inner:
        holder[inner] = _scalar(value)
    else:
        holder.append(value)


def _scalar(value: Any) -> Any:
    """Decode the JSON scalar in a nested field; return the text if it is none."""
    try:
        found = decode_json(value) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return value
    return value if isinstance(found, dict | list) else found


def reader_of(file: UploadFile) -> Callable[[], AsyncIterator[bytes]]:
    """Return a function that reads an uploaded file in chunks, from its start."""

    async def read() -> AsyncIterator[bytes]:
        await file.seek(0)
        while chunk := await file.read(CHUNK_BYTES):
            yield chunk

    return read


async def _digest(file: UploadFile) -> str:
    digest = hashlib.sha256()
    while chunk := await file.read(CHUNK_BYTES):
        digest.update(chunk)
    await file.seek(0)
    return digest.hexdigest()


def documented_body(schema: type[BaseModel]) -> type[Operation]:
    """Return the OpenAPI operation of a handler whose body is read by ``receive``."""
    # Already a finished schema, so Litestar writes it unchanged.
    fields = cast(Schema, schema.model_json_schema(ref_template=REF + "{model}"))

    @dataclass
    class Described(Operation):
        def __post_init__(self) -> None:
            self.request_body = RequestBody(
                content={
                    name: OpenAPIMediaType(schema=fields) for name in ("application/json", FORM)
                },
                required=True,
            )

    return Described
