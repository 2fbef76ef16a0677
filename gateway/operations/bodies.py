"""Bodies of operations: their base class and the types of their fields.

Field types are bounded to what SQL can hold. HTTP sends a body as JSON; the command line builds it
from its options. Either way it is validated here.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from gateway.accounts.limits import LIMIT_MAX
from gateway.checks.decoding import ID_MAX
from gateway.checks.entered import NAME_MAX, REASON_MAX, REFERENCE_MAX
from gateway.checks.moments import read_moment
from gateway.checks.strict import StrictModel
from gateway.pricing import parse_usd


def _read_usd(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError('an amount must be a string, such as "25.00"')
    return parse_usd(value)


UsdAmount: TypeAlias = Annotated[
    int,
    BeforeValidator(_read_usd),
    WithJsonSchema({"type": "string", "description": "USD, as a decimal", "examples": ["25.00"]}),
]
"""Amount, entered as a decimal string and read as nano-dollars."""
Moment: TypeAlias = Annotated[
    datetime,
    BeforeValidator(read_moment),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2026-03-01T10:00:00Z"]}),
]
"""Moment, entered with its offset (RFC 3339) and read as UTC."""
Id: TypeAlias = Annotated[int, Field(ge=1, le=ID_MAX)]
"""Id of a row in SQL."""
Limit: TypeAlias = Annotated[int, Field(ge=1, le=LIMIT_MAX)]
"""Limit per minute or hour, or of concurrent requests."""
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=NAME_MAX)]
Label: TypeAlias = Annotated[str, Field(max_length=NAME_MAX)]
"""Name that can be empty."""
Reason: TypeAlias = Annotated[str, Field(min_length=1, max_length=REASON_MAX)]
Reference: TypeAlias = Annotated[str, Field(min_length=1, max_length=REFERENCE_MAX)]


class Body(StrictModel):
    model_config = ConfigDict(frozen=True)
