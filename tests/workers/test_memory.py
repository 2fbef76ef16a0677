"""Torch's errors for lack of memory are distinguished from other errors."""

from __future__ import annotations

import pytest
import torch

from workers.engines.memory import is_out_of_memory


def test_failed_cpu_allocation_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("no room")])
def test_memory_errors_are_out_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


def test_other_runtime_errors_are_not_out_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
