"""Sampling agrees with the library's own processors and depends only on its seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workers.contract.jobs import ChatInput
from workers.engines.llm.sampling import HEAD, Sampler

VOCABULARY = 40


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def _sampler(*, prompt: tuple[int, ...] = (), seed: int = 0, **parameters: Any) -> Sampler:
    chat = ChatInput(messages=(), max_tokens=1, **parameters)
    return Sampler(chat, prompt=prompt, vocabulary=VOCABULARY, seed=seed)


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
    sampler = _sampler(seed=seed, **parameters)

    draws = 2000
    drawn = Counter(sampler.sample(logits).token for _ in range(draws))

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

        assert sampler.sample(logits).token == expected
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
    assert [sampler.sample(logits).token for _ in range(4)] == [0, 1, 0, 2]


def test_seed_determines_the_tokens() -> None:
    logits = [_logits(number) for number in range(20)]

    sampled = [
        [sampler.sample(one).token for one in logits]
        for sampler in (_sampler(seed=seed) for seed in (1, 1, 2, -1, 2**63 - 1, 2**63))
    ]

    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]
    assert all(len(one) == 20 for one in sampled)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-40, 1e-6])
def test_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = _logits(3)

    assert _sampler(temperature=temperature).sample(logits).token == int(logits.argmax())


@pytest.mark.parametrize("cut", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}])
def test_likeliest_token_is_never_excluded(cut: dict[str, Any]) -> None:
    logits = _logits(4)

    assert _sampler(**cut).sample(logits).token == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_logits_are_an_error(value: float, temperature: float) -> None:
    logits = _logits(5)
    logits[7] = value

    with pytest.raises(FloatingPointError):
        _sampler(temperature=temperature).sample(logits)


def test_logprobs_are_computed_before_all_parameters() -> None:
    logits = _logits(6)
    expected = torch.log_softmax(logits, dim=-1)
    sampler = _sampler(
        temperature=0.3, top_k=2, logit_bias={9: 50.0}, logprobs=True, top_logprobs=4
    )

    sampled = sampler.sample(logits)

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
        sampler.sample(logits)

    assert torch.equal(logits, before)


@pytest.mark.parametrize("scale", [0.1, 5.0], ids=["reached-late", "reached-early"])
def test_large_vocabulary_is_truncated_like_by_the_library(scale: float) -> None:
    logits = torch.randn(4 * HEAD, generator=torch.Generator().manual_seed(8)) * scale
    kept = TopPLogitsWarper(0.6)(torch.tensor([[0]]), logits[None].clone())[0].isfinite()
    assert (int(kept.sum()) > HEAD) == (scale == 0.1)
    given = ChatInput(messages=(), max_tokens=1, top_p=0.6)
    sampler = Sampler(given, prompt=(0,), vocabulary=len(logits), seed=0)

    drawn = {sampler.sample(logits).token for _ in range(200)}

    # Whether the last token is kept depends on rounding.
    kept |= logits >= torch.topk(logits, int(kept.sum()) + 1).values[-1]
    assert all(kept[list(drawn)])
