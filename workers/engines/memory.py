"""Recognises lack of memory, which is caused by a request or the load, not by the engine."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU raises a separate exception; torch's CPU allocator raises a plain ``RuntimeError``."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
    )
