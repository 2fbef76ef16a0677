"""The kinds of things with a retention: the setting of each, its oldest row, and how it is cleared.

Each is cleared in batches of one short transaction, whose rows are found by an index. A batch that
runs twice, or concurrently with itself, does no harm.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, TypeAlias

from sqlalchemy import Connection, delete, not_, select

from gateway.accounts.login_links import delete_ended_links
from gateway.accounts.sessions import delete_ended_sessions
from gateway.audit_log import delete_expired
from gateway.feedback.store import delete_older
from gateway.files.retention import Cleared, MediaStore
from gateway.files.store import Files, in_use
from gateway.ids import first_request_id, time_of
from gateway.ledger.holds import delete_expired_outputs, delete_idempotency_keys
from gateway.notices.store import ENDING
from gateway.notices.store import delete_expired as delete_expired_notices
from gateway.retention.aged import Aged, Ageing
from gateway.retention.budget_windows import AGED, WINDOWS, delete_old_windows
from gateway.retention.metadata import BATCHES, REQUESTS, Tagged
from gateway.settings import Settings, in_days
from gateway.sql.database import Database
from gateway.tables.audit import audit_events
from gateway.tables.batches import batch_results, batches, files
from gateway.tables.core import idempotency, outputs
from gateway.tables.feedback import feedback
from gateway.tables.files import media
from gateway.tables.notices import notices
from gateway.tables.users import console_jobs, login_links, sessions
from gateway.tables.voices import voice_recordings
from gateway.tables.webhooks import webhook_deliveries
from gateway.voices.store import delete_ended_recordings
from gateway.webhooks.deliveries import delete_ended
from workers.contract.blobs import Blobs

ROWS_MAX: Final = 500
"""Rows deleted in one transaction: about 10 ms of SQLite's only writer."""
AT_ONCE: Final = timedelta(0)
_DAY: Final = timedelta(days=1)

Batch: TypeAlias = Callable[[], Awaitable[Cleared]]
Delete: TypeAlias = Callable[[Connection, datetime], int]


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    setting: str
    """Name of its setting; empty if its rows end by themselves."""
    kept: timedelta | None
    """Time from the moment of ``oldest`` until a row is due; None: for ever."""
    clear: Batch
    rows: Ageing | None
    """Its rows by the moment from which each is kept: creation, end or expiry; None if they are
    not in the database."""
    by_day: bool = False
    """Whether rows become due at midnight, in UTC."""

    def due_at(self, oldest: datetime) -> datetime:
        """Return since or from when a row is due."""
        due_at = oldest + (self.kept or AT_ONCE)
        return _midnight(due_at) + _DAY if self.by_day else due_at

    def due_before(self, now: datetime) -> datetime:
        """Return the moment before which a row began that is due."""
        return (_midnight(now) if self.by_day else now) - (self.kept or AT_ONCE)


