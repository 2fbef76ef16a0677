"""What is answered about an archived month, and what is refused."""

from __future__ import annotations

import asyncio
import functools
import shutil
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from litestar.testing import TestClient
from pyarrow.parquet import ParquetFile

from gateway.accounts.keys import create_key
from gateway.app import create_app
from gateway.archive.files import read_pages, schema_of
from gateway.archive.marks import list_archives
from gateway.audit_log import Author
from gateway.billing.archived_entries import read_archived_entry
from gateway.billing.corrections import ArchivedCorrections, plan
from gateway.billing.entries import (
    ArchivedEntry,
    ChargedEntry,
    LedgerEntry,
    entries,
    find_entry,
)
from gateway.billing.exports import native, pages
from gateway.billing.exports.archived import ArchivedReceipts, Steps
from gateway.billing.exports.files import export
from gateway.billing.exports.footer import Footer
from gateway.billing.usage.archived import add_archived
from gateway.billing.usage.report import Filters, Group, Span, stored_usage, usage
from gateway.billing.usage.whatif import RepricedUsage, whatif
from gateway.errors import Conflict, Gone, InvalidRequest, NotFound, Unavailable
from gateway.ledger.receipts import Receipt
from gateway.ledger.steps import read_steps
from gateway.operations import credit
from gateway.operations.credit import CorrectionsView, RefundBody, TransferView
from gateway.operations.periods import rebuild_rollups
from gateway.pricing import Component, Price
from gateway.requests.lookup import Lookup, RequestFilter
from gateway.retention.erasure import Target, check_target
from gateway.settings import Settings
from tests.archive.months import APRIL, AUTHOR, LATE, MARCH, MONTH, Month
from tests.archive.test_archive import Killed, kill_at
from tests.ledger.books import PEPPER, PRICE
from tests.stack import CATALOG

UTC: Final = ZoneInfo("UTC")


def receipt(month: Month, request_id: str, account_id: int | None = None) -> Receipt:
    nothing: Any = None
    lookup = Lookup(month.database, nothing, month.blobs, {}, namespace="t")
    return asyncio.run(lookup.receipt(account_id or month.books.account.id, request_id))


def refund(month: Month, request_id: str, **values: Any) -> TransferView:
    body = RefundBody(reason="late", **values)
    rows = asyncio.run(credit.archived_charge(month.database, month.blobs, request_id))
    with month.database.transaction() as connection:
        return credit.refund(connection, Author("ann", "cli"), request_id, body, rows)


def test_receipts_are_read_from_the_archive(one_march: Month) -> None:
    asked = (one_march.requests[0], one_march.requests[9], one_march.workflow, one_march.refunded)
    before = [receipt(one_march, each) for each in asked]

    one_march.archive()

    assert [receipt(one_march, each) for each in asked] == before
    assert len(before[2].steps) == 2
    with pytest.raises(NotFound):
        receipt(one_march, one_march.requests[0], one_march.other.account.id)
    with pytest.raises(NotFound):
        receipt(one_march, one_march.requests[0][:-1] + "x")
    other = one_march.requests[0][:-4] + "ffff"
    with pytest.raises(NotFound):
        receipt(one_march, other)


def test_receipt_of_an_archive_that_is_away_is_unavailable(one_march: Month) -> None:
    one_march.archive()
    assert one_march.blobs._directory is not None
    shutil.rmtree(one_march.blobs._directory / "archive")

    with pytest.raises(Unavailable, match="is archived"):
        receipt(one_march, one_march.requests[0])
    with pytest.raises(Unavailable, match="is archived"):
        refund(one_march, one_march.requests[0])


def test_archived_charge_is_refunded_once_and_never_beyond_it(march: Month) -> None:
    march.archive()
    balance = march.books.balance().posted_nanos
    charged = receipt(march, march.requests[0]).closed.cost_nanos

    with pytest.raises(InvalidRequest, match="can be refunded"):
        refund(march, march.requests[0], amount="1")
    booked = refund(march, march.requests[0], reference="r")
    again = refund(march, march.requests[0], reference="r")

    assert (booked["repeated"], again["repeated"]) == (False, True)
    assert march.books.balance().posted_nanos == balance + charged
    with pytest.raises(InvalidRequest, match="can be refunded"):
        refund(march, march.requests[0])
    assert [each.amount_nanos for each in receipt(march, march.requests[0]).refunds] == [charged]
    assert march.findings() == []
    # Its charge stays in the ledger from now on.
    march.archive()
    assert march.findings() == []
    march.restore()
    assert march.findings() == []


