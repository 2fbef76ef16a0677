"""The processors of this machine for capacity planning: GPUs by their driver, the CPU measured."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gateway.plan.hardware import Device, find_gpu

COPIED_BYTES: Final = 256 * 2**20
"""Size of the copies, far larger than a processor's caches."""
MEASURE_S: Final = 0.3
_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


def devices_here() -> tuple[Device, ...]:
    """Return each kind of GPU, and the CPU, whose bandwidth is measured for a third of a second."""
    return (*_gpus_here(), *_processor())


def _processor() -> tuple[Device, ...]:
    memory = _memory_bytes()
    if memory is None:
        return ()
    return (
        Device(
            "CPU here",
            memory,
            measure_bandwidth(),
            note="its bandwidth is measured by copying (cached data is read faster); "
            "its operations per second are unknown",
        ),
    )


def _memory_bytes() -> int | None:
    """Return the memory of this machine; None if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def measure_bandwidth() -> int:
    """Return bytes read and written per second, of the fastest of some copies by all cores."""
    cores = os.cpu_count() or 1
    size = COPIED_BYTES // cores
    pieces = [(ctypes.create_string_buffer(size), bytes(size)) for _ in range(cores)]

    def copy(piece: tuple[ctypes.Array[ctypes.c_char], bytes]) -> None:
        # Unlike copying in Python, ``memmove`` releases the interpreter's lock.
        ctypes.memmove(piece[0], piece[1], size)

    with ThreadPoolExecutor(cores) as threads:
        # The first access to a page includes its allocation, so it is not measured.
        list(threads.map(copy, pieces))
        fastest, ends = float("inf"), time.perf_counter() + MEASURE_S
        while (started := time.perf_counter()) < ends:
            list(threads.map(copy, pieces))
            fastest = min(fastest, time.perf_counter() - started)
    return round(2 * cores * size / fastest)


def _gpus_here() -> tuple[Device, ...]:
    """Return one GPU of each kind that the driver lists and the table has, with its own memory."""
    if shutil.which(_QUERY[0]) is None:
        return ()
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return read_gpus(done.stdout)


def read_gpus(output: str) -> tuple[Device, ...]:
    """Parse lines of ``name, MiB``. GPUs that are not in the table are skipped, because their
    bandwidth is unknown."""
    found: dict[str, Device] = {}
    for line in output.splitlines():
        name, _, mib = line.rpartition(",")
        try:
            gpu = find_gpu(name)
            memory = int(mib) * 2**20
        except (LookupError, ValueError):
            continue
        found[gpu.name] = dataclasses.replace(
            gpu, name=f"{gpu.name} here", memory=memory, note="memory as reported by its driver"
        )
    return tuple(found.values())
