"""Erasing reaches archived months: files are written again, and the seal of the money stays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError

from gateway.archive import rewrite
from gateway.archive.files import read_pages
from gateway.archive.manifest import Manifest
from gateway.archive.marks import find_archive
from gateway.audit_log import Author
from gateway.errors import NotFound
from gateway.failpoints import Failpoint
from gateway.operations.retention import ErasureBody, erase
from gateway.retention.erasure import Eraser
from gateway.tables.archives import archives
from gateway.tables.core import chores, receipts
from tests.archive.months import MARCH, MONTH, Month
from tests.archive.test_archive import Killed

TAG = 'tag=Ω "quoted", \n new line'


async def _erase(month: Month, **target: object) -> Counter[str]:
    body = ErasureBody.model_validate(target)
    eraser, counts = Eraser(month.database, month.blobs, None), Counter[str]()
    while True:
        step = await erase(month.database, eraser, Author("ann", "cli"), body)
        counts.update(step["erased"])
        if step["cursor"] is None:
            return counts
        body = body.model_copy(update={"cursor": step["cursor"]})


def erased(month: Month, **target: object) -> Counter[str]:
    return asyncio.run(_erase(month, **target))


def manifest(month: Month) -> Manifest:
    with month.database.snapshot() as connection:
        found = find_archive(connection, MONTH)
    assert found is not None
    assert found.manifest is not None
    return found.manifest


def tags(month: Month) -> Iterator[tuple[str, int]]:
    """Yield the requests with metadata in the files, and their accounts."""
    for page in read_pages(month.blobs, manifest(month), "receipts"):
        for row in page.to_pylist():
            if row["metadata"] is not None:
                yield row["request_id"], row["account_id"]


def files(month: Month) -> set[str]:
    folder = month.blobs._directory
    assert folder is not None
    names = {str(each.relative_to(folder)) for each in folder.rglob("*.parquet")}
    assert names >= {file.key for file in manifest(month).files}
    return names


def test_tag_is_erased_in_files_and_the_seal_stays(march: Month) -> None:
    march.archive()
    before, owner = manifest(march), march.books.account.id
    dry = erased(march, tag=TAG, account=owner, dry_run=True)
    assert manifest(march) == before

    done = erased(march, tag=TAG, account=owner)

    after = manifest(march)
    assert done["archived_receipts"] == dry["archived_receipts"] > 20
    assert {account for _, account in tags(march)} == {march.other.account.id}
    assert after.sha256 == before.sha256
    assert after.personal == before.personal - done["archived_receipts"]
    assert {each.reason for each in after.rewrites} == {"erasure: requests with a tag"}
    assert files(march) == {file.key for file in after.files}
    assert asyncio.run(march.archiver().verify(MONTH)) == after
    assert march.findings() == []
    assert erased(march, tag=TAG, account=owner)["archived_receipts"] == 0
    march.restore()
    with march.database.snapshot() as connection:
        tagged = connection.execute(
            select(receipts.c.account_id).where(receipts.c["metadata"].is_not(None))
        )
        assert {row.account_id for row in tagged if row.account_id == owner} == set()
    assert march.findings() == []


def test_one_request_is_erased_in_its_file(one_march: Month) -> None:
    one_march.archive()
    request_id = next(id for id, account in tags(one_march))

    done = erased(one_march, request=request_id)

    assert done["archived_receipts"] == 1
    assert request_id not in dict(tags(one_march))
    with pytest.raises(NotFound):
        erased(one_march, request="req_unknown")


@pytest.mark.parametrize("point", ["archive_rewritten", "archive_switched"])
def test_killed_erasure_is_completed_by_the_next(
    point: str, one_march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_march.archive()

    def reach(reached: Failpoint) -> None:
        if reached == point:
            raise Killed

    monkeypatch.setattr(rewrite, "reach", reach)
    with pytest.raises(Killed):
        erased(one_march, tag=TAG)
    monkeypatch.undo()
    # The process did not release its lease.
    with one_march.database.transaction() as connection:
        connection.execute(update(chores).values(due_at=MARCH))
    asyncio.run(one_march.archiver().verify(MONTH))

    erased(one_march, tag=TAG)

    assert list(tags(one_march)) == []
    assert files(one_march) == {file.key for file in manifest(one_march).files}
    asyncio.run(one_march.archiver().verify(MONTH))
    assert one_march.findings() == []


def test_manifest_cannot_change_its_amounts_or_lose_its_record(march: Month) -> None:
    march.archive()
    erased(march, request=next(id for id, _ in tags(march)))
    found = manifest(march)

    def refused(**changes: object) -> None:
        values = {**msgspec.to_builtins(found), "personal": 0, **changes}
        with pytest.raises(DBAPIError), march.database.transaction() as connection:
            connection.execute(update(archives).values(manifest=values))

    record = {"at": "x", "reason": "x", "rows": 1}
    refused(rewrites=[])
    refused(rewrites=[record, record], charge_nanos=1)
    refused(rewrites=[record, record], transfers={})
    refused(rewrites=[record, record], personal=found.personal)
