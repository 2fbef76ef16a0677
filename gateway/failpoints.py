"""Places at which tests kill the process, as power failures do: ``TOLLGATE_FAILPOINT=after_hold``.

Without that variable ``reach`` does nothing.
"""

from __future__ import annotations

import os
import signal
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
]

_ARMED: Final = os.environ.get("TOLLGATE_FAILPOINT")


def reach(point: Failpoint) -> None:
    """Die here if a test asked for it."""
    if point == _ARMED:
        os.kill(os.getpid(), signal.SIGKILL)
