"""Rows of the console's jobs: the same job runs once, and addresses have a bound."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from gateway.console.jobs import store
from gateway.console.jobs.store import NewJob
from gateway.sql.database import Database

NOW = datetime.now(UTC)
JOB = NewJob(kind="usage", digest="d", starter="ann", act="usage.read", back="/console/usage")


def test_second_gateway_gets_the_job_that_runs(database: Database) -> None:
    with database.transaction() as connection:
        assert store.begin(connection, "a", JOB, NOW) == "a"
        assert store.begin(connection, "b", JOB, NOW) == "a"
        assert store.begin(connection, "c", replace(JOB, digest="e"), NOW) == "c"
        store.end(connection, "a", "done")

        assert store.begin(connection, "b", JOB, NOW) == "b"


def test_job_of_a_gateway_that_ended_is_started_again(database: Database) -> None:
    with database.transaction() as connection:
        store.begin(connection, "a", JOB, NOW - timedelta(minutes=1))

        assert store.begin(connection, "b", JOB, NOW) == "b"
        lost = store.find(connection, "a")
    assert lost is not None
    assert (lost.state, lost.problem) == ("failed", store.LOST)


def test_address_with_a_long_query_is_stored_without_it(database: Database) -> None:
    with database.transaction() as connection:
        store.begin(connection, "a", replace(JOB, back=f"/console/usage?tag={'x' * 5000}"), NOW)

        found = store.find(connection, "a")
    assert found is not None
    assert found.back == "/console/usage"
