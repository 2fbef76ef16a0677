"""Keeps parts of a pipeline in host memory between their uses, if the device lacks room for all.

Encoders and autoencoders work once in a request, the denoiser in every step. Weights never change:
the host has a copy of each, pinned on CUDA, to which a part returns without being copied again. The
part that was not used for the longest time leaves first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class _Part:
    """Tensors of a module with their copies on the host."""

    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    bytes: int = 0
    is_here: bool = False


class Parking:
    """``room_bytes``: memory of the device for the parts that were added, together.

    The part in use stays, even if it alone takes more.
    """

    def __init__(self, device: torch.device, room_bytes: int) -> None:
        self.device = device
        self._room_bytes = room_bytes
        self._parts: dict[torch.nn.Module, _Part] = {}
        """The least recently used first."""

    @property
    def bytes(self) -> int:
        """Memory of all parts."""
        return sum(part.bytes for part in self._parts.values())

    @property
    def reserved_bytes(self) -> int:
        """Most memory of the device that parts take at a time."""
        largest = max((part.bytes for part in self._parts.values()), default=0)
        return min(self.bytes, max(self._room_bytes, largest))

    @property
    def resident_bytes(self) -> int:
        return sum(part.bytes for part in self._parts.values() if part.is_here)

    def add(self, module: torch.nn.Module) -> None:
        """Park a module, which is on the host."""
        part = self._parts[module] = _Part()
        for tensor in chain(module.parameters(), module.buffers()):
            host = tensor.detach()
            if self.device.type == "cuda":
                host = host.pin_memory()
                tensor.data = host
            part.tensors.append((tensor, host))
            part.bytes += host.nbytes

    def has(self, module: torch.nn.Module) -> bool:
        return module in self._parts

    def here(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of a part so that its tensors are moved to the device.

        Some pipelines create them where the part is, which may be the host.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            moved = [self._move(value) for value in args]
            return function(*moved, **{name: self._move(value) for name, value in kwargs.items()})

        return call

    def _move(self, value: Any) -> Any:
        return value.to(self.device) if torch.is_tensor(value) else value

    def bring(self, module: torch.nn.Module) -> None:
        """Bring a module to the device; others leave until it fits."""
        part = self._parts[module] = self._parts.pop(module)
        if part.is_here:
            return
        for other in self._parts.values():
            if self.resident_bytes + part.bytes <= self._room_bytes:
                break
            if other.is_here:
                _leave(other)
        try:
            for tensor, host in part.tensors:
                tensor.data = host.to(self.device, non_blocking=True, copy=True)
        except RuntimeError:  # such as lack of memory
            _leave(part)
            raise
        part.is_here = True


def _leave(part: _Part) -> None:
    for tensor, host in part.tensors:
        tensor.data = host
    part.is_here = False


def run_on(pipeline: Any, device: torch.device) -> None:
    """Let a pipeline create its tensors on a device, wherever its parts are."""
    kind = type(pipeline)
    here = property(lambda _: device)
    pipeline.__class__ = type(kind.__name__, (kind,), {"device": here, "_execution_device": here})
