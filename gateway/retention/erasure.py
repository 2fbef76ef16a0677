"""Erases what is personal of a request, of all requests with a tag, or of an account.

Money stays: receipts with their amounts, transfers, invoices. Erasing runs in bounded steps, each
of which finds what is left, so running it again completes a run that was interrupted. Within a
step, what identifies a request (its metadata) is erased last.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Delete,
    Table,
    and_,
    delete,
    exists,
    func,
    or_,
    select,
    update,
)

from gateway.archive.marks import archives_with, list_archives, unfinished_months
from gateway.checks.entered import check_text
from gateway.errors import Conflict, InvalidRequest, NotFound, Unavailable
from gateway.files.retention import delete_blobs
from gateway.retention.identities import PARTS
from gateway.sql.database import Database, upsert
from gateway.sql.outages import QUEUE_OUTAGE
from gateway.tables.batches import batches, files
from gateway.tables.core import accounts, holds, idempotency, outputs, receipts
from gateway.tables.feedback import feedback
from gateway.tables.files import media
from gateway.tables.retention import erasures
from gateway.tables.set_aside import set_aside
from gateway.tables.users import console_jobs
from gateway.tables.voices import voice_recordings
from gateway.tables.webhooks import webhook_deliveries
from gateway.tables.workflows import receipt_steps
from workers.contract.blobs import Blobs
from workers.contract.streams import EventLog

log = logging.getLogger(__name__)

ROWS_MAX: Final = 500
"""Requests that one step erases, and rows of one kind that it changes."""
SCANNED_MAX: Final = 20_000
"""Requests of which one step reads the tags."""
BLOBS_MAX: Final = 100
"""Requests, files or voices whose blobs one step deletes."""


ID_CHARS: Final = 36
"""Length of the id of a request."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to erase: one request, the requests with a tag (of an account, or of all), or an
    account with everything."""

    account_id: int | None = None
    request_id: str | None = None
    tag: tuple[str, str] | None = None

    @property
    def subject(self) -> str:
        """Name of the target in the audit log, which must not repeat what is erased."""
        if self.request_id is not None:
            return f"request {self.request_id}"
        if self.tag is not None:
            return "requests with a tag"
        return f"account {self.account_id}"

    @property
    def whole_account(self) -> bool:
        return self.request_id is None and self.tag is None

    def matches(self, table: Table) -> ColumnElement[bool]:
        """Return the condition on holds or receipts."""
        found = []
        if self.account_id is not None:
            found.append(table.c.account_id == self.account_id)
        if self.request_id is not None:
            found.append(table.c.request_id == self.request_id)
        if self.tag is not None:
            key, value = self.tag
            found.append(table.c["metadata"][key].as_string() == value)
        return and_(*found)


@dataclass(frozen=True, slots=True)
class ErasureStep:
    """Number of rows, blobs and names erased (or to be erased), by kind; where the next step
    begins, or None."""

    counts: Mapping[str, int] = field(default_factory=dict)
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class _Page:
    found: Sequence[Any]
    """Id, account and acceptance of the requests that match."""
    stored: Sequence[tuple[int, str]]
    """Account and id of those that can have blobs."""
    cursor: str | None


class Eraser:
    """``events``: the event logs in the queue server; without them, they end by themselves."""

    def __init__(self, database: Database, blobs: Blobs, events: EventLog | None) -> None:
        self._database = database
        self._blobs = blobs
        self._events = events

    async def step(
        self, target: Target, cursor: str | None = None, *, dry: bool = False
    ) -> ErasureStep:
        """Erase a bounded part of a target, starting after ``cursor``; ``dry`` only counts it.

        Raise ``Conflict`` if the target has open requests, ``NotFound``, ``Unavailable`` if blobs
        cannot be deleted, or ``InvalidRequest`` if the cursor is not valid.
        """
        begun = cursor is not None
        await self._database.slow(functools.partial(check_target, target=target, begun=begun))
        phase, _, position = (cursor or "requests:").partition(":")
        if phase == "requests":
            done = await self._erase_requests(target, position, dry=dry)
            if target.tag is not None and done.cursor is None and not dry:
                # A request that was accepted meanwhile, and is still open, has no receipt yet.
                await self._database.slow(functools.partial(check_target, target=target))
            following = "media"
            if done.cursor is None and await self._database.slow(_has_archives):
                return ErasureStep(done.counts, "archives:")
        elif phase == "archives":
            done = await self._erase_archived(target, position, dry=dry)
            following = "media"
        elif phase in _STORED and target.whole_account:
            done = await self._erase_stored(target, phase, dry=dry)
            following = {"media": "files", "files": "voices"}.get(phase, "account")
        elif phase == "account" and target.whole_account:
            return await self._erase_account(target, dry=dry)
        else:
            raise InvalidRequest("invalid_value", f"{cursor!r} is not a cursor.", param="cursor")
        if done.cursor is None and target.whole_account:
            return ErasureStep(done.counts, f"{following}:")
        return done

    async def _erase_requests(self, target: Target, position: str, *, dry: bool) -> ErasureStep:
        page = await self._database.slow(lambda each: _read_page(each, target, position))
        if not dry:
            await self._delete_blobs(media, page.stored)
            await self._delete_events([row.request_id for row in page.found])
        act = functools.partial(_change_requests, rows=page.found, dry=dry)
        write = self._database.slow if dry else self._database.slow_write
        counts = dict(await write(act))
        if not position:
            results = functools.partial(_forget_results, dry=dry)
            counts["console_jobs"] = await write(results)
        return ErasureStep({**counts, "media": len(page.stored)}, page.cursor)

    async def _erase_archived(self, target: Target, position: str, *, dry: bool) -> ErasureStep:
        """Erase what files of archived months contain, and what SQL still has of their requests."""
        # Imported late: it takes a while, and a gateway should start quickly.
        from gateway.archive.rewrite import ArchiveEraser, Match

        match = Match(target.account_id, target.request_id, target.tag)
        done = await ArchiveEraser(self._database, self._blobs).step(
            match, position, reason=f"erasure: {target.subject}", dry=dry
        )
        counts = Counter(archived_receipts=done.receipts, archived_steps=done.steps)
        # Of an account, all rows are erased by their own phases.
        requests = () if target.whole_account else done.requests
        for start in range(0, len(requests), ROWS_MAX):
            some = requests[start : start + ROWS_MAX]
            act = functools.partial(_change_requests, rows=some, dry=dry)
            write = self._database.slow if dry else self._database.slow_write
            counts.update(await write(act))
            if not dry:
                await self._delete_events([each.request_id for each in some])
        return ErasureStep(counts, f"archives:{done.place}" if done.place else None)

    async def _erase_stored(self, target: Target, kind: str, *, dry: bool) -> ErasureStep:
        table, id = _STORED[kind]
        mine = table.c.account_id == target.account_id
        if dry:
            if table is media:
                # Counted with the requests that have a receipt, as nearly all have.
                mine = and_(mine, ~exists().where(receipts.c.request_id == media.c.request_id))
            count = select(func.count()).select_from(table).where(mine)
            return ErasureStep(
                {kind: await self._database.slow(lambda c: c.execute(count).scalar_one())}
            )
        # Voices come before the consents that they refer to.
        order = table.c.consent_id.is_(None) if table is voice_recordings else id
        some = select(table.c.account_id, id).where(mine).order_by(order, id).limit(BLOBS_MAX)
        rows = await self._database.slow(lambda c: [tuple(row) for row in c.execute(some)])
        await self._delete_blobs(table, rows)
        return ErasureStep({kind: len(rows)}, f"{kind}:" if len(rows) == BLOBS_MAX else None)

    async def _erase_account(self, target: Target, *, dry: bool) -> ErasureStep:
        account_id = target.account_id or 0

        def erase(connection: Connection) -> ErasureStep:
            counts: dict[str, int] = {}
            for part in PARTS:
                if dry:
                    counts[part.kind] = part.count(connection, account_id)
                    continue
                counts[part.kind] = rows = part.erase(connection, account_id, limit=ROWS_MAX)
                if rows == ROWS_MAX:
                    return ErasureStep(counts, "account:")
            return ErasureStep(counts)

        return await (self._database.slow if dry else self._database.slow_write)(erase)

    async def _delete_events(self, ids: Sequence[str]) -> None:
        """Delete event logs, best effort: they end soon after their last event."""
        if self._events is not None:
            try:
                await self._events.delete(ids)
            except QUEUE_OUTAGE as error:
                log.warning("event logs are left to their end: %s", type(error).__name__)

    async def _delete_blobs(self, table: Table, rows: Sequence[tuple[int, str]]) -> None:
        """Delete the blobs under some ids, and then their rows. Raise ``Unavailable``."""
        id = next(iter(table.primary_key))
        for start in range(0, len(rows), BLOBS_MAX):
            some = rows[start : start + BLOBS_MAX]
            done = await asyncio.gather(*(delete_blobs(self._blobs, *row) for row in some))
            gone = [id for (_, id), ok in zip(some, done, strict=True) if ok]
            clear = functools.partial(_run, statement=delete(table).where(id.in_(gone)))
            await self._database.slow_write(clear)
            if not all(done):
                raise Unavailable(
                    "blobs_unavailable",
                    "The blob store does not respond; run the same erasure again to complete it.",
                    retry_after_s=30,
                )


_STORED: Final[Mapping[str, tuple[Table, Column[str]]]] = {
    "media": (media, media.c.request_id),
    "files": (files, files.c.id),
    "voices": (voice_recordings, voice_recordings.c.id),
}
"""Tables of an account whose rows have blobs under their ids."""


def check_target(connection: Connection, target: Target, *, begun: bool = False) -> None:
    """Raise ``NotFound`` if the target does not exist, ``Conflict`` if it is still in use, or
    if archives contain what is personal.

    Open requests with a tag are searched before an erasure has ``begun`` and, since it looks at
    receipts only, once more after the last of them.
    """
    if target.tag is not None:
        check_text(target.tag[0], "the name of the tag", longest=64)
    if months := unfinished_months(connection):
        raise Conflict(
            "archive_not_erasable",
            f"The archives of {', '.join(months)} are not complete; complete them first: "
            f"tollgate archive {months[0]}",
            should_retry=False,
        )
    running = 0
    if target.tag is None or not begun:
        counted = select(func.count()).select_from(holds).where(target.matches(holds))
        running = connection.execute(counted).scalar_one()
    unended = 0
    if target.whole_account:
        status = connection.execute(
            select(accounts.c.status).where(accounts.c.id == target.account_id)
        ).scalar()
        if status != "closed":
            raise Conflict(
                "account_not_closed",
                f"The account is {status}; close it first, so that no new requests are accepted: "
                "set its status to `closed`.",
                should_retry=False,
            )
        unended = connection.execute(
            select(func.count())
            .select_from(batches)
            .where(batches.c.account_id == target.account_id, batches.c.ended_at.is_(None))
        ).scalar_one()
    if running or unended:
        raise Conflict(
            "requests_open",
            f"{running} requests and {unended} batches are still open; cancel them, or wait "
            "until they have ended.",
            should_retry=False,
        )
    if target.request_id is not None:
        known = select(receipts.c.request_id).where(target.matches(receipts))
        is_known = connection.execute(known).first() or archives_with(connection, target.request_id)
        if not is_known:
            raise NotFound(
                "request_not_found",
                f"There is no request {target.request_id!r}.",
                param="request",
            )


def begin_erasure(connection: Connection, target: Target) -> None:
    """Record that an account is erased, so that its events in the audit log can be redacted."""
    if target.whole_account:
        made = upsert(connection, erasures).values(
            subject=target.subject, account_id=target.account_id, at=datetime.now(UTC)
        )
        connection.execute(made.on_conflict_do_nothing())


def _has_archives(connection: Connection) -> bool:
    return bool(list_archives(connection))


def _run(connection: Connection, *, statement: Delete) -> None:
    connection.execute(statement)


def _read_page(connection: Connection, target: Target, position: str) -> _Page:
    """Read the next requests of a target, of a bounded number of receipts."""
    id = receipts.c.request_id
    found = select(id, receipts.c.account_id, receipts.c.accepted_at).where(
        target.matches(receipts)
    )
    cursor = None
    if target.request_id is None:
        size = ROWS_MAX if target.whole_account else SCANNED_MAX
        some = select(id).where(id > (position or "req_")).order_by(id).limit(size)
        if target.account_id is not None:
            some = some.where(receipts.c.account_id == target.account_id)
        ids = connection.execute(some).scalars().all()
        if not ids:
            return _Page((), (), None)
        found = found.where(id >= ids[0], id <= ids[-1]).order_by(id).limit(ROWS_MAX)
        cursor = f"requests:{ids[-1]}" if len(ids) == size else None
    rows = connection.execute(found).all()
    if target.tag is not None and len(rows) == ROWS_MAX:
        cursor = f"requests:{rows[-1].request_id}"
    with_blobs = select(media.c.account_id, media.c.request_id).where(
        media.c.request_id.in_([row.request_id for row in rows])
    )
    stored = [(row.account_id, row.request_id) for row in connection.execute(with_blobs)]
    return _Page(rows, stored, cursor)


def _forget_results(connection: Connection, *, dry: bool) -> int:
    """Delete the results of the console's jobs, which can contain anything and are computed again;
    return their number."""
    ended = console_jobs.c.state != "running"
    if dry:
        counted = select(func.count()).select_from(console_jobs).where(ended)
        return connection.execute(counted).scalar_one()
    return connection.execute(delete(console_jobs).where(ended)).rowcount


def _change_requests(connection: Connection, *, rows: Sequence[Any], dry: bool) -> dict[str, int]:
    """Erase what SQL has of some closed requests; return the number of rows by kind."""
    ids = [row.request_id for row in rows]
    # By the moment, which has an index: keys are stored when their request is accepted.
    keys = and_(
        idempotency.c.created_at.in_([row.accepted_at for row in rows]),
        idempotency.c.request_id.in_(ids),
    )
    personal = or_(receipts.c["metadata"].is_not(None), receipts.c.error.is_not(None))
    steps = and_(receipt_steps.c.request_id.in_(ids), receipt_steps.c.error.is_not(None))
    changes: Sequence[tuple[str, Table, ColumnElement[bool], Mapping[str, None]]] = (
        ("outputs", outputs, outputs.c.request_id.in_(ids), {}),
        ("idempotency_keys", idempotency, keys, {}),
        ("feedback", feedback, feedback.c.request_id.in_(ids), {}),
        ("webhooks", webhook_deliveries, webhook_deliveries.c.request_id.in_(ids), {}),
        # Notes on the steps of a workflow run begin with the id of the run.
        ("set_aside", set_aside, func.substr(set_aside.c.name, 1, ID_CHARS).in_(ids), {}),
        ("step_errors", receipt_steps, steps, {"error": None}),
        # Last: a tag in it is how an interrupted run finds the request again.
        (
            "receipts",
            receipts,
            and_(receipts.c.request_id.in_(ids), personal),
            {"metadata": None, "error": None},
        ),
    )
    counts = {}
    for kind, table, condition, values in changes:
        if dry:
            count = select(func.count()).select_from(table).where(condition)
            counts[kind] = connection.execute(count).scalar_one()
        else:
            change = update(table).values(**values) if values else delete(table)
            counts[kind] = connection.execute(change.where(condition)).rowcount
    return counts
