"""Notes of workers that belong to open requests, kept in SQL with their jobs.

A note says for example under which number a job was ordered at an upstream. The queue hands it to
the next holder by itself; it is kept here for the job that is queued again after a wipe.
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
    """Write the notes (by the id of a request or step) into the jobs of those that are open."""
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
