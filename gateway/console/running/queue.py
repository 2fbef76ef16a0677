"""The queue: what waits and why, cancel a request, look for lost ones; and the gateways."""

from __future__ import annotations

from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath

from gateway.accounts.accounts import account_names
from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.pages.requests import cancel_page
from gateway.console.queries import Query, read_form
from gateway.console.rendering import page
from gateway.console.running.asking import FOLLOW_S, asked
from gateway.console.running.views import JOBS, KINDS, gateways_title, next_tasks, queues_title
from gateway.console.visitors import CurrentVisitor
from gateway.errors import unknown_model
from gateway.operations.running import queues
from gateway.operations.running.gateways import gateway_view, list_tasks
from gateway.operations.running.queues import QueueDetailView
from gateway.scheduled import due_times

LISTS: Final = (
    ListColumns(
        "queues",
        {
            "queued": "Queued",
            "running": "Running",
            "delayed": "Delayed",
            "accounts": "Accounts",
            "oldest": "Oldest",
            "wait": "Estimated wait",
            "takes": "A job takes",
            "pace": "Pace",
        },
    ),
    ListColumns(
        "queued_accounts",
        {
            "queued": "Queued",
            "running": "Running",
            "time": "Queued time",
            "share": "Share of it",
            "weight": "Weight",
        },
    ),
    ListColumns(
        "queued_jobs",
        {
            "account": "Account",
            "age": "Age",
            "attempts": "Attempts",
            "estimated": "Estimated",
            "deadline": "Deadline",
        },
    ),
    ListColumns(
        "gateways",
        {
            "version": "Version",
            "since": "Since",
            "waiting": "Waiting",
            "accepted": "Accepted",
            "settled": "Settled",
            "failed": "Failed",
            "refused": "Refused",
            "commit": "In a commit",
            "batches": "Batches",
            "database": "Database",
            "queue": "Queue server",
            "schema": "Schema",
        },
    ),
    ListColumns(
        "tasks",
        {
            "next": "Next",
            "last": "Last",
            "took": "Took",
            "result": "Result",
            "by": "By",
        },
    ),
    JOBS,
)


class QueuePages(Controller):
    path = "/"

    @get("/queue", guards=[needs("installation.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        services, model = request.services, Query(request).text("model")
        if model is not None and services.live.find(model) is None:
            raise unknown_model(model, listed="the list of models")
        server = services.queue_server
        found = await asked(queues.list_queues(server, services.live.names()))
        shown = model or (found[0]["model"] if found else None)
        detail = None
        if found is not None and shown is not None:
            weights = queues.weights_of(services.settings)
            detail = await asked(queues.show_queue(server, shown, weights=weights))
        ids = _accounts(detail)
        holds = None if found is not None else await services.database.read(queues.open_by_model)
        names = await services.database.read(lambda connection: account_names(connection, ids))
        return await page(
            request,
            visitor,
            "running/queue.html",
            lists=LISTS,
            title=queues_title(found),
            queues=found,
            detail=detail,
            holds=holds,
            names=names,
            may_write=visitor.may("installation.write"),
            live=FOLLOW_S,
        )

    @get("/queue/requeue", guards=[needs("installation.write")])
    async def lost(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        services = request.services
        workflows = queues.workflows_of(services.live.entries())
        found = await services.database.read(
            lambda connection: queues.oldest_open(connection, workflows=workflows)
        )
        return await page(
            request,
            visitor,
            "running/requeue.html",
            title="Requeue lost requests now",
            lost=await asked(queues.count_lost(services.queue_server, found)),
            interval_s=services.settings.sweep_interval_s,
        )

    @post("/queue/requeue", guards=[needs("installation.write")])
    async def requeue(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        services, form = request.services, await read_form(request)
        author = visitor.author(form.text("reason") or "")
        await services.database.write(lambda connection: queues.record_check(connection, author))
        await queues.requeue_lost(
            services.queue_server, sweep_interval_s=services.settings.sweep_interval_s
        )
        return see_other("/console/queue")

    @get("/queue/cancel/{request_id:str}", guards=[needs("installation.write")])
    async def cancel_form(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Response[str]:
        return await cancel_page(request, visitor, request_id, by_operator=True)

    @post("/queue/cancel/{request_id:str}", guards=[needs("installation.write")])
    async def cancel(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Response[Any]:
        services, form = request.services, await read_form(request)
        author = visitor.author(form.text("reason") or "")
        await services.database.write(
            lambda connection: queues.record_cancellation(connection, author, request_id)
        )
        await services.requests.cancel(None, request_id, by="operator")
        return see_other(f"/console/requests/{request_id}")

    @get("/gateways", guards=[needs("installation.read")])
    async def gateways(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        services = request.services
        states = await asked(services.gateways.list())
        due = await services.database.read(due_times)
        found = None if states is None else [gateway_view(state) for state in states]
        return await page(
            request,
            visitor,
            "running/gateways.html",
            lists=LISTS,
            title=gateways_title(found),
            gateways=found,
            tasks=next_tasks(list_tasks(states or [], due)),
            kinds=KINDS,
            live=FOLLOW_S,
        )


def _accounts(detail: QueueDetailView | None) -> set[int]:
    """Return the accounts that a queue's page names."""
    if detail is None:
        return set()
    parts: list[Any] = [
        *detail["flows"], *detail["jobs"], *detail["running_jobs"], *detail["delayed_jobs"],
    ]  # fmt: skip
    return {each["account_id"] for each in parts if each["account_id"] is not None}


HANDLERS: Final[list[Any]] = [QueuePages]
