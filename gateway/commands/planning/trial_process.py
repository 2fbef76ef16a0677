"""Runs the process in which ``tollgate try`` loads a model, since the gateway has no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Final

import msgspec

from gateway.up.environment import of_trial
from workers.contract.trials import TrialOrder, TrialReport

_REPORT: Final = msgspec.json.Decoder(TrialReport)
_TAIL: Final = 500


class TrialFailed(Exception):
    """The process ended without its results; the message is for the operator."""


def run_trial(order: TrialOrder, *, threads: int | None) -> Iterator[TrialReport]:
    """Yield the reports of the process as they arrive. Raise ``TrialFailed`` if it fails."""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-m", "workers.runtime.trial"],
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
            for line in child.stdout:
                yield _REPORT.decode(line)
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
