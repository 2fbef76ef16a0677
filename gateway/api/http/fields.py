"""Field types shared by bodies, paths and queries, limited to what SQL can store."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Annotated, Any, TypeAlias, TypeVar

from litestar.connection import ASGIConnection
from litestar.params import PathParameter, QueryParameter
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from gateway.checks.decoding import ID_MAX
from gateway.checks.moments import read_moment
from gateway.checks.suggestions import did_you_mean
from gateway.errors import InvalidRequest
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


ModelName: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
"""A client's labels, for its own use."""

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


def refuse_unknown_parameters(
    connection: ASGIConnection[Any, Any, Any, Any], known: Collection[str]
) -> None:
    """Raise ``InvalidRequest`` for a query parameter that would otherwise be ignored."""
    for name in connection.query_params:
        if name not in known:
            raise InvalidRequest(
                "unknown_parameter",
                f"Unknown parameter: {name!r}; {did_you_mean(name, known)}.",
                param=name,
            )