def exported(month: Month, **chosen: Any) -> bytes:
    read = functools.partial(_read, month)
    values: dict[str, Any] = {"format": "csv", "profile": "native", **chosen}
    span = values.pop("span", Span(MARCH, APRIL + timedelta(days=1), ZoneInfo("Europe/Berlin")))
    filters = values.pop("filters", Filters())
    return b"".join(
        export(read, span, filters, footer=Footer(), blobs=month.blobs, **values)  # type: ignore[arg-type]
    )


def _read(month: Month, function: Any) -> Any:
    with month.database.snapshot() as connection:
        return function(connection)


@pytest.mark.parametrize("rows", [4, 20_000])
def test_exports_have_the_bytes_that_they_had_before(
    march: Month, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE_ROWS", rows)
    monkeypatch.setattr(native, "ROW_GROUP", 2 * rows)
    own = Filters((march.books.account.id,), (march.books.key.id,), ("m",))
    part = Span(LATE + timedelta(hours=3), LATE + timedelta(hours=9), ZoneInfo("UTC"))
    asked: list[dict[str, Any]] = [
        *({"format": format, "profile": profile} for format in ("csv", "parquet")
          for profile in ("native", "focus")),
        {"filters": own}, {"filters": own, "profile": "focus"}, {"span": part},
        {"margins": True}, {"margins": True, "profile": "focus"},
    ]  # fmt: skip
    before = [exported(march, **each) for each in asked]
    assert all(len(each) > 1000 for each in before)

    march.archive()

    assert [exported(march, **each) for each in asked] == before
    march.restore()
    assert [exported(march, **each) for each in asked] == before


def test_steps_of_an_archived_workflow_are_those_of_before(one_march: Month) -> None:
    with one_march.database.snapshot() as connection:
        before = read_steps(connection, one_march.workflow)
    made = one_march.archive()
    assert made.manifest is not None

    steps = Steps(read_pages(one_march.blobs, made.manifest, "receipt_steps"))

    asked = pa.chunked_array([[one_march.requests[0], one_march.workflow]])
    assert steps.until(asked) == {one_march.workflow: list(before)}


def test_export_names_the_file_that_is_missing_or_damaged(one_march: Month) -> None:
    made = one_march.archive()
    assert made.manifest is not None
    file = next(made.manifest.of("receipts"))
    assert one_march.blobs._directory is not None
    path = one_march.blobs._directory / file.key

    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Unavailable, match=f"{file.key} of the archive is damaged"):
        exported(one_march)
    path.unlink()
    with pytest.raises(Unavailable, match=f"{file.key} of the archive is missing"):
        exported(one_march)


