"""The CUDA device of an engine process: made torch's current one, and watched for progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from workers import devices
from workers.pulse import PULSE


def select(option: Any) -> None:
    """Make the CUDA device of a catalog entry the current one of this process.

    Libraries allocate on the current device where they are told none. Products of float32 matrices
    use TF32, as torch's convolutions do by default: ten bits of mantissa, several times faster.
    """
    if not isinstance(option, str | None) or not torch.cuda.is_available():
        return
    name = devices.parse(option or "auto")[0]
    if name == "cpu":
        return
    index = torch.device(name).index if name.startswith("cuda:") else 0
    if (index or 0) < torch.cuda.device_count():
        torch.cuda.set_device(index or 0)
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def stage(
    values: Sequence[Any] | np.ndarray[Any, Any],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Copy numbers to a device.

    To CUDA they are copied from pinned memory, which torch keeps until the copy has ended, so that
    neither waits for the work that is enqueued: the next kernels are prepared meanwhile.
    """
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)


class Fetch:
    """A copy of a tensor on the host, which is enqueued now and read later.

    From CUDA it goes to pinned memory. ``read`` waits for what was enqueued before the copy, and
    for nothing that has been enqueued since.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._copied: Any = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            make_event: Any = torch.cuda.Event
            self._copied = make_event()
            self._copied.record()

    def read(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


STAGES_AHEAD: Final = 2
"""Stages that are enqueued while the device works on an earlier one, so that it never idles."""


class DeviceProgress:
    """Reports progress as a CUDA device makes it, since work is only enqueued when it is called.

    Without it, everything that a long forward pass enqueued would count as progress at once, and
    the wait for it as silence.
    """

    def __init__(self) -> None:
        self._stages: deque[Any] = deque()
        """CUDA events, the oldest first."""

    def mark(self) -> None:
        """End a stage of the enqueued work; report those that the device has completed."""
        make_event: Any = torch.cuda.Event
        stage = make_event()
        stage.record()
        self._stages.append(stage)
        while self._stages and self._stages[0].query():
            self._stages.popleft()
            PULSE.beat()

    def catch_up(self) -> None:
        """Wait until the device is at most ``STAGES_AHEAD`` stages behind."""
        while len(self._stages) > STAGES_AHEAD:
            self._stages.popleft().synchronize()
            PULSE.beat()

    def wait(self) -> None:
        """Wait until the device has completed everything, and report each stage."""
        while self._stages:
            self._stages.popleft().synchronize()
            PULSE.beat()
        torch.cuda.synchronize()


PROGRESS: Final = DeviceProgress()
"""The progress of this process's CUDA device."""
