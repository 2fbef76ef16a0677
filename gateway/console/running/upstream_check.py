"""What upstreams publish about the models that the catalog sells, compared with it, as a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from litestar import Controller, Response, get, post

from gateway.api.http.request import ApiRequest
from gateway.catalog.upstream_check import Question, check_upstreams, questions
from gateway.console.answers import see_other
from gateway.console.guards import needs
from gateway.console.jobs.pages import start_job
from gateway.console.jobs.runner import Progress
from gateway.console.jobs.store import NewJob, digest_of, find_latest
from gateway.console.rendering import page
from gateway.console.visitors import CurrentVisitor

KIND: Final = "upstream.check"


class UpstreamCheckPages(Controller):
    path = "/upstreams/check"

    @get(guards=[needs("installation.read")])
    async def show(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        services = request.services
        job = await services.database.read(
            lambda connection: find_latest(connection, KIND, digest_of())
        )
        known = questions(services.live.entries())
        result = job.result if job is not None and job.state == "done" else None
        return await page(
            request,
            visitor,
            "running/upstream_check.html",
            title=_title(result),
            job=job,
            result=result,
            asked=[each for each in known if os.environ.get(each.credential)],
            silent=_silent(known),
            may_write=visitor.may("installation.write"),
        )

    @post(guards=[needs("installation.write")])
    async def check(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        entries = request.services.live.entries()

        async def work(_: Progress) -> dict[str, Any]:
            found, asked = await check_upstreams(entries, os.environ)
            return {"asked": asked, "findings": [asdict(each) for each in found]}

        job = NewJob(
            kind=KIND,
            digest=digest_of(),
            starter=visitor.author().name,
            act="installation.read",
            back="/console/upstreams/check",
        )
        await start_job(request, job, work)
        return see_other("/console/upstreams/check")


def _silent(known: Sequence[Question]) -> dict[str, list[str]]:
    """Return the models about which nothing is asked, by the credential that is not set."""
    found: dict[str, list[str]] = {}
    for each in known:
        if not os.environ.get(each.credential):
            found.setdefault(each.credential, []).append(each.model)
    return found


def _title(result: Any) -> str:
    if result is None:
        return "What upstreams publish"
    count = len(result["findings"])
    if not count:
        return "Contracts and prices are those of the catalog"
    return f"{count} difference{'' if count == 1 else 's'} to what upstreams publish"


HANDLERS: Final[list[Any]] = [UpstreamCheckPages]
