"""The processors of this machine, as planning sees them: found, and measured where nobody tells."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from gateway.plan.hardware import Device, find_gpu

COPIED_BYTES: Final = 256 * 2**20
"""Far larger than a processor's caches."""
MEASURE_S: Final = 0.3
_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


def devices_here() -> tuple[Device, ...]:
    """The processor, its bandwidth measured for a third of a second, and each kind of GPU."""
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
            note="its bandwidth is measured by copying, and what its caches hold is read faster; "
            "its operations are not known",
        ),
    )


def _memory_bytes() -> int | None:
    """The memory of this machine; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    total = next((line.split()[1] for line in lines if line.startswith("MemTotal:")), None)
    return None if total is None else int(total) * 1024


def measure_bandwidth() -> int:
    """Bytes read and written in a second, in the fastest of some copies by all cores together."""
    cores = os.cpu_count() or 1
    size = COPIED_BYTES // cores
    pieces = [(ctypes.create_string_buffer(size), bytes(size)) for _ in range(cores)]

    def copy(piece: tuple[ctypes.Array[ctypes.c_char], bytes]) -> None:
        # Unlike Python's own copies this one lets the other threads run.
        ctypes.memmove(piece[0], piece[1], size)

    with ThreadPoolExecutor(cores) as threads:
        # The first touch of a page is the system's work, not the memory's.
        list(threads.map(copy, pieces))
        fastest, ends = float("inf"), time.perf_counter() + MEASURE_S
        while (started := time.perf_counter()) < ends:
            list(threads.map(copy, pieces))
            fastest = min(fastest, time.perf_counter() - started)
    return round(2 * cores * size / fastest)


def _gpus_here() -> tuple[Device, ...]:
    """One of each kind that the driver tells of and the table knows, with its own memory."""
    if shutil.which(_QUERY[0]) is None:
        return ()
    try:
        said = subprocess.run(_QUERY, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return read_gpus(said)


def read_gpus(said: str) -> tuple[Device, ...]:
    """Read lines of ``name, MiB``. A GPU that the table lacks is left out: nobody tells its
    bandwidth."""
    found: dict[str, Device] = {}
    for line in said.splitlines():
        name, _, mib = line.rpartition(",")
        try:
            gpu = find_gpu(name)
            memory = int(mib) * 2**20
        except (LookupError, ValueError):
            continue
        found[gpu.name] = dataclasses.replace(
            gpu, name=f"{gpu.name} here", memory=memory, note="memory as its driver tells it"
        )
    return tuple(found.values())
