"""Erasures: what one would erase, erasing it as a job, and the record of past ones.

What identifies a person, such as the value of a tag, is sent in forms only, so that no address and
no log repeats what is erased.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from litestar import Controller, Response, get, post
from sqlalchemy import Connection

from gateway.accounts.accounts import account_names
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.audit_log import AuditEvent, AuditFilter, list_events
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs, proved
from gateway.console.jobs.pages import start_job
from gateway.console.jobs.runner import Progress
from gateway.console.jobs.store import ConsoleJob, NewJob, digest_of, find_latest
from gateway.console.queries import ROWS, FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import TollgateError
from gateway.operations.retention import ErasureBody, erase

KIND: Final = "erasure"
SUMMARY_S: Final = 5.0
"""Time after which a summary says that there is more."""
LISTS: Final = (
    ListColumns(
        "erasures",
        {
            "of": "Of",
            "by": "By",
            "reason": "Reason",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class ErasureSummary:
    """What an erasure would erase, by kind; ``more``: not all was counted."""

    body: ErasureBody
    counts: Mapping[str, int]
    more: bool


class ErasurePages(Controller):
    path = "/erasures"

    @get(guards=[needs("erasures.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _erasures_page(request, visitor)

    @post(guards=[needs("erasures.write")])
    async def summary(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        """Count what would be erased. Nothing is changed."""
        form = await read_form(request)
        try:
            found = await _summary(request, visitor, _body(form))
        except TollgateError as error:
            return await _erasures_page(request, visitor, form, error)
        return await _erasures_page(request, visitor, form, summary=found)

    @post("/run", guards=[needs("erasures.write"), proved])
    async def run(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, services = await read_form(request), request.services
        author = visitor.author(form.text("reason") or "")
        try:
            body = _body(form)
            first = body.model_copy(update={"dry_run": True})
            # Refused here rather than in the job: what does not exist, or is still in use.
            await erase(services.database, services.eraser, author, first)
        except TollgateError as error:
            return await _erasures_page(request, visitor, form, error)

        async def work(progress: Progress) -> dict[str, Any]:
            erased: Counter[str] = Counter()
            part = body
            while True:
                done = await erase(services.database, services.eraser, author, part)
                erased.update(done["erased"])
                progress(erased.total())
                if done["cursor"] is None:
                    return {"subject": done["subject"], "erased": dict(erased)}
                part = part.model_copy(update={"cursor": done["cursor"]})

        digest = _digest(body, services.pepper)
        job = NewJob(
            kind=KIND,
            digest=digest,
            starter=author.name,
            act="erasures.read",
            back=f"/console/erasures?job={digest}",
        )
        await start_job(request, job, work)
        return see_other(job.back)


async def _summary(request: ApiRequest, visitor: Visitor, body: ErasureBody) -> ErasureSummary:
    services, counts, until = request.services, Counter[str](), time.monotonic() + SUMMARY_S
    part = body.model_copy(update={"dry_run": True})
    while True:
        done = await erase(services.database, services.eraser, visitor.author(), part)
        counts.update(done["erased"])
        if done["cursor"] is None or time.monotonic() > until:
            return ErasureSummary(body, counts, more=done["cursor"] is not None)
        part = part.model_copy(update={"cursor": done["cursor"]})


def _digest(body: ErasureBody, pepper: bytes) -> str:
    """Return the digest of what is erased, which cannot be guessed from an address or a row."""
    known = digest_of(body.account, body.request, body.tag)
    return hmac.new(pepper, b"console erasure " + known.encode(), hashlib.sha256).hexdigest()


def _body(form: FormValues) -> ErasureBody:
    sent = {name: form.text(name) for name in ("account", "request", "tag")}
    return read_body(ErasureBody, sent)


async def _erasures_page(
    request: ApiRequest,
    visitor: Visitor,
    form: FormValues | None = None,
    error: TollgateError | None = None,
    *,
    summary: ErasureSummary | None = None,
) -> Response[str]:
    query = Query(request)
    digest = query.text("job")

    def read(
        connection: Connection,
    ) -> tuple[list[AuditEvent], dict[int, str], ConsoleJob | None]:
        wanted = AuditFilter(act="erasure.run")
        found = list_events(connection, wanted, limit=ROWS + 1, cursor=query.text("cursor"))
        names = account_names(connection, {e.account_id for e in found if e.account_id is not None})
        job = None if digest is None else find_latest(connection, KIND, digest)
        return found, names, job

    found, names, job = await request.services.database.report(read, account_id=None)
    shown = found[:ROWS]
    return await page(
        request,
        visitor,
        "records/erasures.html",
        lists=LISTS,
        title="Erase this?" if summary else "Erasures",
        status=error.http_status if error else 200,
        summary=summary,
        job=job,
        rows=shown,
        names=names,
        values=form.values() if form else {},
        problems=problems_of(error),
        mistake=error.message if error else None,
        may_write=visitor.may("erasures.write"),
        pager=query.pages(shown[-1].id if len(found) > ROWS else None),
    )


HANDLERS: Final[list[Any]] = [ErasurePages]
