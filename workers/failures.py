"""What an engine's exceptions mean. Torch's are known by name, as nothing here imports it."""

from __future__ import annotations

from workers.contract.jobs import Failed


class DeviceLostError(Exception):
    """The device answers no more; only a new process can have it back."""


def describe(error: Exception) -> Failed:
    """What a client may know of an engine's exception."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Failed(code="out_of_memory", message="The device ran out of memory.")
    return Failed(code="engine_error", message="The engine failed on this request.")


def raise_if_device_is_lost(error: Exception) -> None:
    """Torch's AcceleratorError is sticky: every later call on the device fails as well."""
    if type(error).__name__ == "AcceleratorError":
        raise DeviceLostError(str(error)) from error
