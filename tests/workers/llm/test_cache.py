"""In whichever row a sequence is, however many threads compute it, its attention is the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from workers.engines.llm.cache import CacheShape, SlotCache

POSITIONS = 70


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 3, 32), (4, 4, 16), (14, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_computes_the_same_bits(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, threads: int
) -> None:
    shape = CacheShape(1, 8, kv_heads, 128, head_dim, dtype)
    cache = SlotCache(shape, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)

    def same_in_all_rows(heads: int) -> torch.Tensor:
        one = torch.randn(1, heads, 1, head_dim, generator=generator)
        return one.expand(shape.rows, -1, -1, -1).contiguous().to(dtype)

    keys, values = [], []
    for position in range(POSITIONS):
        query = same_in_all_rows(heads)
        keys.append(same_in_all_rows(kv_heads))
        values.append(same_in_all_rows(kv_heads))
        cache.begin_write(torch.full((shape.rows,), position), position)
        attended = cache.attend(0, query, keys[-1], values[-1], None)
        assert bool((attended == attended[:1]).all())

    expected = F.scaled_dot_product_attention(
        query.float(), torch.cat(keys, 2).float(), torch.cat(values, 2).float(), enable_gqa=True
    )
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(
        attended.float(), expected.transpose(1, 2), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wider_window_leaves_the_bits_as_they_are(dtype: torch.dtype) -> None:
    shape = CacheShape(1, 4, 2, 2048, 32, dtype)
    cache = SlotCache(shape, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    for slot in range(shape.rows):
        cache.begin_read(slot, 0, 1000)
        past = torch.randn(3, 1, 2, 1000, 32, generator=generator).to(dtype)
        cache.attend(0, *past, None)
    query, key, value = torch.randn(3, shape.rows, 2, 1, 32, generator=generator).to(dtype)

    attended = []
    for longest in (1000, 1023, 1024, 1500, 2047):
        cache.begin_write(torch.tensor([5, 300, 64, 1000]), longest)
        attended.append(cache.attend(0, query, key, value, None))

    assert all(torch.equal(other, attended[0]) for other in attended)
