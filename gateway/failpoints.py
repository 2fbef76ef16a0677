"""Failpoints: places where tests break the process, selected by ``TOLLGATE_FAILPOINT``.

``after_hold`` kills the process there, as a power failure would. ``falter:settler:2`` makes the
first two beats of a background loop raise (without the number: all), ``falter:settler,watch:1`` the
first of each of two loops; ``hang:settler`` makes the loop hang. Without the variable, these
functions have no effect.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Final, Literal, TypeAlias

Failpoint: TypeAlias = Literal[
    "sources_stored",
    "voice_stored",
    "voice_ended",
    "after_hold",
    "after_enqueue",
    "before_settle",
    "after_settle",
    "batch_line_recorded",
    "batch_files_written",
    "step_placed",
    "step_recorded",
    "workflow_ended",
    "closed",
    "close_begun",
    "close_sealed",
    "close_rebated",
    "close_issued",
    "archive_begun",
    "archive_written",
    "archive_verified",
    "archive_removing",
    "archive_batch",
    "archive_removed",
    "archive_dropped",
    "archive_rewritten",
    "archive_switched",
    "restore_begun",
    "restore_batch",
    "restore_inserted",
    "restore_ended",
]

_ARMED: Final = os.environ.get("TOLLGATE_FAILPOINT")


_KIND, _, _REST = (_ARMED or "").partition(":")
_NAMES, _, _TIMES = _REST.partition(":")
_LOOPS: Final = frozenset(_NAMES.split(","))
_faltered: Final = Counter[str]()


def reach(point: Failpoint) -> None:
    """Kill this process if the failpoint is set."""
    if point == _ARMED:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_if_faltering(loop: str) -> None:
    """Raise ``RuntimeError`` if a failure of this loop is set."""
    if _KIND == "falter" and loop in _LOOPS and (not _TIMES or _faltered[loop] < int(_TIMES)):
        _faltered[loop] += 1
        raise RuntimeError(f"a test broke the loop {loop}")


def hangs(loop: str) -> bool:
    """Whether this loop is set to hang."""
    return _KIND == "hang" and loop in _LOOPS
