"""What the rows of all plans share: prices of hours and results, the load, and assumptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from gateway.catalog.picking.typical import typical_usage
from gateway.catalog.schema import CatalogEntry
from gateway.ledger.expenses import ExpenseRates
from gateway.plan.hardware import Device
from gateway.plan.measured import Measured
from gateway.plan.question import PlanQuestion
from gateway.plan.roofline import MEMORY_SHARE
from gateway.plan.views import MeasuredView, PlannedDeviceView, ResultView, TextSpeedView
from gateway.pricing import NANOS_PER_USD, Unbookable, UnpricedUsage, format_usd, quote
from workers.contract.jobs import Usage


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """What every row of a plan needs: prices, efficiency and load."""

    rates: ExpenseRates
    price_nanos: Fraction | None
    """Price of one result."""
    efficiency: Fraction
    per_second: Fraction | None

    def hour_of(self, device: Device) -> int | None:
        """Return the price of an hour. That of all other devices is a GPU's, not a CPU's."""
        named = ExpenseRates(hours=self.rates.hours).hour_of(device.name)
        return self.rates.hour_nanos if named is None and device.peaks else named

    def result(self, seconds: Fraction, device: Device, devices: int) -> ResultView:
        return _result(
            seconds / self.efficiency,
            hour_nanos=self.hour_of(device),
            price_nanos=self.price_nanos,
            per_second=self.per_second,
            together=devices,
        )


def read_terms(
    entry: CatalogEntry | None, question: PlanQuestion, rates: ExpenseRates, usage: dict[str, int]
) -> PlanTerms:
    load = question.per_second
    return PlanTerms(
        rates,
        None if entry is None else _price_of_result(entry, usage),
        Fraction(str(question.efficiency)),
        None if load is None else Fraction(str(load)),
    )


def device_row(
    device: Device,
    devices: int,
    hour_nanos: int | None,
    text: TextSpeedView | None,
    result: ResultView | None,
) -> PlannedDeviceView:
    return {
        "name": device.name,
        "memory_bytes": device.memory,
        "bandwidth_bytes_per_s": device.bandwidth,
        "hour_usd": None if hour_nanos is None else format_usd(hour_nanos),
        "fits": devices == 1,
        "devices_needed": devices,
        "text": text,
        "result": result,
    }


def measured_rows(measured: Sequence[Measured], terms: PlanTerms) -> list[MeasuredView]:
    return [
        {
            **_result(
                one.device_seconds,
                hour_nanos=terms.rates.hour_of(one.device),
                price_nanos=one.price_nanos,
                per_second=terms.per_second,
            ),
            "basis": "measured",
            "device": one.device,
            "dtype": one.dtype,
            "requests": one.requests,
        }
        for one in measured
    ]


def common_assumptions(devices: Sequence[Device], terms: PlanTerms, precision: str) -> list[str]:
    percent, reached = float(100 * MEMORY_SHARE), float(100 * terms.efficiency)
    found = [
        "Computed figures of results are rooflines, upper bounds of speed, of which "
        f"{reached:g} % is assumed to be reached; measured ones are of this installation's "
        "receipts.",
        f"{percent:g} % of the memory is for weights and what is cached.",
        "Devices of one model share its work perfectly; an hour that is paid is used in full.",
    ]
    if precision == "fp8" and any(gpu.peaks and "fp8" not in gpu.peaks for gpu in devices):
        found.append("A device without fp8 computes such weights in bfloat16.")
    return found + [f"{device.name}: {device.note}." for device in devices if device.note]


def usd_text(nanos: Fraction) -> str:
    """Format with four decimals; an amount below $0.001 with nine."""
    usd = float(nanos / NANOS_PER_USD)
    return f"{usd:.4f}" if usd >= 0.001 else f"{usd:.9f}".rstrip("0").rstrip(".") or "0"


def _result(
    seconds: Fraction,
    *,
    hour_nanos: int | None,
    price_nanos: Fraction | None,
    per_second: Fraction | None,
    together: int = 1,
) -> ResultView:
    """Return the view of a result that takes ``seconds`` of one device.

    ``together`` is the number of devices that hold the model, in multiples of which they come.
    """
    paid = None if hour_nanos is None else seconds * hour_nanos / 3600
    margin = None
    if paid is not None and price_nanos:
        margin = round(float(100 * (price_nanos - paid) / price_nanos), 1)
    return {
        "basis": "computed",
        "device_seconds": float(seconds),
        "results_per_second": float(1 / seconds),
        "cost_usd": None if paid is None else usd_text(Fraction(math.ceil(paid))),
        "price_usd": None if price_nanos is None else usd_text(price_nanos),
        "margin_percent": margin,
        "devices": (
            None if per_second is None else math.ceil(per_second * seconds / together) * together
        ),
    }


def _price_of_result(entry: CatalogEntry, quantities: dict[str, int]) -> Fraction | None:
    """Return the entry's price of one result; None if it depends on what a plan does not know."""
    usage: Usage = msgspec.structs.replace(typical_usage(entry, entry.task), **quantities)
    try:
        return Fraction(quote(entry.selling_price, usage).total_nanos)
    except (Unbookable, UnpricedUsage):
        return None
