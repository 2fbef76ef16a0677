"""Completes the outcome of a job with what the loop has measured of it."""

from __future__ import annotations

import msgspec

from workers.contract.attempts import RunDetails
from workers.contract.delivered import chargeable
from workers.contract.jobs import Cancelled, Failed, Outcome, Usage
from workers.runtime.lanes import Run


def complete(run: Run, outcome: Outcome, *, worker: str) -> Outcome:
    """Return the outcome with timings, device time and what of it was delivered."""
    preprocess_us, transfer_us, forward_us, postprocess_us = run.spent
    token_times = run.token_times
    first_us = run.queue_us + token_times.first_us - run.leased_us if token_times.started else 0
    timings = msgspec.structs.replace(
        outcome.timings,  # keeps what only the engine measures
        queue_us=run.queue_us,
        load_us=run.load_us,
        preprocess_us=preprocess_us + run.background_pre_us,
        transfer_us=transfer_us,
        forward_us=forward_us,
        postprocess_us=postprocess_us + run.background_post_us,
        first_token_us=first_us,
        per_token_us=token_times.per_token_us,
        gap_us=token_times.gap_us,
        tokens=token_times.tokens,
    )
    usage: Usage = msgspec.structs.replace(outcome.usage, gpu_us=sum(run.spent))
    if isinstance(outcome, Cancelled | Failed) and run.tally.has_delivered:
        usage = chargeable(usage, run.tally.usage())
        outcome = msgspec.structs.replace(outcome, delivered=True)
    hardware = run.lane.hardware
    details = RunDetails(hardware.device, hardware.dtype, run.rows)
    return msgspec.structs.replace(
        outcome, usage=usage, timings=timings, worker=worker, details=details
    )
