"""Ids sort by the time of their creation, also within a millisecond."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

from gateway.ids import first_id, is_id, new_id, time_of


def test_ids_of_one_process_sort_as_they_were_created() -> None:
    made = []
    for _ in range(200):
        made.append(new_id("a_"))
        # A step of the clock's part in an id is 244 ns long.
        until = time.time_ns() + 1_000
        while time.time_ns() < until:
            pass

    assert made == sorted(made)


def test_id_is_a_uuid_of_version_seven_and_tells_its_time() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)

    made = new_id("a_")

    assert is_id("a_", made)
    assert UUID(made.removeprefix("a_")).version == 7
    assert before <= time_of("a_", made) <= datetime.now(UTC)
    assert first_id("a_", before) <= made
