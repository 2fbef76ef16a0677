"""Field types shared by bodies, paths and queries, limited to what SQL can store."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, TypeAlias, TypeVar

from litestar.params import PathParameter, QueryParameter
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from gateway.accounts.limits import LIMIT_MAX
from gateway.checks.decoding import ID_MAX
from gateway.checks.moments import read_moment
from gateway.errors import InvalidRequest
from gateway.pricing import parse_usd
from gateway.tasks.mistakes import UNSUPPORTED

T = TypeVar("T")


def refused(
    why: str = "is not supported by the models served here; leave it out.",
) -> AfterValidator:
    """Refuse a known field if it is set: ignoring it would change the answer without notice.

    ``why`` follows the field's name in the error.
    """

    def check(value: Any) -> Any:
        if value:
            raise PydanticCustomError(UNSUPPORTED, "{why}", {"why": why})
        return value

    return AfterValidator(check)


Refused: TypeAlias = Annotated[T | None, refused()]


def _read_usd(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError('an amount must be a string, such as "25.00"')
    return parse_usd(value)


UsdAmount: TypeAlias = Annotated[
    int,
    BeforeValidator(_read_usd),
    WithJsonSchema({"type": "string", "description": "USD, as a decimal", "examples": ["25.00"]}),
]
"""An amount in a body: a decimal string of USD, read as nano-dollars."""
Moment: TypeAlias = Annotated[
    datetime,
    BeforeValidator(read_moment),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2026-03-01T10:00:00Z"]}),
]
"""A time in a body: RFC 3339 with an offset, read as UTC."""
Id: TypeAlias = Annotated[int, Field(ge=1, le=ID_MAX)]
"""Id of a row in SQL."""
AccountName: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
ModelName: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
"""A client's labels, for its own use."""
PerMinute: TypeAlias = Annotated[int, Field(ge=1, le=LIMIT_MAX)]
"""A limit per minute, or on concurrent requests."""

IdInPath: TypeAlias = Annotated[int, PathParameter(ge=1, le=ID_MAX)]
IdInQuery: TypeAlias = Annotated[int | None, QueryParameter(ge=1, le=ID_MAX)]
MomentInQuery: TypeAlias = Annotated[
    str | None,
    QueryParameter(
        description="A moment with its offset (RFC 3339), such as 2026-03-01T10:00:00Z.",
        schema_extra={"format": "date-time"},
    ),
]


def moment_in_query(text: str | None, param: str) -> datetime | None:
    """Read a ``MomentInQuery``. Raise ``InvalidRequest``."""
    if text is None:
        return None
    try:
        return read_moment(text)
    except ValueError as error:
        raise InvalidRequest("invalid_value", f"{param}: {error}.", param=param) from None
