"""The progress of a job: a part of the page that started it, and a page by itself."""

from __future__ import annotations

from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath

from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.guards import needs, no_page
from gateway.console.jobs import store
from gateway.console.jobs.runner import ConsoleJobs, Work
from gateway.console.jobs.store import ConsoleJob, NewJob
from gateway.console.rendering import page
from gateway.console.roles import MAY
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound


class JobPages(Controller):
    path = "/jobs"

    @get("/{job_id:str}", guards=[needs("own.write")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, job_id: FromPath[str]
    ) -> Response[Any]:
        job = await _job_of(request, visitor, job_id)
        if not job.is_running:
            if request.headers.get("hx-request"):
                return Response(None, headers={"HX-Redirect": job.back})
            return see_other(job.back)
        return await page(request, visitor, "job.html", title="At work", job=job)

    @post("/{job_id:str}/cancel", guards=[needs("own.write")])
    async def cancel(
        self, request: ApiRequest, visitor: CurrentVisitor, job_id: FromPath[str]
    ) -> Response[Any]:
        job = await _job_of(request, visitor, job_id)
        if job.starter != visitor.author().name and visitor.role != "operator":
            raise no_page()
        await request.services.database.write(
            lambda connection: store.ask_to_cancel(connection, job.id)
        )
        return see_other(f"/console/jobs/{job.id}")


async def start_job(request: ApiRequest, job: NewJob, work: Work) -> str:
    """Start a job of a page; the page shows it with the macro ``jobs.progress``."""
    jobs: ConsoleJobs = request.app.state.console_jobs
    return await jobs.start(job, work)


async def _job_of(request: ApiRequest, visitor: Visitor, job_id: str) -> ConsoleJob:
    job = await request.services.database.read(lambda connection: store.find(connection, job_id))
    if job is None or not _may_see(visitor, job):
        raise NotFound("job_not_found", "No such job; what a job found is kept for a day.")
    return job


def _may_see(visitor: Visitor, job: ConsoleJob) -> bool:
    if job.account_id is None:
        return visitor.role in MAY[job.act]
    return visitor.may(job.act, job.account_id)


HANDLERS: Final[list[Any]] = [JobPages]
