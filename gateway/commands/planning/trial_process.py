"""Runs the process in which a command loads or inspects models, since the gateway has no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from gateway.up.environment import of_trial
from workers.contract.models import ModelSpec
from workers.contract.trials import Inspection, InspectionOrder, TrialOrder, TrialReport

_REPORT: Final = msgspec.json.Decoder(TrialReport)
_INSPECTION: Final = msgspec.json.Decoder(Inspection)
_TAIL: Final = 500


class TrialFailed(Exception):
    """The process ended without its results; the message is for the operator."""


def run_trial(order: TrialOrder, *, threads: int | None) -> Iterator[TrialReport]:
    """Yield the reports of the process as they arrive. Raise ``TrialFailed`` if it fails."""
    for line in _run("workers.runtime.trial", order, threads=threads):
        yield _REPORT.decode(line)


def run_inspection(specs: Sequence[ModelSpec]) -> Iterator[Inspection]:
    """Yield what engines find in the checkpoints of entries, as it arrives.

    Raise ``TrialFailed`` if the process fails.
    """
    for line in _run("workers.runtime.inspection", InspectionOrder(tuple(specs)), threads=1):
        yield _INSPECTION.decode(line)


def _run(module: str, order: Any, *, threads: int | None) -> Iterator[bytes]:
    """Yield the lines that a process writes in answer to an order."""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=of_trial(os.environ, threads=threads),
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            # It stays open, because the process ends with it.
            child.stdin.write(msgspec.json.encode(order) + b"\n")
            child.stdin.flush()
            yield from child.stdout
            code = child.wait()
        finally:
            child.kill()
        if code:
            errors.seek(0)
            raise TrialFailed(_reason(code, errors.read().decode(errors="replace")))


def _reason(code: int, printed: str) -> str:
    if code == -9:
        return "the system ended the process, probably because memory ran out"
    last = " ".join(printed.strip().splitlines()[-1:])
    return f"the process ended with {code}: {last[-_TAIL:]}"
