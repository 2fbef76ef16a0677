"""Recognises lack of memory, which is caused by a request or the load, not by the engine; measures
the memory of a device and of a model; and frees a model that is unloaded.

A collection walks every object of the libraries. It takes 0.2 s, in which no other model makes a
token. So an unload makes one only if parts of the model refer to themselves, which no shipped one
does, and the first after a while for what small garbage others have left.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from workers.contract.models import ModelSpec
from workers.engines.footprint import weights_estimate
from workers.engines.options import TorchOptions
from workers.protocol.engine import Demand, Memory

Parts: TypeAlias = Sequence[weakref.ref[Any]]

COLLECTED_AFTER_S: Final = 600.0
"""Time after a collection until an unload makes the next one in any case."""

_DEPTH_MAX: Final = 5
"""Depth to which modules are looked for in a loaded model."""
_PARTS_MAX: Final = 1000
"""Length of a collection beyond which it is a vocabulary, not one of modules."""

_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux tells the limit of a container, in both versions of its control groups."""
_RESERVE: Final = 0.1
"""Share of a device's memory that is left for activations, libraries and other programs."""
_RESERVE_MIN_BYTES: Final = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU raises a separate exception; torch's CPU allocator raises a plain ``RuntimeError``."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
    )


@contextlib.contextmanager
def translate_memory_errors() -> Iterator[None]:
    """Release torch's cached memory on a GPU. On a CPU, raise torch's error as ``MemoryError``."""
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise


def total_bytes(device: torch.device) -> int | None:
    """Return the memory of a device or, of a CPU, of the machine or its container; None if the
    system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            total = min(total, int(limit.read_text()))
    return total


def budget_bytes(device: torch.device) -> int | None:
    """Return how much memory the models of a device can take; None if it is not known."""
    total = total_bytes(device)
    if total is None:
        return None
    reserve = max(int(total * _RESERVE), _RESERVE_MIN_BYTES)
    return max(total - reserve, total // 2)


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has other memory than the host."""
    return device.type == "cuda"


def spare(device: torch.device, resident_bytes: int, room_bytes: int | None) -> int:
    """Return the memory for activations of a CUDA device's model: what its weights leave of its
    room, and at least half of the device's reserve."""
    total, budget = total_bytes(device), budget_bytes(device)
    assert total is not None
    assert budget is not None
    room = budget if room_bytes is None else room_bytes
    return max(room - resident_bytes, (total - budget) // 2)


def demand_of(spec: ModelSpec, options: TorchOptions, cache_bytes: int = 0) -> Demand:
    """Estimate the memory of an entry's model. Raise ``OSError`` or ``ValueError`` if its files
    cannot be read."""
    device = options.torch_device
    weights = weights_estimate(Path(spec.checkpoint), options.dtype) if spec.checkpoint else 0
    host = budget_bytes(torch.device("cpu")) if has_own_memory(device) else None
    return Demand(str(device), weights + cache_bytes, budget_bytes(device), host_budget_bytes=host)


def memory_of(
    device: torch.device,
    weights_bytes: int,
    cache_bytes: int = 0,
    optional_bytes: int = 0,
    *,
    host_bytes: int = 0,
) -> Memory:
    """Return the memory of a model, with that of its device if it has its own."""
    total, used = 0, 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
    return Memory(weights_bytes, cache_bytes, total, used, optional_bytes, host_bytes)


def weights_bytes(loaded: object) -> int:
    """Return the bytes of all parameters and buffers in a loaded model; shared ones count once."""
    sizes = {}
    for module in modules_in(loaded):
        for tensor in chain(module.parameters(), module.buffers()):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def modules_in(loaded: object) -> Iterator[torch.nn.Module]:
    """Find the modules of a loaded model, without those inside others."""
    return _modules(loaded, 0, set())


def _modules(value: Any, depth: int, seen: set[int]) -> Iterator[torch.nn.Module]:
    """Find the modules in an object, in its attributes and in collections of them."""
    if id(value) in seen or depth > _DEPTH_MAX:
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        yield value
        return
    parts: list[Any] = []
    if isinstance(value, Mapping | list | tuple | str | bytes):
        if isinstance(value, str | bytes) or len(value) > _PARTS_MAX:
            return
        parts += value.values() if isinstance(value, Mapping) else value
    elif not isinstance(value, type):
        parts += getattr(value, "__dict__", {}).values()
        if is_dataclass(value):
            parts += [getattr(value, each.name, None) for each in fields(value)]
    for part in parts:
        yield from _modules(part, depth + 1, seen)


def parts_of(loaded: object, *further: object) -> Parts:
    """Return the modules of a loaded model and ``further`` parts of it, without keeping them."""
    return [weakref.ref(part) for part in (*modules_in(loaded), *further) if part is not None]


class Collector:
    """Collects what unloaded models leave, as seldom as it can."""

    def __init__(self) -> None:
        self._collected_s = time.monotonic()

    def free(self, parts: Parts) -> None:
        """Free what is left of a model after the last reference to it has gone."""
        for part in parts:
            _forget_replaced(part())
        is_held = any(part() is not None for part in parts)
        if is_held or time.monotonic() - self._collected_s > COLLECTED_AFTER_S:
            frozen = gc.get_freeze_count() > 0
            gc.unfreeze()
            gc.collect()
            if frozen:
                gc.freeze()
            self._collected_s = time.monotonic()
        torch.cuda.empty_cache()


def _forget_replaced(part: Any) -> None:
    """Remove the methods of a module that an engine has replaced: each refers to its module."""
    if isinstance(part, torch.nn.Module):
        replaced = [name for name, value in vars(part).items() if inspect.isroutine(value)]
        for name in replaced:
            delattr(part, name)


COLLECTOR: Final = Collector()
"""That of this process."""
