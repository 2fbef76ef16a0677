"""Exports as files, by profile and format."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.archive.marks import refuse_archived, removed_archives
from gateway.billing.exports import focus
from gateway.billing.exports.archived import ArchivedReceipts, ExportReader
from gateway.billing.exports.footer import Footer, Format, Profile
from gateway.billing.exports.native import native_schema, native_tables, write
from gateway.billing.usage.report import Filters, Span
from workers.contract.blobs import Blobs


def export(
    read: ExportReader,
    span: Span,
    filters: Filters,
    *,
    format: Format,
    profile: Profile,
    footer: Footer,
    margins: bool = False,
    blobs: Blobs | None = None,
) -> Iterator[bytes]:
    """Yield the file of what was booked in a span, in parts; the last part completes ``footer``.
    ``margins`` adds what requests cost the operator, for operators only.

    Archived receipts are read from ``blobs``. Raise ``Unavailable`` if that fails, or if a month is
    archived meanwhile; without ``blobs``, raise ``Gone`` if receipts are archived.
    """
    archives = read(lambda connection: removed_archives(connection, (span.starts_at, span.ends_at)))
    if blobs is None:
        refuse_archived([archive.month for archive in archives], "an export")
    archived = ArchivedReceipts(read, blobs, archives)
    if profile == "focus":
        schema = focus.focus_schema(format, margins=margins)
        tables = focus.focus_tables(read, span, filters, schema, archived)
        yield from write(tables, schema, format, footer, amount=focus.AMOUNT)
        return
    schema = native_schema(format, margins=margins)
    tables = native_tables(read, span, filters, schema, archived)
    yield from write(tables, schema, format, footer, amount="amount_nanos")
