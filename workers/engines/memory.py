"""Whether it was memory that ran out: a request's fault or the load's, not the engine's."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU says it by an error of its own; torch's allocator of a CPU by a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
    )
