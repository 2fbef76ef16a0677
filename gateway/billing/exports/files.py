"""Exports as files, by profile and format."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.billing.exports import focus
from gateway.billing.exports.footer import Footer, Format, Profile
from gateway.billing.exports.native import (
    CSV_SCHEMA,
    PARQUET_SCHEMA,
    native_tables,
    write,
)
from gateway.billing.exports.pages import ExportReader
from gateway.billing.usage.report import Filters, Span


def export(
    read: ExportReader,
    span: Span,
    filters: Filters,
    *,
    format: Format,
    profile: Profile,
    footer: Footer,
) -> Iterator[bytes]:
    """Yield the file of what was booked in a span, in parts; the last part completes ``footer``."""
    if profile == "focus":
        schema = focus.CSV if format == "csv" else focus.PARQUET
        tables = focus.focus_tables(read, span, filters, schema)
        return write(tables, schema, format, footer, amount=focus.AMOUNT)
    schema = CSV_SCHEMA if format == "csv" else PARQUET_SCHEMA
    tables = native_tables(read, span, filters, schema)
    return write(tables, schema, format, footer, amount="amount_nanos")
