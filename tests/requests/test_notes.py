"""Notes of workers are kept with the jobs of open requests."""

from __future__ import annotations

from gateway.ledger.holds import hold, read_jobs
from gateway.requests.notes import keep_notes
from gateway.sql.database import Database
from tests.ledger.books import done, open_books
from workers.contract.jobs import decode_job


def test_note_is_in_the_job_that_is_queued_again(database: Database) -> None:
    books = open_books(database, credit=10_000)
    first, second = books.order(), books.order()
    with database.transaction() as connection:
        hold(connection, [first, second])
        keep_notes(connection, {first.request_id: "one"})
        keep_notes(connection, {first.request_id: "two", "req_unknown": "x"})

        found = read_jobs(connection, [first.request_id, second.request_id])
    jobs = {one.request_id: decode_job(one.job) for one in found}
    assert jobs[first.request_id].note == "two"
    assert jobs[second.request_id].note == ""
    assert books.settle(done(first.request_id))[0] is not None


def test_note_after_the_end_changes_nothing(database: Database) -> None:
    books = open_books(database, credit=10_000)
    placed = books.order()
    with database.transaction() as connection:
        hold(connection, [placed])
    books.settle(done(placed.request_id))

    with database.transaction() as connection:
        keep_notes(connection, {placed.request_id: "late", f"{placed.request_id}.draw.1": "x"})

    assert books.open_holds() == 0
