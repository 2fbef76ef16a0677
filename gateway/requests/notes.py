"""Notes of workers on open requests, stored in SQL with their jobs.

A note holds, for example, a job's id at an upstream. The queue passes it to the next attempt; the
copy in SQL is for jobs that are re-enqueued after the queue was wiped.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from sqlalchemy import Connection, and_, select, update

from gateway.ledger.workflow_plan import read_step_id
from gateway.tables.core import holds
from gateway.tables.workflows import steps
from workers.contract.jobs import decode_job, encode


def keep_notes(connection: Connection, notes: Mapping[str, str]) -> None:
    """Store notes, by the id of a request or step, in the jobs of those that are open."""
    for id in sorted(notes):
        step = read_step_id(id)
        if step is None:
            table, row = holds, holds.c.request_id == id
        else:
            table, row = (
                steps,
                and_(
                    steps.c.request_id == step.request_id,
                    steps.c.name == step.name,
                    steps.c.attempt == step.attempt,
                ),
            )
        payload = connection.scalar(select(table.c.job).where(row).with_for_update())
        if payload is not None:
            job = msgspec.structs.replace(decode_job(payload), note=notes[id])
            connection.execute(update(table).where(row).values(job=encode(job)))
