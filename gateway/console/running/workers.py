"""Workers: the list, one with its models and jobs, and what operators wish of it."""

from __future__ import annotations

from typing import Any, Final, get_args

from litestar import Controller, Response, get, post
from litestar.params import FromPath

from gateway.accounts.accounts import account_names
from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.queries import Query, read_form
from gateway.console.rendering import page
from gateway.console.running.asking import FOLLOW_S, asked
from gateway.console.running.views import (
    JOBS,
    KINDS,
    job_accounts,
    memory_parts,
    upstreams_title,
    workers_title,
)
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound, TollgateError
from gateway.operations.running import upstreams, workers
from gateway.operations.running.workers import WishedAct, WorkerView

ACTS: Final[tuple[WishedAct, ...]] = get_args(WishedAct)
TITLES: Final[dict[WishedAct, str]] = {
    "drain": "Drain {worker}",
    "resume": "Let {worker} take jobs again",
    "load": "Load {model} on {worker}",
    "unload": "Unload {model} from {worker}",
}
LISTS: Final = (
    ListColumns(
        "workers",
        {
            "state": "State",
            "device": "Device",
            "version": "Version",
            "busy": "Busy",
            "steps": "Steps/s",
            "memory": "Memory",
            "running": "Running",
            "models": "Models",
            "since": "Since",
        },
    ),
    ListColumns(
        "upstreams",
        {
            "state": "State",
            "in_flight": "In flight",
            "failures": "Failures in a row",
            "calls": "Calls",
            "p95": "p95",
            "errors": "Errors",
            "credential": "Credential",
            "models": "Models",
        },
    ),
    JOBS,
)


class WorkerPages(Controller):
    path = "/"

    @get("/workers", guards=[needs("installation.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        found = await asked(workers.list_workers(request.services.queue_server))
        return await page(
            request,
            visitor,
            "running/workers.html",
            lists=LISTS,
            title=workers_title(found),
            workers=found,
            kinds=KINDS,
            memory_parts=memory_parts,
            live=FOLLOW_S,
        )

    @get("/workers/{worker:str}", guards=[needs("installation.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, worker: FromPath[str]
    ) -> Response[str]:
        services = request.services
        view = await workers.show_worker(services.queue_server, worker)
        ids = job_accounts(view["jobs"])
        names = await services.database.read(lambda connection: account_names(connection, ids))
        return await page(
            request,
            visitor,
            "running/worker.html",
            lists=LISTS,
            title=view["name"],
            worker=view,
            names=names,
            kinds=KINDS,
            memory_parts=memory_parts,
            may_write=visitor.may("installation.write"),
            live=FOLLOW_S,
        )

    @get("/workers/{worker:str}/{act:str}", guards=[needs("installation.write")])
    async def summary(
        self,
        request: ApiRequest,
        visitor: CurrentVisitor,
        worker: FromPath[str],
        act: FromPath[str],
    ) -> Response[str]:
        model = Query(request).text("model")
        return await _summary(request, visitor, worker, _act(act), model)

    @post("/workers/{worker:str}/{act:str}", guards=[needs("installation.write")])
    async def wish(
        self,
        request: ApiRequest,
        visitor: CurrentVisitor,
        worker: FromPath[str],
        act: FromPath[str],
    ) -> Response[Any]:
        services, form, wished = request.services, await read_form(request), _act(act)
        model = form.text("model")
        try:
            author = visitor.author(form.text("reason") or "")
            view = await workers.wish(
                services.queue_server, services.database, author, worker, wished, model
            )
        except NotFound:
            raise
        except TollgateError as error:
            return await _summary(request, visitor, worker, wished, model, error)
        return see_other(f"/console/workers/{view['name']}")

    @get("/upstreams", guards=[needs("installation.read")])
    async def upstreams(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        services = request.services
        live = await asked(workers.list_workers(services.queue_server))
        found = None if live is None else upstreams.list_upstreams(services.live.entries(), live)
        return await page(
            request,
            visitor,
            "running/upstreams.html",
            lists=LISTS,
            title=upstreams_title(found),
            upstreams=found,
            kinds=KINDS,
            live=FOLLOW_S,
        )


async def _summary(
    request: ApiRequest,
    visitor: Visitor,
    name: str,
    act: WishedAct,
    model: str | None,
    error: TollgateError | None = None,
) -> Response[str]:
    """Show what a wish will do, before it is sent."""
    views = await workers.list_workers(request.services.queue_server)
    view = workers.find_worker(views, name)
    if error is None:
        try:
            workers.check_wish(view, act, model)
        except TollgateError as problem:
            error = problem
    title = TITLES[act].format(worker=view["name"], model=model)
    return await page(
        request,
        visitor,
        "running/wish.html",
        title=title,
        status=error.http_status if error else 200,
        worker=view,
        act=act,
        model=model,
        entry=next((each for each in view["models"] if each["name"] == model), None),
        only_here=_only_here(views, view, model),
        mistake=error.message if error else None,
    )


def _only_here(views: list[WorkerView], view: WorkerView, model: str | None) -> list[str]:
    """Return the models, or the one, that no other worker serves."""
    elsewhere = {
        each["name"]
        for other in views
        if other["name"] != view["name"] and other["state"] == "serving"
        for each in other["models"]
        if each["state"] != "unavailable"
    }
    names = [each["name"] for each in view["models"] if each["state"] != "unavailable"]
    return [name for name in names if name not in elsewhere and model in (None, name)]


def _act(text: str) -> WishedAct:
    found = next((act for act in ACTS if act == text), None)
    if found is None:
        raise NotFound("not_found", f"A worker cannot be told to {text!r}.")
    return found


HANDLERS: Final[list[Any]] = [WorkerPages]
