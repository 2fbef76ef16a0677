"""Capacity planning for operators, over HTTP."""

from __future__ import annotations

from typing import Final

from litestar import Controller, Response, get
from litestar.params import FromQuery
from sqlalchemy import Connection

from gateway.api.http.answers import json_response
from gateway.api.http.fields import refuse_unknown_parameters
from gateway.api.http.request import ApiRequest
from gateway.errors import InvalidRequest
from gateway.operations.refusals import refusals
from gateway.plan.hardware import Device, choose_devices, gpus
from gateway.plan.measured import read_measured
from gateway.plan.planning import make_plan
from gateway.plan.question import PlanQuestion
from gateway.plan.roofline import EFFICIENCY
from gateway.plan.subjects import find_subject
from gateway.plan.views import PlanView

PARAMETERS: Final = (
    *("model", "gpu", "memory", "bandwidth", "tflops", "dtype", "kv_dtype", "batch", "context"),
    *("input_tokens", "output_tokens", "size", "steps", "guidance", "seconds", "fps"),
    *("per_second", "efficiency", "params", "layers", "kv_heads", "head_dim"),
)


class PlanController(Controller):
    path = "/v1/admin/plan"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "catalog"}

    @get(
        "/",
        operation_id="GetPlan",
        summary="Memory, speed, cost and margin of a model on GPUs, and the GPUs that a load needs",
        description=(
            "`model` is an entry of the catalog, a well-known model, or any name with `params`, "
            "`layers`, `kv_heads` and `head_dim`. `gpu` is a list of names, separated by commas; "
            "all known ones by default. `memory` (GB), `bandwidth` (GB/s) and `tflops` describe "
            "another. Figures measured here are in `measured`."
        ),
    )
    async def plan(
        self,
        request: ApiRequest,
        model: FromQuery[str],
        gpu: FromQuery[str | None] = None,
        memory: FromQuery[float | None] = None,
        bandwidth: FromQuery[float | None] = None,
        tflops: FromQuery[float | None] = None,
        dtype: FromQuery[str | None] = None,
        kv_dtype: FromQuery[str | None] = None,
        batch: FromQuery[int | None] = None,
        context: FromQuery[int | None] = None,
        input_tokens: FromQuery[int | None] = None,
        output_tokens: FromQuery[int | None] = None,
        size: FromQuery[str | None] = None,
        steps: FromQuery[int | None] = None,
        guidance: FromQuery[float | None] = None,
        seconds: FromQuery[float | None] = None,
        fps: FromQuery[float | None] = None,
        per_second: FromQuery[float | None] = None,
        efficiency: FromQuery[float] = float(EFFICIENCY),
        params: FromQuery[int | None] = None,
        layers: FromQuery[int | None] = None,
        kv_heads: FromQuery[int | None] = None,
        head_dim: FromQuery[int | None] = None,
    ) -> Response[PlanView]:
        refuse_unknown_parameters(request, PARAMETERS)
        live, settings = request.services.live, request.services.settings
        own = {"memory": memory, "bandwidth": bandwidth, "tflops": tflops}
        dimensions = {
            "params": params,
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
        }

        def read(connection: Connection) -> PlanView:
            with refusals():
                subject = find_subject(
                    live.resolve(model),
                    live.entries(),
                    root=settings.catalog.resolve().parent,
                    dimensions=dimensions,
                )
                question = PlanQuestion(
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    batch=batch,
                    context=context,
                    input_tokens=input_tokens,
                    output_tokens=output_tokens,
                    size=size,
                    seconds=seconds,
                    fps=fps,
                    steps=steps,
                    guidance=guidance,
                    per_second=per_second,
                    efficiency=efficiency,
                )
                measured = (
                    () if subject.entry is None else read_measured(connection, subject.entry.name)
                )
                return make_plan(
                    subject,
                    question,
                    _devices(gpu, own),
                    rates=live.expense_rates,
                    measured=measured,
                )

        # In a thread: it reads the configurations of checkpoints, too.
        view = await request.services.database.report(read, account_id=request.key.account_id)
        return json_response(view)


def _devices(names: str | None, own: dict[str, float | None]) -> tuple[Device, ...]:
    """Raise ``InvalidRequest`` if a GPU is unknown, ``ValueError`` if one is described in part."""
    try:
        return choose_devices(names.split(",") if names else (), own) or gpus()
    except LookupError as error:
        raise InvalidRequest("invalid_value", f"{error.args[0]}.", param="gpu") from None
