"""Makes the plan of a model: memory, speed, cost and margin on each device, as its view."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.ledger.expenses import NO_RATES, ExpenseRates
from gateway.plan.hardware import Device
from gateway.plan.measured import Measured
from gateway.plan.media_plan import plan_media
from gateway.plan.question import PlanQuestion
from gateway.plan.shapes import Shape
from gateway.plan.subjects import Subject
from gateway.plan.text_plan import plan_text
from gateway.plan.views import PlanView


def make_plan(
    subject: Subject,
    question: PlanQuestion,
    devices: Sequence[Device],
    *,
    rates: ExpenseRates = NO_RATES,
    measured: Sequence[Measured] = (),
) -> PlanView:
    """Return the plan of a model, a row for each device.

    Raise ``ValueError`` if the question does not fit the model.
    """
    if isinstance(subject.model, Shape):
        return plan_text(subject, subject.model, question, devices, rates, measured)
    return plan_media(subject, subject.model, question, devices, rates, measured)
