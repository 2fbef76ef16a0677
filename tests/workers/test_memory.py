"""What torch says when there is no room, and what only sounds like it."""

from __future__ import annotations

import pytest
import torch

from workers.engines.memory import is_out_of_memory


def test_torch_without_room_on_a_cpu_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("no room")])
def test_errors_of_the_name_are(error: BaseException) -> None:
    assert is_out_of_memory(error)


def test_another_mistake_is_not() -> None:
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
