"""Attention of a sequence is the same in any row, in any blocks and beside any others.

Torch's variable-length attention runs on CUDA only. A few lines that compute the same stand in for
it here, so that its arguments (blocks, lengths, masks) are checked as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from workers.engines.llm import cache as cache_module
from workers.engines.llm import varlen
from workers.engines.llm.cache import CacheShape, ForwardTokens, GatherCache, SequenceInput
from workers.engines.llm.varlen import VarlenCache, find_attention, make_cache

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _shape(
    *, blocks: int = 40, size: int = 16, kv_heads: int = 2, head_dim: int = 32, dtype: Any = None
) -> CacheShape:
    return CacheShape(1, blocks, size, kv_heads, head_dim, dtype or torch.float32)


def _past(tokens: int, heads: int, kv_heads: int, head_dim: int, seed: int) -> list[torch.Tensor]:
    """Query, key and value ``(1, heads, tokens, head_dim)`` of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, count, tokens, head_dim, generator=generator)
        for count in (heads, kv_heads, kv_heads)
    ]


def _expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), is_causal=True, enable_gqa=True
    ).transpose(1, 2)


def read_in_place(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    past_ends: torch.Tensor,
    longest_query: int,
    longest_past: int,
    **given: Any,
) -> torch.Tensor:
    """Compute attention by its definition: each sequence to the past in its blocks."""
    before, after = given["window_size"]
    assert (after, given["enable_gqa"]) == (0, True)
    lengths = (ends, past_ends, given["seqused_k"], given["block_table"])
    assert {tensor.dtype for tensor in lengths} == {torch.int32}
    assert past_ends.diff().tolist() == given["seqused_k"].tolist()
    assert not past_ends[0]
    out = torch.zeros_like(query)
    for number, used in enumerate(given["seqused_k"].tolist()):
        begin, end = ends[number : number + 2].tolist()
        assert end - begin <= longest_query
        assert used <= longest_past
        table = given["block_table"][number].long()
        past = [kept[table].flatten(0, 1)[:used].transpose(0, 1)[None] for kept in (keys, values)]
        reach = torch.arange(used)
        until = reach[used - (end - begin) :, None]
        mask = reach[None] <= until
        if before >= 0:
            mask &= reach[None] >= until - before
        attended = F.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1)[None],
            *past,
            attn_mask=mask,
            scale=given["scale"],
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out


def _caches(shape: CacheShape) -> list[GatherCache | VarlenCache]:
    return [GatherCache(shape, CPU), VarlenCache(shape, CPU, read_in_place, 100)]


@pytest.mark.parametrize(("kind", "buffer"), [(0, 1 << 24), (0, 0), (1, 0)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 3, 32), (4, 4, 16), (14, 2, 64)])
def test_attention_over_scattered_blocks_equals_that_of_each_sequence_alone(
    kind: int,
    buffer: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_module, "_BUFFER_MAX", buffer)
    cache = _caches(_shape(kv_heads=kv_heads, head_dim=head_dim))[kind]
    tables = [[7, 3, 11], [2, 30, 5, 9], [20, 21, 22]]
    lengths = [40, 55, 33]
    whole = [_past(n, heads, kv_heads, head_dim, seed) for seed, n in enumerate(lengths)]
    expected = [_expected(*parts) for parts in whole]
    read = [16, 48, 32]
    for number, table in enumerate(tables):
        for start in range(0, read[number], 16):
            piece = SequenceInput(range(16), start, table)
            cache.begin(cache.lay_out(ForwardTokens(prefills=[piece])))
            attended = cache.attend(
                0, *(part[:, :, start : start + 16] for part in whole[number]), None
            )
            torch.testing.assert_close(
                attended, expected[number][:, start : start + 16], atol=1e-5, rtol=1e-5
            )

    # Two rows of one and three tokens, a last chunk of 7, and padding, all in one step.
    rows = [SequenceInput(range(1), 48, tables[1]), SequenceInput(range(1), 32, tables[2])]
    rows = [SequenceInput(range(3), 48, tables[1]), rows[1]]
    pieces = [SequenceInput(range(16), 16, tables[0]), SequenceInput(range(7), 32, tables[0])]
    layout = cache.lay_out(ForwardTokens(rows, 3, pieces, 3))

    def concatenated(parts: int) -> torch.Tensor:
        spare = torch.zeros(1, whole[0][parts].shape[1], 1, head_dim)
        return torch.cat(
            [
                whole[1][parts][:, :, 48:51],
                whole[2][parts][:, :, 32:33],
                spare.expand(-1, -1, 2, -1),
                whole[0][parts][:, :, 16:39],
                spare.expand(-1, -1, 3, -1),
            ],
            dim=2,
        )

    cache.begin(layout)
    attended = cache.attend(0, *map(concatenated, range(3)), None)

    for actual, wanted in (
        (attended[:, :3], expected[1][:, 48:51]),
        (attended[:, 3:4], expected[2][:, 32:33]),
        (attended[:, 6:29], expected[0][:, 16:39]),
    ):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 3, 32), (4, 4, 16), (14, 2, 64)])
