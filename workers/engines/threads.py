"""The number of torch's CPU threads, which is one setting for all models of a process.

Each engine therefore sets its own before every step. The default is torch's initial number, that of
the machine or of ``OMP_NUM_THREADS``; it is read before any engine changes it.
"""

from __future__ import annotations

from typing import Any, Final

import torch

SMALL: Final = 20_000_000
"""Number of weights below which products are so short that threads would only wait."""
_DEFAULT: Final = torch.get_num_threads()


def threads_for(model: Any, configured: int | None) -> int:
    """Return the threads of a model: those configured, one if it is small, otherwise all."""
    if configured is not None:
        return configured
    return 1 if sum(weight.numel() for weight in model.parameters()) < SMALL else _DEFAULT


def use_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
