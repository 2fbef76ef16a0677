"""Keep-alives within a step: an engine process reports progress while a long step runs.

``beat`` can be called from any thread and as often as convenient; most calls only read a clock.
Call it only after real progress, such as between the layers of a network or between the frames of a
file, and never from a timer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 0.25
"""Minimum interval between two keep-alives."""


class Pulse:
    """``send`` sends a keep-alive; it is called in the thread that called ``beat``."""

    def __init__(self) -> None:
        self.send: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._sent_s = 0.0

    def beat(self) -> None:
        if self.send is None or time.monotonic() - self._sent_s < EVERY_S:
            return
        if self._lock.acquire(blocking=False):
            try:
                self._sent_s = time.monotonic()
                self.send()
            finally:
                self._lock.release()


PULSE: Final = Pulse()
"""The pulse of this process; only an engine process sends keep-alives."""
