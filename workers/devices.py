"""Names of devices, the CUDA devices of this machine, and which of them serve a catalog entry.

A worker has one or several devices, each with its own agent and engine process. Torch is not
imported: the CUDA driver is asked how many devices there are, and torch's files whether it was
built for CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

ACCEPTED: Final = "auto, cpu, cuda, cuda:N, or a list such as cuda:0,cuda:1"
_CUDA: Final = re.compile(r"cuda(:(0|[1-9][0-9]{0,3}))?")
_DRIVER: Final = "libcuda.so.1"


def parse(value: str) -> tuple[str, ...]:
    """Split a setting or an option into names of devices. Raise ``ValueError`` if one is wrong."""
    names = tuple(name.strip() for name in value.split(","))
    known = all(name in ("auto", "cpu") or _CUDA.fullmatch(name) for name in names)
    if not known or (len(names) > 1 and ("auto" in names or "cuda" in names)):
        raise ValueError(f"device is {value!r}; accepted are {ACCEPTED}")
    if len(set(names)) < len(names):
        raise ValueError(f"device is {value!r}, which names a device twice")
    return names


def choose(
    value: str, *, count: Callable[[], int] = lambda: cuda_devices()
) -> tuple[tuple[str, ...], str]:
    """Return a worker's devices, and a warning for its operator or an empty string.

    ``auto`` is every CUDA device, or the CPU if there is none; ``cuda`` is the first one.
    """
    names = parse(value)
    if names == ("cuda",):
        return ("cuda:0",), ""
    if names != ("auto",):
        return names, ""
    if not (found := count()):
        return ("cpu",), ""
    if torch_lacks_cuda():
        return ("cpu",), (
            f"this machine has {found} CUDA device{'s' * (found > 1)}, but its torch was built "
            "without CUDA, so all models run on the CPU; install torch from PyTorch's CUDA index"
        )
    return tuple(f"cuda:{index}" for index in range(found)), ""


def device_of(option: str | None, own: str, devices: Sequence[str]) -> str | None:
    """Return the device on which the agent of ``own`` runs an entry; None if others run it.

    ``devices`` are all of the worker. An entry without ``option`` is replicated: each device runs
    it. ``cpu`` runs beside the first device. Raise ``ValueError`` if no device of the worker fits.
    """
    wanted = ("auto",) if option is None else parse(str(option))
    if wanted == ("auto",):
        return own
    fitting = {one for one in devices if one in wanted or ("cuda" in wanted and _is_cuda(one))}
    if "cpu" in wanted and "cpu" not in devices and own == devices[0]:
        return "cpu"
    if not fitting and wanted != ("cpu",):
        raise ValueError(f"its device is {option}, but this worker has {', '.join(devices)}")
    return own if own in fitting else None


def cuda_devices() -> int:
    """Return the number of devices that the CUDA driver shows this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL(_DRIVER)
        found = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(found)):
            return 0
    except (OSError, AttributeError):
        return 0
    return found.value


def torch_lacks_cuda() -> bool:
    """Return whether torch is installed, but can use no CUDA device."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    except OSError:
        return False
    return re.search(r"^(cuda|hip)\b[^=\n]*= *['\"]", text, re.MULTILINE) is None


def _is_cuda(name: str) -> bool:
    return name.startswith("cuda")