def all_kinds(settings: Settings, database: Database, blobs: Blobs) -> tuple[Kind, ...]:
    """Return every kind, under the settings of the installation."""
    outputs_kept = timedelta(hours=settings.output_retention_hours)
    keys_kept = timedelta(days=settings.idempotency_retention_days)
    metadata_kept = in_days(settings.metadata_retention_days)
    webhooks_kept = in_days(settings.webhook_retention_days)
    notices_kept = in_days(settings.notice_retention_days)
    audit_kept = in_days(settings.audit_retention_days)
    batches_kept = in_days(settings.batch_retention_days)
    windows_kept = in_days(settings.budget_window_retention_days)
    events_kept = timedelta(minutes=settings.event_retention_minutes)
    media_store = MediaStore(database, blobs, retention=outputs_kept)
    output, file = "TOLLGATE_OUTPUT_RETENTION_HOURS", "TOLLGATE_FILE_RETENTION_DAYS"

    def in_sql(batch: Delete) -> Batch:
        async def clear() -> Cleared:
            rows = await database.slow_write(lambda each: batch(each, datetime.now(UTC)))
            return Cleared(rows, rows == ROWS_MAX)

        return clear

    def older(clear: Callable[..., int], kept: timedelta | None) -> Delete:
        return lambda each, now: clear(each, now - (kept or AT_ONCE), limit=ROWS_MAX)

    def without(kept: timedelta | None, rows: Tagged) -> Batch:
        async def clear() -> Cleared:
            before = datetime.now(UTC) - (kept or AT_ONCE)
            return await database.slow_write(lambda each: rows.clear(each, before))

        return clear

    return (
        Kind(
            "outputs",
            output,
            AT_ONCE,
            in_sql(lambda each, now: delete_expired_outputs(each, now, limit=ROWS_MAX)),
            Aged(outputs.c.expires_at),
        ),
        # Attachments and outputs of requests, and large inputs: checked when they can be due.
        Kind("media", output, AT_ONCE, media_store.delete_ended, Aged(media.c.clear_at)),
        Kind(
            "files",
            file,
            AT_ONCE,
            Files(database, blobs).delete_ended,
            Aged(files.c.expires_at, (not_(in_use()),)),
        ),
        # The queue server deletes them.
        Kind("event_logs", "TOLLGATE_EVENT_RETENTION_MINUTES", events_kept, _nothing, None),
        # They are kept until they are deleted, or were never completed.
        Kind(
            "voices",
            "",
            AT_ONCE,
            lambda: delete_ended_recordings(database, blobs),
            Aged(voice_recordings.c.clear_at),
        ),
        *(
            Kind(
                rows.kind,
                "TOLLGATE_METADATA_RETENTION_DAYS",
                metadata_kept,
                without(metadata_kept, rows),
                rows,
            )
            for rows in (REQUESTS, BATCHES)
        ),
        Kind(
            "feedback",
            "TOLLGATE_METADATA_RETENTION_DAYS",
            metadata_kept,
            in_sql(older(delete_older, metadata_kept)),
            Aged(
                feedback.c.request_id,
                place_at=first_request_id,
                moment=partial(time_of, "req_"),
            ),
        ),
        Kind(
            "idempotency_keys",
            "TOLLGATE_IDEMPOTENCY_RETENTION_DAYS",
            keys_kept,
            in_sql(older(delete_idempotency_keys, keys_kept)),
            Aged(idempotency.c.created_at),
        ),
        Kind(
            "webhooks",
            "TOLLGATE_WEBHOOK_RETENTION_DAYS",
            webhooks_kept,
            in_sql(older(delete_ended, webhooks_kept)),
            Aged(webhook_deliveries.c.ended_at),
        ),
        Kind(
            "notices",
            "TOLLGATE_NOTICE_RETENTION_DAYS",
            notices_kept,
            in_sql(older(delete_expired_notices, notices_kept)),
            Aged(notices.c.created_at, (ENDING,)),
        ),
        Kind(
            "batches",
            "TOLLGATE_BATCH_RETENTION_DAYS",
            batches_kept,
            in_sql(older(_delete_batches, batches_kept)),
            Aged(batches.c.ended_at),
        ),
        Kind(
            WINDOWS,
            "TOLLGATE_BUDGET_WINDOW_RETENTION_DAYS",
            windows_kept,
            in_sql(older(delete_old_windows, windows_kept)),
            AGED,
        ),
        *(
            Kind(name, "", _DAY, in_sql(_ended_a_day_ago(clear)), Aged(column))
            for name, clear, column in (
                ("sessions", delete_ended_sessions, sessions.c.ends_at),
                ("login_links", delete_ended_links, login_links.c.ends_at),
                ("console_jobs", _delete_jobs, console_jobs.c.started_at),
            )
        ),
        Kind(
            "audit_events",
            "TOLLGATE_AUDIT_RETENTION_DAYS",
            audit_kept,
            in_sql(
                lambda each, now: delete_expired(
                    each, _midnight(now) - (audit_kept or AT_ONCE), limit=ROWS_MAX
                )
            ),
            Aged(audit_events.c.at),
            by_day=True,
        ),
    )


def _ended_a_day_ago(
    clear: Callable[..., int],
) -> Callable[[Connection, datetime], int]:
    return lambda connection, now: clear(connection, now - _DAY, limit=ROWS_MAX)


def _delete_jobs(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete the console's jobs that started before a moment, with their results."""
    table = console_jobs.c
    old = select(table.id).where(table.started_at < before).order_by(table.started_at).limit(limit)
    return connection.execute(delete(console_jobs).where(table.id.in_(old))).rowcount


def _delete_batches(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete batches that ended before a moment."""
    table = batches.c
    old = select(table.id).where(table.ended_at < before).order_by(table.ended_at).limit(limit)
    ids = connection.execute(old).scalars().all()
    # Lines that were not written into files, because the batch could not be run.
    connection.execute(delete(batch_results).where(batch_results.c.batch_id.in_(ids)))
    return connection.execute(delete(batches).where(table.id.in_(ids))).rowcount


async def _nothing() -> Cleared:
    return Cleared(0, False)


def _midnight(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)
