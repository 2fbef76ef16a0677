"""``tollgate try`` of a model of pictures: seconds, and the difference of a precision."""

from __future__ import annotations

from pathlib import Path

import msgspec

from workers.contract.media import ImageInput
from workers.contract.models import ModelSpec
from workers.contract.trials import (
    TrialAgreement,
    TrialOrder,
    TrialReference,
    TrialReport,
    TrialRun,
)
from workers.runtime.trial import Trial

POCKET = Path(__file__).parents[3] / "workers" / "pocket" / "image"


def order(dtype: str) -> TrialOrder:
    options = {"dtype": dtype, "device": "cpu", "threads": 1}
    spec = ModelSpec("pocket", "text-to-image", "diffusion", str(POCKET), options)
    asked = ImageInput("a red circle", steps=2, guidance=1.0, seed=3, width=64, height=64)
    return TrialOrder(spec, (1,), (msgspec.to_builtins(asked),), 1)


def run(given: TrialOrder) -> list[TrialReport]:
    reports: list[TrialReport] = []
    Trial(given, reports.append).run()
    return reports


def test_pictures_are_compared_by_their_values() -> None:
    timed, reference = run(order("float32"))
    assert isinstance(reference, TrialReference)

    _, same = run(msgspec.structs.replace(order("float32"), reference=reference.answers))
    _, rough = run(msgspec.structs.replace(order("bfloat16"), reference=reference.answers))

    assert isinstance(timed, TrialRun)
    assert timed.problem is None
    assert all(timings.total_us for timings in timed.timings)
    assert isinstance(same, TrialAgreement)
    assert isinstance(rough, TrialAgreement)
    assert same.difference == 0
    assert rough.difference is not None
    assert 0 < rough.difference < 0.1
