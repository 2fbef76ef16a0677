"""Recognises lack of memory, which is caused by a request or the load, not by the engine; and tells
how much a device has."""

from __future__ import annotations

import os

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU raises a separate exception; torch's CPU allocator raises a plain ``RuntimeError``."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
    )


def total_bytes(device: torch.device) -> int | None:
    """Return the memory of a device; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
