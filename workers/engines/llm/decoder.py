"""Runs a model over its cache: reads prompts piece by piece, adds a token to every row.

What a forward needs is staged on the device first, so that the transfer can be timed apart, and its
logits come back to the CPU at once: after a forward nothing can fail for want of device memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workers.engines.llm.cache import SlotCache, attach
from workers.engines.llm.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Reading:
    """A piece of one prompt: ids and positions ``(1, tokens)`` int64, on the device."""

    slot: int
    start: int
    stop: int
    ids: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class Writing:
    """A token for every row: ids ``(rows, 1)`` and positions ``(rows,)`` int64, on the device."""

    ids: torch.Tensor
    positions: torch.Tensor
    longest: int


class Decoder:
    def __init__(self, checkpoint: Checkpoint) -> None:
        """Make the cache. Raise ``ValueError`` if the device is too small for it."""
        shape, self._device = checkpoint.shape, checkpoint.device
        room = _free_bytes(self._device)
        if room is not None and shape.bytes > room:
            raise ValueError(
                f"the cache for {shape.slots} slots of {shape.context} tokens takes "
                f"{shape.bytes / 2**30:.1f} GiB, and there are {room / 2**30:.1f}; lower the "
                "option slots or limits.context_tokens"
            )
        self._model: Any = checkpoint.model
        self._cache = SlotCache(shape, self._device)
        attach(self._model, self._cache)

    def stage_reading(self, slot: int, prompt: Sequence[int], *, start: int, stop: int) -> Reading:
        ids = torch.tensor([prompt[start:stop]], device=self._device)
        positions = torch.arange(start, stop, device=self._device)[None]
        return Reading(slot, start, stop, ids, positions)

    def stage_writing(
        self, last: Iterable[tuple[int, int, int]], idle: Iterable[tuple[int, int]]
    ) -> Writing:
        """``last``: slot, token and position of each sequence's last token, which is written next.

        A row that is idle is written to as well, at position 0 or where ``idle`` says for its slot:
        into a prompt that is half read it must be where the next piece will begin.
        """
        ids = [0] * self._cache.shape.rows
        positions = [0] * self._cache.shape.rows
        for slot, position in idle:
            positions[slot] = position
        longest = 0
        for slot, token, position in last:
            ids[slot], positions[slot] = token, position
            longest = max(longest, position)
        return Writing(
            torch.tensor(ids, device=self._device)[:, None],
            torch.tensor(positions, device=self._device),
            longest,
        )

    def read(self, reading: Reading) -> torch.Tensor:
        """Read a piece; return the logits ``(vocabulary,)`` float32, cpu, of what comes next."""
        self._cache.begin_read(reading.slot, reading.start, reading.stop)
        return self._forward(reading.ids, reading.positions)[0]

    def write(self, writing: Writing) -> torch.Tensor:
        """Write a token into every row; return logits ``(rows, vocabulary)`` float32, cpu.

        Prompts are read after it in a step, for it writes into the rows of newcomers too.
        """
        self._cache.begin_write(writing.positions, writing.longest)
        return self._forward(writing.ids, writing.positions[:, None])

    def copy(self, source: int, targets: Sequence[int], tokens: int) -> None:
        self._cache.copy(source, targets, tokens)

    def clear(self, slots: Sequence[int], tokens: int) -> None:
        self._cache.clear(slots, tokens)

    def wait(self) -> None:
        """Wait for the device, so that whoever times a phase times its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self._model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
        logits: torch.Tensor = out.logits[:, -1].cpu().float()
        return logits


def _free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a device; of a CPU, what Linux can give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return None
