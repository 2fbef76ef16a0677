"""What runs, over HTTP: workers, queues, upstreams and gateways."""

from __future__ import annotations

from typing import Literal, TypedDict

from litestar import Controller, Response, get, post
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.api.http.answers import ListView, json_response
from gateway.api.http.operations import author_of, write
from gateway.api.http.request import ApiRequest
from gateway.errors import unknown_model
from gateway.operations.bodies import Body, Name
from gateway.operations.running import queues, upstreams, workers
from gateway.operations.running.gateways import GatewayView, TaskView, gateway_view, list_tasks
from gateway.operations.running.queues import CheckView, LostView, QueueDetailView, QueueLoadView
from gateway.operations.running.upstreams import UpstreamView
from gateway.operations.running.workers import WishedAct, WorkerView
from gateway.scheduled import due_times


class ModelBody(Body):
    model: Name


class OpenRequestBody(Body):
    request: Name


class GatewaysView(TypedDict):
    """Gateways, and their scheduled tasks."""

    object: Literal["list"]
    data: list[GatewayView]
    tasks: list[TaskView]


class WorkerWishView(TypedDict):
    """A wish that was sent to a worker."""

    object: Literal["wish"]
    worker: str
    act: WishedAct
    model: str | None


class CancellationView(TypedDict):
    object: Literal["cancellation"]
    request: str


class WorkersController(Controller):
    path = "/v1/admin/workers"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "workers"}

    @get(
        "/",
        operation_id="ListWorkers",
        summary="List live workers, and those that fell silent within the last hour",
    )
    async def index(self, request: ApiRequest) -> Response[ListView[WorkerView]]:
        data = await workers.list_workers(request.services.queue_server)
        return json_response({"object": "list", "data": data})

    @get(
        "/{worker:str}",
        operation_id="ShowWorker",
        summary="Show a worker with its running jobs; the start of its name suffices",
    )
    async def show(self, request: ApiRequest, worker: FromPath[str]) -> Response[WorkerView]:
        return json_response(await workers.show_worker(request.services.queue_server, worker))

    @post(
        "/{worker:str}/drain",
        status_code=200,
        opt={"errors": [409]},
        operation_id="DrainWorker",
        summary="Let a worker end its running jobs and take no others",
    )
    async def drain(self, request: ApiRequest, worker: FromPath[str]) -> Response[WorkerWishView]:
        return await _wish(request, worker, "drain")

    @post(
        "/{worker:str}/resume",
        status_code=200,
        opt={"errors": [409]},
        operation_id="ResumeWorker",
        summary="Let a worker that drains take jobs again",
    )
    async def resume(self, request: ApiRequest, worker: FromPath[str]) -> Response[WorkerWishView]:
        return await _wish(request, worker, "resume")

    @post(
        "/{worker:str}/load",
        status_code=200,
        opt={"errors": [409]},
        operation_id="LoadModel",
        summary="Let a worker load a model now, also one that was unloaded or failed to load",
    )
    async def load(
        self, request: ApiRequest, worker: FromPath[str], data: JSONBody[ModelBody]
    ) -> Response[WorkerWishView]:
        return await _wish(request, worker, "load", data.model)

    @post(
        "/{worker:str}/unload",
        status_code=200,
        opt={"errors": [409]},
        operation_id="UnloadModel",
        summary="Let a worker end the running jobs of a model, and free its memory",
    )
    async def unload(
        self, request: ApiRequest, worker: FromPath[str], data: JSONBody[ModelBody]
    ) -> Response[WorkerWishView]:
        return await _wish(request, worker, "unload", data.model)


class QueuesController(Controller):
    path = "/v1/admin/queues"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "workers"}

    @get(
        "/",
        operation_id="ListQueues",
        summary="List the queues of models, longest wait first; `idle`: empty ones, too",
    )
    async def index(
        self, request: ApiRequest, idle: FromQuery[bool] = False
    ) -> Response[ListView[QueueLoadView]]:
        services = request.services
        data = await queues.list_queues(services.queue_server, services.live.names(), idle=idle)
        return json_response({"object": "list", "data": data})

    @get(
        "/jobs",
        operation_id="ShowQueue",
        summary="Show the queue of a model: accounts, jobs in order, running and delayed jobs",
    )
    async def show(self, request: ApiRequest, model: FromQuery[str]) -> Response[QueueDetailView]:
        services = request.services
        if services.live.find(model) is None:
            raise unknown_model(model)
        weights = queues.weights_of(services.settings)
        return json_response(await queues.show_queue(services.queue_server, model, weights=weights))

    @get(
        "/lost",
        operation_id="CountLost",
        summary="Count the oldest open requests that the queue server does not know",
    )
    async def lost(self, request: ApiRequest) -> Response[LostView]:
        services = request.services
        workflows = queues.workflows_of(services.live.entries())
        found = await services.database.read(
            lambda connection: queues.oldest_open(connection, workflows=workflows)
        )
        return json_response(await queues.count_lost(services.queue_server, found))

    @post(
        "/requeue",
        status_code=200,
        operation_id="RequeueLost",
        summary="Check all open requests with the next sweep, and enqueue those that are lost",
    )
    async def requeue(self, request: ApiRequest) -> Response[CheckView]:
        services = request.services
        await write(request, queues.record_check)
        interval_s = services.settings.sweep_interval_s
        return json_response(
            await queues.requeue_lost(services.queue_server, sweep_interval_s=interval_s)
        )

    @post(
        "/cancel",
        status_code=200,
        operation_id="CancelOpenRequest",
        summary="Cancel an open request of any account; what was not delivered is not charged",
    )
    async def cancel(
        self, request: ApiRequest, data: JSONBody[OpenRequestBody]
    ) -> Response[CancellationView]:
        found = await write(request, queues.record_cancellation, data.request)
        await request.services.requests.cancel(None, found.request_id, by="operator")
        return json_response({"object": "cancellation", "request": found.request_id})


class RunningController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "workers"}

    @get(
        "/upstreams",
        operation_id="ListUpstreams",
        summary="List the endpoints of upstreams as all workers see them, worst first",
    )
    async def upstreams(self, request: ApiRequest) -> Response[ListView[UpstreamView]]:
        services = request.services
        live = await workers.list_workers(services.queue_server)
        data = upstreams.list_upstreams(services.live.entries(), live)
        return json_response({"object": "list", "data": data})

    @get(
        "/gateways",
        operation_id="ListGateways",
        summary="List the gateway processes, and the scheduled tasks",
    )
    async def gateways(self, request: ApiRequest) -> Response[GatewaysView]:
        services = request.services
        states, due = await services.gateways.list(), await services.database.read(due_times)
        return json_response(
            {
                "object": "list",
                "data": [gateway_view(state) for state in states],
                "tasks": list_tasks(states, due),
            }
        )


async def _wish(
    request: ApiRequest, name: str, act: WishedAct, model: str | None = None
) -> Response[WorkerWishView]:
    services = request.services
    view = await workers.wish(
        services.queue_server, services.database, author_of(request), name, act, model
    )
    return json_response({"object": "wish", "worker": view["name"], "act": act, "model": model})
