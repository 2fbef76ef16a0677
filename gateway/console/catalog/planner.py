"""The GPU planner: the tables of ``tollgate plan``, and what a result costs over batch sizes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from litestar import Controller, Response, get
from sqlalchemy import Connection

from gateway.api.http.request import ApiRequest
from gateway.catalog.schema import CatalogEntry
from gateway.console.guards import needs
from gateway.console.queries import Query
from gateway.console.rendering import page
from gateway.console.visitors import CurrentVisitor
from gateway.errors import InvalidRequest, TollgateError
from gateway.ledger.expenses import ExpenseRates
from gateway.operations.refusals import refusals
from gateway.plan.generators import generators
from gateway.plan.hardware import PRECISIONS, Device, choose_devices, gpus
from gateway.plan.measured import read_measured
from gateway.plan.planning import make_plan
from gateway.plan.question import PlanQuestion
from gateway.plan.roofline import EFFICIENCY
from gateway.plan.shapes import shapes
from gateway.plan.subjects import DIMENSIONS, Subject, find_subject
from gateway.plan.views import PlannedDeviceView, PlanView

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CURVES_MAX: Final = 6
"""Devices in the chart."""
DAY_S: Final = 86_400
_WHOLE: Final = ("batch", "context", "input_tokens", "output_tokens", "steps", *DIMENSIONS)
_NUMBERS: Final = ("seconds", "fps", "guidance", "efficiency", "per_day")
_OWN: Final = ("memory", "bandwidth", "tflops")
_ORDER: Final = (
    *("context", "input_tokens", "output_tokens", "kv_dtype"),
    *("size", "steps", "guidance", "seconds", "fps"),
)
_OPTIONS: Final[Mapping[str, str]] = {
    "dtype": "--dtype",
    "kv_dtype": "--kv-dtype",
    "batch": "--batch",
    "context": "--context",
    "input_tokens": "--input",
    "output_tokens": "--output",
    "size": "--size",
    "steps": "--steps",
    "guidance": "--guidance",
    "seconds": "--seconds",
    "fps": "--fps",
    "per_day": "--per-day",
    "efficiency": "--efficiency",
    "hour": "--gpu-hour-usd",
    "memory": "--memory",
    "bandwidth": "--bandwidth",
    "tflops": "--tflops",
    "params": "--params",
    "layers": "--layers",
    "kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
}
"""Options of ``tollgate plan`` by the fields of the form."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Costs over batch sizes in USD, as the plan has them; None if a batch does not fit."""

    what: str
    devices: Sequence[str]
    rows: Sequence[tuple[int, Sequence[str | None]]]
    price: str | None
    """What we sell it for."""


@dataclass(frozen=True, slots=True)
class Planned:
    view: PlanView
    curve: Curve | None
    command: str


