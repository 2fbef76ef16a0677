"""The overview's figures as texts: those of the page, and those that follow later. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from gateway.audit_log import AuditEvent
from gateway.billing.reconciliation import Reconciliation
from gateway.billing.usage.report import Group
from gateway.billing.usage.traffic import Flow, OpenHolds, TrafficHour
from gateway.console.views.formats import Clock, ago, count, duration, share, usd
from gateway.console.views.money import SumRow
from workers.contract.announcements import Announcement
from workers.contract.load import Load

NO_QUEUE: Final = (
    "The queue server does not answer, so new requests are refused. Figures from the ledger are "
    "right."
)
TOP: Final = 5
WIDTH: Final = 120
HEIGHT: Final = 28


@dataclass(frozen=True, slots=True)
class TopRow:
    """What an account or a model earned today, and how much more or less that is than before."""

    name: str
    requests: int
    net_nanos: int
    change: str


@dataclass(frozen=True, slots=True)
class Present:
    """What the overview shows of a moment. ``per_second``: accepted and settled requests;
    ``recent``: the last minutes, in which failures are counted."""

    per_second: tuple[float, float]
    recent: Flow
    today: SumRow
    holds: OpenHolds
    healthy: bool
    loads: Mapping[str, Load]
    workers: Sequence[Announcement]
    available: int
    offered: int
    proof: Reconciliation | None


def overview_title(present: Present) -> str:
    if present.proof is not None and present.proof.findings:
        return "The books do not agree"
    if not present.healthy:
        return "The queue server does not answer"
    return "Running; the books agree" if present.proof else "Running"


def overview_texts(present: Present) -> dict[str, str]:
    """Return the figures by name; what is not to be shown is empty."""
    queued = sum(load.depth for load in present.loads.values())
    running = sum(load.running for load in present.loads.values())
    oldest_ms = max((load.oldest_ms for load in present.loads.values()), default=0)
    accepted, settled = present.per_second
    draining = sum(worker.draining for worker in present.workers)
    today, recent = present.today, present.recent
    refunded = f", {usd(today.refund_nanos)} refunded" if today.refund_nanos else ""
    return {
        "title": overview_title(present),
        "trouble": "" if present.healthy else NO_QUEUE,
        "accepted": rate(accepted),
        "settled": f"{rate(settled)}/s settled",
        "failing": share(recent.failed, recent.settled) if recent.failed else count(0),
        "failed": f"{count(recent.failed)} of {_requests(recent.settled)} in 5 min",
        "earned": usd(today.net_nanos),
        "earned_of": f"{_requests(today.requests)}{refunded}",
        "held": usd(present.holds.held_nanos),
        "held_by": f"{count(present.holds.requests)} open besides batches",
        "queued": count(queued),
        "running": f"{count(running)} running"
        + (f", oldest {duration(oldest_ms * 1000)}" if oldest_ms else ""),
        "workers": count(len(present.workers)),
        "draining": f"{draining} draining"
        if draining
        else "all serve"
        if present.workers
        else "tollgate-worker starts one",
        "available": count(present.available),
        "offered": f"of {count(present.offered)} available",
    }


def load_text(loaded: AuditEvent, clock: Clock) -> str:
    """Describe the last load of the catalog: by whom, and with which outcome."""
    found = loaded.after or {}
    if loaded.act == "catalog.refuse":
        problems = found.get("problems", 1)
        return (
            f"{ago(loaded.at, clock)} by {loaded.actor}: {problems} "
            f"problem{'' if problems == 1 else 's'}; the one before is in force"
        )
    changed = len(found.get("changed", ()))
    prices = f", {count(changed)} price{'' if changed == 1 else 's'} changed" if changed else ""
    how = "at the" if loaded.actor.startswith("start of") else "by"
    return f"loaded {how} {loaded.actor}{prices}"


def dearest(today: Mapping[str, Group], before: Mapping[str, Group]) -> list[TopRow]:
    """Return the sums with the highest net cost, the highest first, beside earlier ones of the
    same labels."""
    top = heapq.nlargest(TOP, today.items(), key=lambda each: _net_nanos(each[1]))
    return [
        TopRow(
            name=label,
            requests=group.requests,
            net_nanos=_net_nanos(group),
            change=_change(_net_nanos(group), _net_nanos(before.get(label, Group({})))),
        )
        for label, group in top
    ]


def _net_nanos(group: Group) -> int:
    return group.cost_nanos - group.refund_nanos


def _change(now: int, before: int) -> str:
    if before <= 0:
        return "new" if now > 0 else "\N{EN DASH}"
    sign = "+" if now > before else "\N{MINUS SIGN}" if now < before else ""
    return f"{sign}{share(abs(now - before), before)}"


def rate(per_second: float) -> str:
    """Format requests per second, with three digits at most."""
    if per_second >= 100:
        return count(round(per_second))
    return f"{per_second:.1f}"


@dataclass(frozen=True, slots=True)
class HourCurve:
    """One figure over the minutes of an hour, as the points of a line in a small box."""

    name: str
    label: str
    points: str


def hour_curves(traffic: TrafficHour, now: datetime) -> list[HourCurve]:
    """Return the curves of an hour, each scaled to its own highest minute."""
    minutes = traffic.minutes(now)
    drawn: Sequence[tuple[str, str, Sequence[int | None]]] = (
        ("accepted", "Requests accepted", [flow.accepted for flow in minutes]),
        ("failed", "Requests that failed", [flow.failed for flow in minutes]),
        ("charged", "Charged", [flow.charged_nanos for flow in minutes]),
        ("first", "p95 of the time to the first output", traffic.first_outputs(now)),
    )
    return [HourCurve(f"{name}_curve", label, points_of(values)) for name, label, values in drawn]


def hour_texts(traffic: TrafficHour) -> dict[str, str]:
    """Return the figures of an hour that are read with its curves, by name."""
    found = traffic.first_output()
    if found.p95_us is None:
        return {"first": "\N{EN DASH}", "first_of": "too few requests"}
    return {"first": duration(found.p95_us), "first_of": f"of {_requests(found.requests)}"}


def points_of(values: Sequence[int | None]) -> str:
    """Return the points of a line in a small box, scaled to the highest value; None has none."""
    most = max((value for value in values if value is not None), default=0) or 1
    across = WIDTH / max(len(values) - 1, 1)
    return " ".join(
        f"{at * across:.0f},{HEIGHT - 1 - (HEIGHT - 2) * value / most:.0f}"
        for at, value in enumerate(values)
        if value is not None
    )


def _requests(number: int) -> str:
    return f"{count(number)} request{'' if number == 1 else 's'}"