def test_every_row_and_column_computes_the_same_bits(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, threads: int
) -> None:
    """One token after the same past: alone, in a row among others, and in a later column."""
    cache = GatherCache(_shape(kv_heads=kv_heads, head_dim=head_dim, dtype=dtype), CPU)
    parts = [part.to(dtype) for part in _past(22, heads, kv_heads, head_dim, 1)]
    for block in (1, 3, 5, 7, 9, 11, 13):
        piece = SequenceInput(range(16), 0, [block, block + 1])
        cache.begin(cache.lay_out(ForwardTokens(prefills=[piece])))
        cache.attend(0, *(part[:, :, :16] for part in parts), None)

    def tokens(*places: int) -> list[torch.Tensor]:
        return [part[:, :, list(places)] for part in parts]

    one_by_one = []
    for place in range(16, 22):
        cache.begin(cache.lay_out(ForwardTokens([SequenceInput([0], place, [1, 2])], 1, [], 0)))
        one_by_one.append(cache.attend(0, *tokens(place), None))
    rows = [SequenceInput(range(6), 16, [block, block + 1]) for block in (3, 5, 7)]
    others = [SequenceInput(range(2), 16, [11, 12]), SequenceInput([0], 16, [9, 10, 14, 15])]
    cache.begin(cache.lay_out(ForwardTokens([*rows, *others], 6, [], 2)))
    attended = cache.attend(0, *tokens(*[*range(16, 22)] * 5, 0, 0), None)

    for row in range(3):
        for column in range(6):
            assert torch.equal(attended[0, row * 6 + column], one_by_one[column][0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wider_window_does_not_change_the_bits(dtype: torch.dtype) -> None:
    shape = _shape(blocks=80, size=64, dtype=dtype)
    cache = GatherCache(shape, CPU)
    generator = torch.Generator().manual_seed(2)
    tables = [list(range(1 + 16 * row, 17 + 16 * row)) for row in range(4)]
    for table in tables:
        for start in range(0, 1000, 64):
            piece = SequenceInput(range(64), start, table)
            cache.begin(cache.lay_out(ForwardTokens(prefills=[piece])))
            past = torch.randn(3, 1, 2, 64, 32, generator=generator).to(dtype)
            cache.attend(0, *past, None)
    query, key, value = torch.randn(3, 1, 2, 4, 32, generator=generator).to(dtype)

    attended = []
    for longest in (300, 700, 1000):
        rows = [
            SequenceInput([0], place, table)
            for place, table in zip((5, 300, 64, longest), tables, strict=True)
        ]
        cache.begin(cache.lay_out(ForwardTokens(rows, 1, [], 0)))
        attended.append(cache.attend(0, query, key, value, None)[:, :3])

    assert all(torch.equal(other, attended[0]) for other in attended)


@pytest.mark.parametrize("kind", [0, 1])
def test_blocks_are_copied_and_zeroed(kind: int) -> None:
    cache = _caches(_shape(size=8))[kind]
    parts = _past(13, 2, 2, 32, 3)
    for start, stop in ((0, 8), (8, 12)):
        piece = SequenceInput(range(stop - start), start, [1, 2])
        cache.begin(cache.lay_out(ForwardTokens(prefills=[piece])))
        cache.attend(0, *(part[:, :, start:stop] for part in parts), None)
    cache.copy_blocks([(2, 4)])
    cache.zero_blocks([2])

    answers = []
    for table in ([1, 4], [1, 2]):
        cache.begin(cache.lay_out(ForwardTokens([SequenceInput([0], 12, table)], 1, [], 0)))
        answers.append(cache.attend(0, *(part[:, :, 12:] for part in parts), None))

    torch.testing.assert_close(answers[0], _expected(*parts)[:, 12:], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(answers[1], answers[0])


def test_varlen_attention_is_used_only_where_supported() -> None:
    assert find_attention(CPU, torch.bfloat16) is None
    assert find_attention(torch.device("cuda"), torch.float32) is None
    assert find_attention(torch.device("cuda"), torch.bfloat16) is not None


def _shift(*given: Any, **named: Any) -> torch.Tensor:
    return read_in_place(*given, **named) + 0.2


def _refuse(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("cu_seqlens_q and cu_seqlens_k must be both set or both not set")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 3, 32), (14, 2, 64), (4, 1, 256)])
def test_attention_that_agrees_reads_blocks_in_place(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "find_attention", lambda *_: read_in_place)
    shape = _shape(size=256, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)

    cache = make_cache(shape, CPU, 300, heads=heads)

    assert isinstance(cache, VarlenCache)
    assert cache.shape == shape


@pytest.mark.parametrize(
    ("attention", "reason"), [(_shift, "differs by up to 0.2"), (_refuse, "both set or both not")]
)
def test_attention_that_fails_or_differs_is_not_used(
    attention: Any,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(varlen, "find_attention", lambda *_: attention)

    cache = make_cache(_shape(dtype=torch.bfloat16), CPU, 100, heads=4)

    assert isinstance(cache, GatherCache)
    assert reason in caplog.text


def test_attention_that_ignores_a_long_window_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ignore(*given: Any, **named: Any) -> torch.Tensor:
        return read_in_place(*given, **named | {"window_size": (-1, 0)})

    shape = replace(_shape(size=256, dtype=torch.bfloat16), windows=(None, 512, 4096))
    caches = []
    for attention in (read_in_place, ignore):
        monkeypatch.setattr(varlen, "find_attention", lambda *_, found=attention: found)
        caches.append(type(make_cache(shape, CPU, 300, heads=4)))

    assert caches == [VarlenCache, GatherCache]
    assert "its result differs" in caplog.text


def test_newer_kernels_that_differ_give_way_to_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    active: list[str] = []

    def activate(kernel: str) -> bool:
        active.append(kernel)
        return True

    def attend(*given: Any, **named: Any) -> torch.Tensor:
        return (_shift if active[-1] == "FA3" else read_in_place)(*given, **named)

    monkeypatch.setattr(varlen, "_activate", activate)
    monkeypatch.setattr(varlen, "find_attention", lambda *_: attend)

    cache = make_cache(_shape(dtype=torch.bfloat16), CPU, 100, heads=4)

    assert isinstance(cache, VarlenCache)
    assert active == ["FA3", "FA2"]


@pytest.mark.parametrize(("batch_invariant", "splits"), [(True, 1), (False, None)])
def test_kernels_split_a_past_unless_answers_are_batch_invariant(
    batch_invariant: bool, splits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def attend(*given: Any, **named: Any) -> torch.Tensor:
        asked.append(named["num_splits"])
        return read_in_place(*given, **named)

    monkeypatch.setattr(varlen, "find_attention", lambda *_: attend)

    make_cache(_shape(dtype=torch.bfloat16), CPU, 9, heads=4, batch_invariant=batch_invariant)

    assert set(asked) == {splits}
