"""The time to the first output in each minute of the last hour."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import pytest
from sqlalchemy import select

from gateway.billing.usage import traffic
from gateway.billing.usage.traffic import MINUTES, FirstOutputs, TrafficHour
from gateway.performance import SUCCESSES_MIN
from gateway.sql.database import Database
from gateway.tables.core import receipts
from tests.console.seeding import Seeder
from tests.stack import CATALOG


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    path = tmp_path / "catalog.yaml"
    path.write_text(CATALOG.format(veo="0.40"))
    return path


def order(database: Database, catalog: Path, *moments: datetime) -> None:
    with database.transaction() as connection:
        seeder = Seeder(connection, catalog, seed=len(moments))
        account, key = seeder.account(f"a{moments[0].timestamp():.0f}", "25")
        chat, video = seeder.entry("text-generation"), seeder.entry("text-to-video")
        for at in moments:
            seeder.request(account, key, at, entry=chat)
            seeder.request(account, key, at, entry=video)


def times_by_minute(database: Database) -> Mapping[int, list[int]]:
    """Return the times to the first output by minute from all receipts, the shortest first."""
    by_minute: defaultdict[int, list[int]] = defaultdict(list)
    succeeded = select(receipts).where(receipts.c.status == "succeeded")
    with database.transaction() as connection:
        for row in connection.execute(succeeded):
            if us := row.timings.get("first_token_us"):
                by_minute[int(row.settled_at.timestamp()) // 60].append(us)
    return {minute: sorted(each) for minute, each in by_minute.items()}


def p95(times: Sequence[int]) -> int:
    return times[math.ceil(0.95 * len(times)) - 1]


async def test_each_minute_has_its_p95_and_is_read_once(database: Database, catalog: Path) -> None:
    now = datetime.now(UTC)
    minute = now.replace(second=5, microsecond=0)
    order(
        database,
        catalog,
        *(
            minute - timedelta(minutes=back, seconds=-second)
            for back in (3, 7, 44)
            for second in range(12)
        ),
    )
    hour = TrafficHour(database)
    with (
        mock.patch.object(traffic, "FRESH_S", 0.0),
        mock.patch.object(
            traffic, "read_first_outputs", side_effect=traffic.read_first_outputs
        ) as read,
    ):
        for _ in range(MINUTES // traffic.MINUTES_READ_MAX + 1):
            await hour.refresh()
        asked = [each for call in read.call_args_list for each in call.args[1]]
        found = hour.first_outputs(now)

    assert len(asked) == len(set(asked))
    last = int(now.timestamp()) // 60
    by_minute = {last - MINUTES + 1 + at: us for at, us in enumerate(found) if us is not None}
    times = times_by_minute(database)
    whole = sorted(us for of_minute in times.values() for us in of_minute)
    assert by_minute == {minute: p95(each) for minute, each in times.items()}
    assert len(by_minute) == 3
    assert hour.first_output() == FirstOutputs(len(whole), p95(whole))


async def test_few_requests_have_no_p95_of_the_hour(database: Database, catalog: Path) -> None:
    order(database, catalog, datetime.now(UTC) - timedelta(minutes=3))
    hour = TrafficHour(database)

    await hour.refresh()

    found = hour.first_output()
    assert 0 < found.requests < SUCCESSES_MIN
    assert found.p95_us is None
