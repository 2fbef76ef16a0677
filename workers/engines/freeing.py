"""Frees a model that is unloaded.

A collection walks every object of the libraries. It takes 0.2 s, in which no other model makes a
token. So one is made only if parts of the model refer to each other, and at the first unload after
a while, for what small garbage others have left.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from workers.engines.memory import modules_in

INTERVAL_S: Final = 600.0
"""Time after a collection until an unload makes the next one in any case."""

Parts = Sequence[weakref.ref[Any]]


def parts_of(loaded: object, *further: object) -> Parts:
    """Return the modules of a loaded model and ``further`` parts of it, without keeping them."""
    return [weakref.ref(part) for part in (*modules_in(loaded), *further) if part is not None]


class Collector:
    def __init__(self) -> None:
        self._collected_s = time.monotonic()

    def free(self, parts: Parts) -> None:
        """Free what is left of a model after the last reference to it has gone."""
        is_held = any(part() is not None for part in parts)
        if is_held or time.monotonic() - self._collected_s > INTERVAL_S:
            frozen = gc.get_freeze_count() > 0
            gc.unfreeze()
            gc.collect()
            if frozen:
                gc.freeze()
            self._collected_s = time.monotonic()
        torch.cuda.empty_cache()


COLLECTOR: Final = Collector()
"""That of this process."""