def test_export_does_not_miss_a_month_that_is_archived_meanwhile(
    one_march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE_ROWS", 4)
    read = functools.partial(_read, one_march)
    span = Span(MARCH, APRIL, ZoneInfo("UTC"))
    tables = native.native_tables(
        read, span, Filters(), native.CSV_SCHEMA, ArchivedReceipts(read, one_march.blobs, ())
    )
    next(tables)
    one_march.archive()

    with pytest.raises(Unavailable, match="archived or restored meanwhile"):
        next(tables)


def test_usage_and_ledger_agree_with_what_they_were(march: Month) -> None:
    span = Span(MARCH, APRIL, ZoneInfo("UTC"))

    def read() -> tuple[Any, int]:
        with march.database.snapshot() as connection:
            moved = entries(connection, march.books.account.id, limit=100)
            return usage(connection, span, ("day", "model"), Filters()), sum(
                each.amount_nanos for each in moved
            )

    before = read()

    march.archive()

    assert read() == before
    with march.database.snapshot() as connection:
        listed = entries(connection, march.books.account.id, limit=100, kind="charge")
        archived = [each for each in listed if each.actor == "archive"]
        assert archived
        assert archived[0].reason == f"archived charges of {MONTH}"


def reported(month: Month, span: Span, by: tuple[str, ...], filters: Filters) -> list[Group]:
    with month.database.snapshot() as connection:
        report = stored_usage(connection, span, by, filters)
    asyncio.run(add_archived(report, month.database, month.blobs))
    return report.groups


def test_usage_in_detail_is_what_it_was(march: Month) -> None:
    own = Filters((march.books.account.id,), (march.books.key.id,), ("m",), ("text-generation",))
    tag = 'Ω "quoted", \n new line'
    whole, part = Span(MARCH, APRIL, UTC), Span(LATE + timedelta(hours=1, seconds=1), APRIL, UTC)
    asked: list[tuple[Span, tuple[str, ...], Filters]] = [
        (part, (), Filters()),
        (part, ("account", "key", "model", "task", "hour"), Filters()),
        (Span(LATE, APRIL + timedelta(hours=3), UTC), ("minute",), own),
        (Span(MARCH, APRIL, ZoneInfo("Asia/Kathmandu")), ("day", "account"), Filters()),
        (whole, ("tag:tag", "tag:none"), Filters()),
        (whole, ("month",), Filters(tags={"tag": tag, "empty": ""})),
        (whole, ("device", "dtype", "served_by"), own),
        (whole, ("tag:tag",), Filters(account_ids=())),
    ]
    before = [reported(march, *each) for each in asked]
    assert all(before[:-1])
    assert before[-1] == []

    march.archive()

    assert [reported(march, *each) for each in asked] == before
    # Its charge and its receipts are in the database again, and in the files.
    refund(march, march.requests[0], reference="r")
    again = [reported(march, *each) for each in asked]
    assert [sum(each.cost_nanos for each in groups) for groups in again] == [
        sum(each.cost_nanos for each in groups) for groups in before
    ]
    with march.database.snapshot() as connection, pytest.raises(Gone, match=MONTH):
        usage(connection, part, (), Filters())


def test_reports_over_http_are_what_they_were(
    one_march: Month, valkey: str, tmp_path: Path
) -> None:
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    settings = Settings(
        home=tmp_path, catalog=catalog, database_url=one_march.url, redis_url=valkey,
        namespace=uuid.uuid4().hex, pepper=PEPPER, blob_url=f"file://{one_march.blobs._directory}",
    )  # fmt: skip
    with one_march.database.transaction() as connection:
        secret, _ = create_key(
            connection, one_march.other.account.id, pepper=PEPPER, scopes=("admin", "read")
        )
        *_, first = entries(connection, one_march.books.account.id, limit=100, kind="charge")
    span = {"from": "2026-03-31", "to": "2026-03-31"}
    start = {"start_time": int(LATE.timestamp()), "bucket_width": "1m", "limit": 200}
    asked: list[tuple[str, str, Any]] = [
        (one_march.books.secret, "/v1/usage", {**span, "group_by": "tag:tag,key"}),
        (one_march.books.secret, "/v1/usage", {**span, "tz": "Asia/Kathmandu", "tag:empty": ""}),
        (one_march.books.secret, f"/v1/ledger/{first.id}", {}),
        (secret, "/v1/admin/margins", {**span, "group_by": "device,account"}),
        (secret, "/v1/organization/usage/completions", start),
    ]

    def answers() -> list[Any]:
        found = []
        with TestClient(create_app(settings)) as client:
            for key, path, params in asked:
                headers = {"Authorization": f"Bearer {key}"}
                answer = client.get(path, params=params, headers=headers)
                assert answer.status_code == 200, answer.text
                # Charges that follow each other are one entry, here of one charge.
                found.append({**answer.json(), "as_of": None, "actor": None, "reason": None})
        return found

    before = answers()

    one_march.archive()

    assert answers() == before


def test_usage_reads_only_the_row_groups_of_its_span(
    one_march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_march.archive()
    read: list[int] = []
    single = ParquetFile.read_row_group

    def counted(self: ParquetFile, group: int, **options: Any) -> Any:
        read.append(group)
        return single(self, group, **options)

    monkeypatch.setattr(ParquetFile, "read_row_group", counted)
    minute = Span(LATE + timedelta(hours=1), LATE + timedelta(hours=1, seconds=60), UTC)

    (group,) = reported(one_march, minute, ("minute",), Filters())

    assert group.requests == 3
    assert len(read) == 1


def test_usage_names_the_file_that_is_missing_or_damaged(one_march: Month) -> None:
    made = one_march.archive()
    assert made.manifest is not None
    file = next(made.manifest.of("receipts"))
    assert one_march.blobs._directory is not None
    path = one_march.blobs._directory / file.key
    data = bytearray(path.read_bytes())
    booked = schema_of("receipts").get_field_index("settled_at")
    chunk = ParquetFile(path).metadata.row_group(0).column(booked)

    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Unavailable, match=f"{file.key} of the archive is damaged"):
        reported(one_march, Span(LATE, APRIL, UTC), ("minute",), Filters())
    path.unlink()
    with pytest.raises(Unavailable, match=f"{file.key} of the archive is missing"):
        reported(one_march, Span(LATE, APRIL, UTC), ("minute",), Filters())


def found_entry(month: Month, id: int) -> tuple[LedgerEntry, list[ChargedEntry]]:
    with month.database.snapshot() as connection:
        found = find_entry(connection, month.books.account.id, id)
    return read_archived_entry(month.blobs, found) if isinstance(found, ArchivedEntry) else found


def test_archived_ledger_entries_have_their_requests(march: Month) -> None:
    owner = march.books.account.id
    with march.database.snapshot() as connection:
        charges = entries(connection, owner, limit=100, kind="charge")
    before = {each.id: found_entry(march, each.id) for each in charges}
    march.archive()
    with march.database.snapshot() as connection:
        listed = entries(connection, owner, limit=100, kind="charge")
    runs = [each for each in listed if each.actor == "archive"]
    assert any(run.requests > 3 for run in runs)

    found = [found_entry(march, run.id) for run in runs]

    assert [entry for entry, _ in found] == runs
    for run, (_, requests) in zip(runs, found, strict=True):
        assert len(requests) == run.requests
        assert sum(each.cost_nanos for each in requests) == -run.amount_nanos
    # A charge that is part of a run is still found by its own id.
    inside = set(before) - {each.id for each in listed}
    assert inside
    assert {id: found_entry(march, id) for id in inside} == {id: before[id] for id in inside}
    with pytest.raises(LookupError, match="unknown entry"):
        found_entry(march, max(before) + 1000)
    with march.database.snapshot() as connection:
        others = find_entry(connection, march.other.account.id, max(inside))
    assert isinstance(others, ArchivedEntry)
    with pytest.raises(LookupError, match="unknown entry"):
        read_archived_entry(march.blobs, others)


def test_whatif_reads_archived_months(march: Month) -> None:
    cheap = Price((Component("input_token", 1), Component("output_token", 2)))

    def ask() -> list[RepricedUsage]:
        with march.database.snapshot() as connection:
            return whatif(
                connection, {"m": cheap}, starts_at=LATE + timedelta(hours=3),
                ends_at=APRIL + timedelta(days=1), account_id=march.books.account.id,
                blobs=march.blobs,
            )  # fmt: skip

    before = ask()

    march.archive()

    assert ask() == before
    with march.database.snapshot() as connection, pytest.raises(Gone, match=MONTH):
        whatif(connection, {"m": cheap}, starts_at=LATE, ends_at=APRIL)


def corrected(month: Month, *, dry_run: bool, reference: str = "r") -> CorrectionsView:
    cheap = Price((Component("input_token", 1), Component("output_token", 2)))
    ends_at = APRIL + timedelta(days=1)
    archived = asyncio.run(
        credit.archived_corrections(
            month.database, month.blobs, "m", cheap,
            starts_at=LATE, ends_at=ends_at, account=None, dry_run=dry_run,
        )
    )  # fmt: skip
    with month.database.transaction() as connection:
        return credit.correct(
            connection, Author("ann", "cli"), "m", cheap,
            starts_at=LATE, ends_at=ends_at, account=None, reference=reference, reason="typo",
            dry_run=dry_run, archived=archived,
        )  # fmt: skip


def test_archived_charges_are_corrected_once(march: Month) -> None:
    before = corrected(march, dry_run=True)
    march.archive()
    balance = march.books.balance().posted_nanos

    planned = corrected(march, dry_run=True)
    made = corrected(march, dry_run=False)
    again = corrected(march, dry_run=False)

    assert planned == before
    assert made["booked"] == planned["total"]
    assert (again["requests"], again["booked"]) == (0, "0")
    assert march.books.balance().posted_nanos > balance
    assert march.findings() == []
    march.archive()
    march.restore()
    assert march.findings() == []


def test_many_archived_charges_are_corrected_in_pages(
    one_march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = corrected(one_march, dry_run=True)
    one_march.archive()
    with one_march.database.snapshot() as connection, pytest.raises(Gone, match="a correction"):
        plan(connection, "m", PRICE, starts_at=LATE, ends_at=APRIL)
    monkeypatch.setattr(credit, "BROUGHT_BACK_MAX", 2)

    made = corrected(one_march, dry_run=False)

    assert made["requests"] > 2
    assert made["booked"] == before["total"]
    assert corrected(one_march, dry_run=False)["booked"] == "0"
    assert one_march.findings() == []


def test_correction_does_not_miss_a_month_that_is_archived_meanwhile(one_march: Month) -> None:
    one_march.archive()
    nothing = ArchivedCorrections((), ())
    with (
        one_march.database.snapshot() as connection,
        pytest.raises(Unavailable, match="archived or restored meanwhile"),
    ):
        plan(connection, "m", PRICE, starts_at=LATE, ends_at=APRIL, archived=nothing)
    after = APRIL + timedelta(days=1)
    with one_march.database.snapshot() as connection:
        assert plan(connection, "m", PRICE, starts_at=APRIL, ends_at=after) == []


def test_lists_name_the_months_that_they_lack(one_march: Month) -> None:
    nothing: Any = None
    lookup = Lookup(one_march.database, nothing, one_march.blobs, {}, namespace="t")
    one_march.archive()
    owner = one_march.books.account.id

    async def ask(**values: Any) -> tuple[Any, Any]:
        choice = RequestFilter(owner, status="succeeded", **values)
        page = await lookup.list(choice, limit=100, cursor=None)
        return page, await lookup.summarize(choice)

    page, summary = asyncio.run(ask())
    assert (page.archived, summary.archived) == ([MONTH], [MONTH])
    page, summary = asyncio.run(ask(starts_at=APRIL))
    assert (page.archived, summary.archived) == ([], [])
    assert summary.requests == 2


def test_rollups_of_an_archived_month_are_not_rebuilt(one_march: Month) -> None:
    one_march.archive()

    assert rebuild_rollups(one_march.database, AUTHOR) == []
    assert one_march.findings() == []


def test_erasing_is_refused_while_an_archive_is_not_complete(
    one_march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(account_id=one_march.books.account.id, request_id=one_march.requests[0])
    with one_march.database.snapshot() as connection:
        check_target(connection, target)
    kill_at(monkeypatch, "archive_written")
    with pytest.raises(Killed):
        one_march.archive()

    with (
        one_march.database.snapshot() as connection,
        pytest.raises(Conflict, match="complete them first"),
    ):
        check_target(connection, target)


def test_missing_or_changed_sums_are_found(one_march: Month) -> None:
    one_march.archive()
    with one_march.database.transaction() as connection:
        (mark,) = list_archives(connection)
        connection.exec_driver_sql("UPDATE archived_charges SET amount_nanos = amount_nanos + 1")
        connection.exec_driver_sql("UPDATE archived_spending SET charge_nanos = 0")
        connection.exec_driver_sql("UPDATE archived_windows SET charge_nanos = 0")

    assert mark.removed_nanos
    assert {each.split()[0] for each in one_march.findings()} >= {"R2", "R4", "R9", "R11", "R13"}
