"""Sampling agrees with the library's own processors and depends only on its seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workers.contract.jobs import ChatInput
from workers.engines.llm import sampling
from workers.engines.llm.sampling import (
    HEAD,
    NOT_FINITE,
    Draw,
    SampledToken,
    Sampler,
    draw,
)
from workers.engines.noise import gumbel, key_of, token_range

VOCABULARY = 40


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def _sampler(*, prompt: tuple[int, ...] = (), seed: int = 0, **parameters: Any) -> Sampler:
    chat = ChatInput(messages=(), max_tokens=1, **parameters)
    return Sampler(chat, prompt=prompt, seed=seed)


def _sample(sampler: Sampler, logits: torch.Tensor) -> SampledToken:
    (sampled,) = draw(logits[None], [Draw(sampler, 0)])
    assert isinstance(sampled, SampledToken), sampled
    return sampler.accept(sampled)


def _draw_many(logits: torch.Tensor, draws: int, seed: int, **parameters: Any) -> list[int]:
    """Sample once for each offset of one sequence, all in one batch."""
    sampler = _sampler(seed=seed, **parameters)
    many = draw(logits.expand(draws, -1), [Draw(sampler, n, offset=n) for n in range(draws)])
    return [one.token for one in many if isinstance(one, SampledToken)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("parameters", "warpers"),
    [
        ({"temperature": 0.5}, [TemperatureLogitsWarper(0.5)]),
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
            [
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(20),
                MinPLogitsWarper(0.02),
                TopPLogitsWarper(0.9),
            ],
        ),
    ],
)
def test_tokens_have_the_frequencies_of_the_library(
    parameters: dict[str, Any], warpers: list[Any], seed: int
) -> None:
    logits = _logits(seed)
    warped = LogitsProcessorList(warpers)(torch.zeros(1, 0, dtype=torch.long), logits[None])
    expected = torch.softmax(warped[0], dim=-1)
    draws = 2000
    drawn = Counter(_draw_many(logits, draws, seed, **parameters))

    for token, weight in enumerate(expected.tolist()):
        # Five standard deviations of a binomial count, plus a few for rare tokens.
        tolerance = 5 * (draws * weight * (1 - weight)) ** 0.5 + (5 if weight else 0)
        assert abs(drawn[token] - draws * weight) <= tolerance


@pytest.mark.parametrize("seed", range(5))
def test_the_repetition_penalty_counts_prompt_and_answer(seed: int) -> None:
    logits, prompt = _logits(seed), (3, 5, 8, 3)
    sampler = _sampler(prompt=prompt, temperature=0.0, repetition_penalty=1.8)
    reference = RepetitionPenaltyLogitsProcessor(1.8)
    tokens = list(prompt)

    for _ in range(8):
        expected = int(reference(torch.tensor([tokens]), logits[None])[0].argmax())

        assert _sample(sampler, logits).token == expected
        tokens.append(expected)


def test_penalties_and_bias_move_the_logits_by_their_amounts() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[:3] = torch.tensor([2.0, 1.2, 0.5])
    sampler = _sampler(
        prompt=(0, 1),
        temperature=0.0,
        frequency_penalty=0.5,
        presence_penalty=0.4,
        logit_bias={2: 0.2},
    )

    # After one sample each: 0 falls to 1.1, then 1 from 1.2 to 0.3, then 0 to 0.6, then 2 is 0.7.
    assert [_sample(sampler, logits).token for _ in range(4)] == [0, 1, 0, 2]


def test_presence_penalty_counts_once_also_if_the_frequency_penalty_cancels_it() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[:2] = torch.tensor([2.0, 1.8])
    sampler = _sampler(temperature=0.0, presence_penalty=0.5, frequency_penalty=-0.5)

    tokens = [_sample(sampler, logits).token for _ in range(3)]

    assert tokens == [0, 0, 0]
    # 0.5 once, and -0.5 for each of the three.
    assert sampler.edits[2].tolist() == [-1.0]


def test_seed_determines_the_tokens() -> None:
    logits = [_logits(number) for number in range(20)]

    sampled = [
        [_sample(sampler, one).token for one in logits]
        for sampler in (_sampler(seed=seed) for seed in (1, 1, 2, -1, 2**63 - 1, 2**63))
    ]

    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]
    assert all(len(one) == 20 for one in sampled)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-40, 1e-6])
def test_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = _logits(3)

    assert _sample(_sampler(temperature=temperature), logits).token == int(logits.argmax())


@pytest.mark.parametrize("cut", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}])
def test_likeliest_token_is_never_excluded(cut: dict[str, Any]) -> None:
    logits = _logits(4)

    assert _sample(_sampler(**cut), logits).token == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_logits_are_an_error(value: float, temperature: float) -> None:
    logits = _logits(5)
    logits[7] = value

    assert draw(logits[None], [Draw(_sampler(temperature=temperature), 0)]) == [NOT_FINITE]


def test_logprobs_are_computed_before_all_parameters() -> None:
    logits = _logits(6)
    expected = torch.log_softmax(logits, dim=-1)
    sampler = _sampler(
        temperature=0.3, top_k=2, logit_bias={9: 50.0}, logprobs=True, top_logprobs=4
    )

    sampled = _sample(sampler, logits)

    assert sampled.token == 9
    assert sampled.logprob == float(expected[9])
    values, tokens = expected.topk(4)
    assert sampled.top == tuple(zip(tokens.tolist(), values.tolist(), strict=True))


def test_sampling_does_not_modify_the_logits() -> None:
    logits = _logits(7)
    before = logits.clone()
    every = {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.01, "logit_bias": {1: 2.0}}
    sampler = _sampler(prompt=(2,), frequency_penalty=1.0, repetition_penalty=1.2, **every)

    for _ in range(3):
        _sample(sampler, logits)

    assert torch.equal(logits, before)


@pytest.mark.parametrize("scale", [0.1, 5.0], ids=["reached-late", "reached-early"])
def test_large_vocabulary_is_truncated_like_by_the_library(scale: float) -> None:
    logits = torch.randn(4 * HEAD, generator=torch.Generator().manual_seed(8)) * scale
    kept = TopPLogitsWarper(0.6)(torch.tensor([[0]]), logits[None].clone())[0].isfinite()
    assert (int(kept.sum()) > HEAD) == (scale == 0.1)

    drawn = set(_draw_many(logits, 200, 0, top_p=0.6))

    # Whether the last token is kept depends on rounding.
    kept |= logits >= torch.topk(logits, int(kept.sum()) + 1).values[-1]
    assert all(kept[list(drawn)])


@pytest.mark.parametrize("seed", [0, 1, 2**63])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_of_seeds_and_positions_have_the_models_probabilities(
    seed: int, temperature: float
) -> None:
    logits = _logits(9)
    draws = 20_000
    expected = draws * torch.softmax(logits / temperature, dim=-1)
    by_position = [Draw(_sampler(seed=seed, temperature=temperature), 0, n) for n in range(draws)]
    by_seed = [Draw(_sampler(seed=seed + n, temperature=temperature), 0) for n in range(draws)]

    for kind in (by_position, by_seed):
        drawn = torch.tensor(_draw_all(logits, kind))
        counts = torch.bincount(drawn, minlength=VOCABULARY)
        frequent = expected >= 5
        squares = ((counts - expected) ** 2 / expected)[frequent].sum()
        # Chi-squared; its mean is the number of cells, its variance twice that.
        cells = int(frequent.sum())
        assert squares < cells + 4 * (2 * cells) ** 0.5
        # Neighbours are independent: the same token follows itself as often as by chance.
        again = float((drawn[1:] == drawn[:-1]).float().mean())
        chance = float((expected / draws).square().sum())
        assert abs(again - chance) < 5 * (chance / draws) ** 0.5


def _draw_all(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    rows = [Draw(one.sampler, number, one.offset) for number, one in enumerate(draws)]
    sampled = draw(logits.expand(len(rows), -1), rows)
    return [one.token for one in sampled if isinstance(one, SampledToken)]


def test_noise_is_gumbel_noise_in_every_part_of_a_large_vocabulary() -> None:
    tokens = token_range(1 << 16, torch.device("cpu"))
    keys = torch.tensor([key_of(seed, 3) for seed in range(8)], dtype=torch.int32)
    noise = gumbel(keys, tokens)
    uniform = torch.exp(-torch.exp(-noise))

    counts = torch.histc(uniform, bins=256, min=0, max=1).double()
    expected = noise.numel() / 256
    squares = float(((counts - expected) ** 2 / expected).sum())
    assert abs(squares - 255) < 4 * (2 * 255) ** 0.5
    # Neither tokens nor seeds beside each other have anything in common.
    centred = uniform - 0.5
    for first, second in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
        correlation = float((first * second).mean() * 12)
        assert abs(correlation) < 5 / first.numel() ** 0.5


def test_noise_of_a_token_does_not_depend_on_what_else_is_asked() -> None:
    device = torch.device("cpu")
    keys = torch.tensor([key_of(seed, 5) for seed in (-7, 2**70, 9)], dtype=torch.int32)
    noise = gumbel(keys, token_range(5003, device))
    some = torch.tensor([[4999, 3, 17], [0, 1, 2], [5002, 0, 9]], dtype=torch.int32)

    assert torch.equal(gumbel(keys[1:2], token_range(4999, device)), noise[1:2, :4999])
    assert torch.equal(gumbel(keys, some), noise.gather(1, some.long()))


@pytest.mark.parametrize("size", [VOCABULARY, 3 * HEAD])
def test_rows_together_get_the_tokens_that_each_gets_alone(size: int) -> None:
    generator = torch.Generator().manual_seed(10)
    logits = torch.randn(12, size, generator=generator) * 3
    logits[5] *= 0.01  # top-p reaches far beyond the head
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9},
        {"top_k": 7, "temperature": 0.4},
        {"min_p": 0.05},
        {"top_p": 0.95, "temperature": 1.3},
        {"frequency_penalty": 0.5, "logit_bias": {3: 4.0}},
        {"repetition_penalty": 1.3, "top_p": 0.8, "logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 1.0, "temperature": 0.0},
        {"top_k": 900, "top_p": 0.99, "min_p": 0.001},
        {"logprobs": True, "top_logprobs": 5},
        {"temperature": 0.0, "logprobs": True},
    ]

    def samplers() -> list[Sampler]:
        return [_sampler(seed=n, prompt=(1, 2), **wish) for n, wish in enumerate(wishes)]

    together, alone = samplers(), samplers()
    for step in range(6):
        rows = logits.roll(step, dims=1)
        sampled = draw(rows, [Draw(sampler, row) for row, sampler in enumerate(together)])
        for row, (one, sampler) in enumerate(zip(sampled, alone, strict=True)):
            assert isinstance(one, SampledToken)
            assert together[row].accept(one) == _sample(sampler, rows[row])


def test_row_without_finite_logits_fails_alone() -> None:
    logits = torch.stack([_logits(1), _logits(2), _logits(3)])
    logits[1, 4] = torch.nan
    wishes: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"top_p": 0.5}]

    sampled = draw(logits, [Draw(_sampler(**wish), row) for row, wish in enumerate(wishes)])

    assert sampled[1] == NOT_FINITE
    assert all(isinstance(sampled[row], SampledToken) for row in (0, 2))


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9, "min_p": 0.01},
        {"top_k": 5, "logprobs": True},
        {"frequency_penalty": 0.5, "logit_bias": {3: 1.0}},
    ],
)
def test_number_of_operations_does_not_grow_with_rows(
    parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU samples parts of a large step one after the other; a GPU all rows at once."""
    monkeypatch.setattr(sampling, "_CACHED", 1 << 40)

    def count(rows: int) -> int:
        logits = torch.randn(rows, 3000, generator=torch.Generator().manual_seed(1))
        samplers = [_sampler(seed=row, prompt=(1,), **parameters) for row in range(rows)]
        operations = _Operations()
        with operations:
            draw(logits, [Draw(sampler, row) for row, sampler in enumerate(samplers)])
        return operations.count

    count(2)  # what is kept from then on
    assert count(64) == count(2)


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))
