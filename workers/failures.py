"""Classifies the exceptions of engines. Torch's are matched by name: torch is not imported here."""

from __future__ import annotations

from workers.contract.jobs import Failed


class DeviceLostError(Exception):
    """The device no longer responds; only a new process can recover it."""


def describe(error: Exception) -> Failed:
    """Convert an engine's exception to a failure that can be shown to the client."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Failed(code="out_of_memory", message="The device ran out of memory.")
    return Failed(code="engine_error", message="The engine failed on this request.")


def raise_if_device_is_lost(error: Exception) -> None:
    """Raise ``DeviceLostError`` for torch's ``AcceleratorError``, which is sticky: every later call
    on the device fails too."""
    if type(error).__name__ == "AcceleratorError":
        raise DeviceLostError(str(error)) from error
