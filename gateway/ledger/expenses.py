"""What requests cost the operator: device time, and what upstreams charge. Pure.

Computed once, when a request is settled, from the usage that its charge is computed from, at the
rates of that moment. Stored on the receipt for operators; customers never see it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.pricing import Price, Unbookable, UnpricedUsage, charge_nanos, device_cost
from workers.contract.attempts import RunDetails
from workers.contract.jobs import Usage


class RunRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request ran and what it cost, as its receipt stores it."""

    worker: str = ""
    attempt: int = 0
    device: str = ""
    dtype: str = ""
    rows: int = 0
    endpoint: str = ""
    served_by: str = ""
    """The version or endpoint that ran it, if the model has several."""
    device_nanos: int | None = None
    """Cost of its device time; None if the device has no price."""
    upstream_nanos: int | None = None
    """What its upstream charges; None if that is not stated."""


NO_RECORD: Final = RunRecord()


@dataclass(frozen=True, slots=True)
class ExpenseRates:
    """What the operator pays: for the upstream of each model, and for an hour of each device."""

    upstreams: Mapping[str, Price] = field(default_factory=dict)
    hours: Mapping[str, int] = field(default_factory=dict)
    """Nano-dollars an hour, by words of the device's name, such as ``H200``."""
    hour_nanos: int | None = None
    """Price of an hour of any other device."""

    def hour_of(self, device: str) -> int | None:
        """Return the price of an hour of a device; the longest name among its words wins.

        None if it is not known.
        """
        if not self.hours:
            return self.hour_nanos
        fitting = [name for name in self.hours if _has_words(device, name)]
        return self.hours[max(fitting, key=len)] if fitting else self.hour_nanos


NO_RATES: Final = ExpenseRates()


def run_record(worker: str, attempt: int, details: RunDetails | None) -> RunRecord:
    """Return how a job ran, without its cost."""
    if details is None:
        return RunRecord(worker, attempt)
    return RunRecord(worker, attempt, **msgspec.structs.asdict(details))


def with_cost(
    record: RunRecord, rates: ExpenseRates, model: str, usage: Usage
) -> tuple[RunRecord, int | None]:
    """Return the record with the cost of a usage, and the whole cost; None if that is not known."""
    device = upstream = None
    if usage.gpu_us and (hour := rates.hour_of(record.device)) is not None:
        device = device_cost(usage.gpu_us, hour)
    if model in rates.upstreams:
        upstream = upstream_cost(rates.upstreams[model], usage)
    # Without device time, it ran elsewhere, if at all.
    is_upstreams = bool(record.endpoint or (usage.requests and not usage.gpu_us))
    is_known = not (usage.gpu_us and device is None) and not (is_upstreams and upstream is None)
    record = msgspec.structs.replace(record, device_nanos=device, upstream_nanos=upstream)
    return record, (device or 0) + (upstream or 0) if is_known else None


def upstream_cost(price: Price, usage: Usage) -> int | None:
    """Return what an upstream charges for a usage; None if what it counts was not measured."""
    if not usage.requests:
        return 0
    try:
        return charge_nanos(price, usage)
    except (UnpricedUsage, Unbookable, ValueError):
        return None


def cost_of_steps(
    record: RunRecord, rates: ExpenseRates, steps: Iterable[tuple[str, Usage]]
) -> tuple[RunRecord, int | None]:
    """Return the record and the whole cost of a workflow run from the usage of its steps.

    Steps do not tell their devices, so their time is priced at the default.
    """
    device = upstream = total = 0
    is_known = True
    for model, usage in steps:
        step, cost = with_cost(NO_RECORD, rates, model, usage)
        is_known = is_known and cost is not None
        device += step.device_nanos or 0
        upstream += step.upstream_nanos or 0
        total += cost or 0
    record = msgspec.structs.replace(record, device_nanos=device, upstream_nanos=upstream)
    return record, total if is_known else None


def _has_words(device: str, name: str) -> bool:
    """Whether a name is a part of a device's name, of whole words: ``L4`` is none of an L40S."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", device, re.IGNORECASE) is not None
