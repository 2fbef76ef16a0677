"""How many CPU threads torch has, of which there is one number for all the models of a process.

So each engine sets its own before it steps. Read before anything has set it, the number that torch
begins with is the device's, or what ``OMP_NUM_THREADS`` says.
"""

from __future__ import annotations

from typing import Any, Final

import torch

SMALL: Final = 20_000_000
"""Weights of a model whose products are so short that threads would only wait for each other."""
_GIVEN: Final = torch.get_num_threads()


def threads_for(model: Any, asked: int | None) -> int:
    """The threads of a model: those asked for, one if it is small, otherwise all."""
    if asked is not None:
        return asked
    return 1 if sum(weight.numel() for weight in model.parameters()) < SMALL else _GIVEN


def use_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
