"""An export as a file: which profile and format, and what its footer says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from sqlalchemy import Connection

from gateway.billing import focus
from gateway.billing.exports import (
    CSV_SCHEMA,
    PARQUET_SCHEMA,
    Footer,
    Format,
    native_tables,
    write,
)
from gateway.billing.usage import Filters, Span

Profile: TypeAlias = Literal["native", "focus"]

MEDIA_TYPES = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}


def export(
    connection: Connection,
    span: Span,
    filters: Filters,
    *,
    format: Format,
    profile: Profile,
    footer: Footer,
) -> Iterator[bytes]:
    """Write what was booked in a span, in parts; ``footer`` is complete after the last."""
    if profile == "focus":
        schema = focus.CSV if format == "csv" else focus.PARQUET
        tables = focus.focus_tables(connection, span, filters, schema)
        return write(tables, schema, format, footer, amount=focus.AMOUNT)
    schema = CSV_SCHEMA if format == "csv" else PARQUET_SCHEMA
    tables = native_tables(connection, span, filters, schema)
    return write(tables, schema, format, footer, amount="amount_nanos")