class PlannerPages(Controller):
    path = "/plan"

    @get("/", guards=[needs("catalog_file.read")])
    async def show(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query, live = Query(request), request.services.live
        found, problem = None, None
        if query.text("model"):

            def read(connection: Connection) -> Planned:
                return plan(connection, request, query)

            try:
                # In a thread: it reads the configurations of checkpoints, too.
                found = await request.services.database.report(read, account_id=None)
            except TollgateError as error:
                problem = error
        return await page(
            request,
            visitor,
            "catalog/plan.html",
            title=_title(found.view) if found else "What fits, and what does it cost?",
            status=problem.http_status if problem else 200,
            planned=found,
            problem=problem,
            problems={problem.param: problem.message} if problem and problem.param else {},
            filters=query.values,
            has_order=not query.values.keys().isdisjoint(_ORDER),
            has_numbers=not query.values.keys().isdisjoint((*_OWN, *DIMENSIONS)),
            known=[*live.names(), *shapes(), *generators()],
            entry=_example(live.entries()),
            gpus=[each.name for each in gpus()],
            precisions=list(PRECISIONS),
            efficiency=float(EFFICIENCY),
        )


def plan(connection: Connection, request: ApiRequest, query: Query) -> Planned:
    """Plan what an address asks for. Raise ``TollgateError``."""
    live, settings = request.services.live, request.services.settings
    given = {
        **{name: _number(query, name) for name in _NUMBERS},
        **{name: _whole(query, name) for name in _WHOLE},
    }
    per_day, efficiency = given.pop("per_day"), given.pop("efficiency")
    dimensions = {name: given.pop(name) for name in DIMENSIONS}
    hour = query.amount("hour")
    with refusals():
        subject = find_subject(
            live.resolve(query.text("model") or ""),
            live.entries(),
            root=settings.catalog.resolve().parent,
            dimensions=dimensions,
        )
        question = PlanQuestion(
            dtype=query.text("dtype"),
            kv_dtype=query.text("kv_dtype"),
            size=query.text("size"),
            per_second=None if per_day is None else per_day / DAY_S,
            efficiency=float(EFFICIENCY) if efficiency is None else efficiency,
            **given,
        )
        names = [name for name in (query.text("gpu") or "").split(",") if name.strip()]
        devices = choose_devices(names, {name: _number(query, name) for name in _OWN}) or gpus()
        measured = () if subject.entry is None else read_measured(connection, subject.entry.name)
        rates = live.expense_rates if hour is None else ExpenseRates(hour_nanos=hour)
        view = make_plan(subject, question, devices, rates=rates, measured=measured)
        curve = _curve(subject, question, devices, rates, view)
    return Planned(view, curve, _command(query, names or [each.name for each in gpus()]))


def _curve(
    subject: Subject,
    question: PlanQuestion,
    devices: Sequence[Device],
    rates: ExpenseRates,
    view: PlanView,
) -> Curve | None:
    """Return the cost of a million tokens, or of one result, over batch sizes; None if unknown."""
    shown = [one["name"] for one in view["devices"] if _cost(one, view, None) is not None]
    chosen = [each for each in devices if each.name in shown][:CURVES_MAX]
    if not chosen:
        return None
    rows = []
    for batch in BATCHES:
        made = make_plan(subject, replace(question, batch=batch), chosen, rates=rates)
        costs = [_cost(one, made, batch) for one in made["devices"]]
        if any(cost is not None for cost in costs):
            rows.append((batch, costs))
    first = next(one for one in view["devices"] if one["name"] == chosen[0].name)
    if view["shape"] is None:
        result = first["result"]
        price = None if result is None else result["price_usd"]
        return Curve("Cost of one result, $", [each.name for each in chosen], rows, price)
    million = _million(first, view["task"])
    return Curve(
        f"Cost of a million {'input' if view['task'] == 'text-embedding' else 'output'} tokens, $",
        [each.name for each in chosen],
        rows,
        None if million is None else million["catalog"],
    )


def _cost(one: PlannedDeviceView, view: PlanView, batch: int | None) -> str | None:
    if view["shape"] is None:
        return None if one["result"] is None else one["result"]["cost_usd"]
    text, million = one["text"], _million(one, view["task"])
    if text is None or million is None or (batch is not None and text["decode_batch"] < batch):
        return None
    return str(million["expected"])


def _million(one: PlannedDeviceView, task: str) -> Any:
    text = one["text"]
    if text is None:
        return None
    kind = "input" if task == "text-embedding" else "output"
    return text[f"usd_per_million_{kind}_tokens"]  # type: ignore[literal-required]  # one of two


def _command(query: Query, names: Sequence[str]) -> str:
    """Return the command that prints the same."""
    words = ["tollgate", "plan", query.text("model") or ""]
    for name in names:
        words += ["--gpu", name]
    for field, option in _OPTIONS.items():
        if (value := query.text(field)) is not None:
            words += [option, value]
    return shlex.join(words)


def _number(query: Query, name: str) -> Any:
    """Return a number; ``70e9``, ``70B`` and ``1,000`` are accepted. Raise ``InvalidRequest``."""
    text = query.text(name)
    if text is None:
        return None
    plain = text.strip().replace(",", "").lower()
    scale = {"b": 10**9, "m": 10**6, "k": 10**3}.get(plain[-1:], 1)
    try:
        return float(Fraction(plain.rstrip("bmk")) * scale)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise InvalidRequest("invalid_value", f"{text!r} is not a number.", param=name) from None


def _whole(query: Query, name: str) -> Any:
    value = _number(query, name)
    if value is None:
        return None
    if value != int(value) or value < 1:
        message = f"{query.text(name)!r} is not a whole number, such as 70B or 4096."
        raise InvalidRequest("invalid_value", message, param=name)
    return int(value)


def _example(entries: Sequence[CatalogEntry]) -> str:
    """Return an entry that can be planned, to begin with."""
    local = [each.name for each in entries if each.checkpoint is not None]
    return local[0] if local else next(iter(shapes()))


def _title(view: PlanView) -> str:
    fitting = [one["name"] for one in view["devices"] if one["fits"]]
    if not fitting:
        return f"{view['model']} fits none of these alone"
    if len(fitting) == len(view["devices"]):
        return f"{view['model']} fits {'each of these' if len(fitting) > 1 else fitting[0]}"
    return f"{view['model']} fits {len(fitting)} of {len(view['devices'])}"


HANDLERS: Final[list[Any]] = [PlannerPages]
