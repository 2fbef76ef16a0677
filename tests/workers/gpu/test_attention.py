"""Torch's attention over blocks, with each of its kernels alone: an engine would fall back."""

from __future__ import annotations

import pytest
import torch

from workers.engines.llm import varlen
from workers.engines.llm.cache import CacheShape
from workers.engines.llm.varlen import BLOCK_TOKENS, VarlenCache, find_attention, make_cache

pytestmark = pytest.mark.gpu


def _shape(dtype: torch.dtype, head_dim: int, window: int | None = None) -> CacheShape:
    return CacheShape(1, 8, BLOCK_TOKENS, 2, head_dim, dtype, windows=(window,))


@pytest.mark.parametrize("splits", [1, None], ids=["invariant", "split"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torchs_own_kernel_reads_blocks_in_place(
    dtype: torch.dtype, head_dim: int, window: int | None, splits: int | None, device: torch.device
) -> None:
    attention = find_attention(device, dtype)
    assert attention is not None
    assert varlen._activate("FA2")

    problem = varlen._problem(_shape(dtype, head_dim, window), device, attention, 8, splits)

    assert problem is None


def test_cache_of_a_gpu_is_read_in_place(device: torch.device) -> None:
    cache = make_cache(_shape(torch.bfloat16, 128), device, 4 * BLOCK_TOKENS, heads=8)

    assert isinstance(cache, VarlenCache)


def test_blocks_are_zeroed_and_copied(device: torch.device) -> None:
    cache = make_cache(_shape(torch.bfloat16, 64), device, 4 * BLOCK_TOKENS, heads=8)
    cache._blocks.copy_(torch.randn(cache._blocks.shape))
    expected = cache._blocks[3].clone()

    cache.zero_blocks([1, 2])
    cache.copy_blocks([(3, 4)])

    assert not cache._blocks[[1, 2]].any()
    assert torch.equal(cache._blocks[4], expected)
