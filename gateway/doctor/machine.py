"""Examines the machine: memory, processors, devices, disks. Imports neither torch nor SQL."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from gateway.disk import free_bytes, reserve_bytes, written_paths
from gateway.doctor.diagnosis import Diagnosis, gigabytes, note, ok, problem, warning
from gateway.settings import Settings

MEMORY_MIN_BYTES: Final = 1_500_000_000
"""What gateway, queue server and the pocket models need together, without a margin."""
LOAD_MAX: Final = 1.5
"""Load per core above which everything waits noticeably for a processor."""
_QUERY: Final = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.used,utilization.gpu",
    "--format=csv,noheader,nounits",
)
_CGROUP: Final = Path("/sys/fs/cgroup")


def examine_machine(settings: Settings) -> Iterator[Diagnosis]:
    yield memory(_meminfo(), _limit("memory.max"))
    yield cores(_cores(), os.getloadavg()[0])
    yield from devices(_nvidia_smi(), os.environ)
    yield from disks(settings)


def memory(kibibytes: Mapping[str, int], limit_bytes: int | None) -> Diagnosis:
    """Examine the memory, by ``/proc/meminfo`` and the limit of the container, if any."""
    if "MemTotal" not in kibibytes:
        return note("memory", "this system does not report its memory")
    total = kibibytes["MemTotal"] * 1024
    free = kibibytes.get("MemAvailable", kibibytes["MemTotal"]) * 1024
    if limit_bytes is not None and limit_bytes < total:
        total, free = limit_bytes, min(free, limit_bytes)
    found = f"{gigabytes(total)}, of which {gigabytes(free)} are available"
    if total < MEMORY_MIN_BYTES:
        return problem(
            "memory",
            found,
            f"Give it {gigabytes(MEMORY_MIN_BYTES)} or more, or serve fewer models: a smaller "
            "catalog, or `tollgate-worker --model NAME`.",
        )
    if free < MEMORY_MIN_BYTES / 3:
        return warning("memory", found, "Stop other programs, or serve fewer models.")
    return ok("memory", found)


def cores(count: float, load: float) -> Diagnosis:
    found = f"{count:g}, with a load of {load:.1f}"
    if load > LOAD_MAX * count:
        return warning(
            "cores",
            found,
            "More runs than there are cores, so everything takes longer: stop other programs, or "
            "wait until they end.",
        )
    return ok("cores", found)


def devices(lines: str | None, environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Examine GPUs, by lines of ``name, MiB, MiB used, % busy`` of their driver."""
    found = [line.split(", ") for line in (lines or "").splitlines() if line.count(", ") == 3]
    for name, total, used, busy in found:
        yield ok("device", f"{name}, {total} MiB, of which {used} are in use, {busy} % busy")
    if found and environ.get("TOLLGATE_DEVICE") == "cpu":
        yield warning(
            "device",
            "workers use the CPU, although there is a GPU",
            "Unset TOLLGATE_DEVICE, so that workers use every GPU, or set it to cuda:0.",
        )
    if not found:
        yield note("device", "no NVIDIA GPU is found; models run on the CPU")


def disks(settings: Settings) -> Iterator[Diagnosis]:
    for path in written_paths(settings):
        free, reserve = free_bytes(path), reserve_bytes(path, settings.disk_reserve_bytes)
        found = f"{gigabytes(free)} free for {path}"
        if free < reserve:
            yield problem(
                "disk",
                f"{found}, less than the reserve of {gigabytes(reserve)}, so nothing is stored",
                "Delete other files, or set TOLLGATE_DISK_RESERVE_BYTES.",
            )
        elif free < 2 * reserve:
            yield warning("disk", found, "Make room soon: uploads stop at the reserve.")
        else:
            yield ok("disk", found)


def _meminfo() -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0])
    return found


def _cores() -> float:
    """Return the cores that this process may use, at most those of its container."""
    available = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        available = min(available, int(quota) / int(period))
    return available


def _limit(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((_CGROUP / name).read_text())
    return None


def _nvidia_smi() -> str | None:
    if shutil.which(_QUERY[0]) is None:
        return None
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
