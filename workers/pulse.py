"""Signs of life within a step: an engine process in a long one still shows that it gets on.

``beat`` may be called from any thread, as often as it is convenient; most calls only read a clock.
What is called must really follow from progress: a beat between the layers of a network, or between
the frames of a file, none from a timer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 0.25
"""A beat is passed on at most so often."""


class Pulse:
    """``tell`` passes a beat on; it is called by whichever thread happened to beat."""

    def __init__(self) -> None:
        self.tell: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._told_s = 0.0

    def beat(self) -> None:
        if self.tell is None or time.monotonic() - self._told_s < EVERY_S:
            return
        if self._lock.acquire(blocking=False):
            try:
                self._told_s = time.monotonic()
                self.tell()
            finally:
                self._lock.release()


PULSE: Final = Pulse()
"""That of this process; only an engine process passes it on."""
