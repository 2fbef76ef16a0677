"""Speculative decoding changes how long an answer takes, and nothing else."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.llm.checkpoints import make_checkpoint, make_engine
from tests.workers.llm.driver import Driver, choices, job, run_alone
from workers.contract.jobs import ChatInput, Completed
from workers.engines.llm.sampling import Draw, SampledToken, Sampler, draw, propose
from workers.engines.llm.speculation import PromptLookup
from workers.protocol.engine import Admitted

Checkpoint = Callable[[str], Path]
REPETITIVE = "the quick brown fox jumps over the quick brown fox jumps over the quick brown "


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


def _jobs() -> list[Any]:
    r = random.Random(3)
    return [
        job(
            f"r{number}",
            REPETITIVE * r.randint(1, 3),
            max_tokens=r.randint(1, 50),
            temperature=r.choice([0.0, 0.0, 0.7, 1.0]),
            top_p=r.choice([1.0, 0.9]),
            frequency_penalty=r.choice([0.0, 0.5]),
            logprobs=True,
            stop=r.choice([(), ("e",)]),
            seed=number,
            n=r.choice([1, 1, 2]),
        )
        for number in range(8)
    ]


def _without_logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    return choice | {"logprobs": [one["text"] for one in choice["logprobs"]]}


def _logprobs(found: list[dict[str, Any]]) -> list[float]:
    return [one["logprob"] for choice in found for one in choice["logprobs"]]


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3", pytest.param("llama", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("method", ["lookup", "draft", "itself"])
@pytest.mark.parametrize("blocks", [None, 14])
def test_speculation_does_not_change_answers(
    family: str, method: str, blocks: int | None, checkpoint: Checkpoint, draft: Path
) -> None:
    path = checkpoint(family)
    plain = make_engine(path)
    expected = {wanted.request_id: choices(run_alone(plain, wanted)) for wanted in _jobs()}
    speculation: dict[str, Any] = {"method": "lookup", "tokens": 3}
    if method != "lookup":
        # A model that drafts for itself is always right.
        draft_path = path if method == "itself" else draft
        speculation = {"method": "draft", "tokens": 3, "checkpoint": str(draft_path)}
    tokens = None if blocks is None else blocks * 64
    engine = make_engine(path, speculation=speculation, cache_tokens=tokens)
    driver = Driver(engine)
    waiting = _jobs()
    r = random.Random(5)
    while len(driver.outcomes) < len(expected):
        while waiting and r.random() < 0.5 and isinstance(driver.admit(waiting[0]), Admitted):
            waiting.pop(0)
        driver.step()

    for name, wanted in expected.items():
        given = choices(driver.outcomes[name])
        if engine._model.decoder.one_forward:
            assert given == wanted
        else:
            # Products depend on the number of rows, and draft tokens add rows.
            assert [_without_logprobs(one) for one in given] == [
                _without_logprobs(one) for one in wanted
            ]
            assert _logprobs(given) == pytest.approx(_logprobs(wanted), abs=1e-5)
    timings = [outcome.timings for outcome in driver.outcomes.values()]
    drafted = sum(timing.drafted for timing in timings)
    accepted = sum(timing.accepted for timing in timings)
    assert 0 <= accepted <= drafted
    assert drafted > 0
    if method == "itself":
        # Only penalties, which drafting ignores, make a draft token wrong.
        assert accepted > 0.6 * drafted
    assert engine._model.scheduler._pool.available == engine._model.checkpoint.shape.blocks


def test_accepted_draft_tokens_save_steps(checkpoint: Checkpoint) -> None:
    path = checkpoint("qwen3")
    speculation = {"method": "draft", "tokens": 3, "checkpoint": str(path)}
    driver = Driver(make_engine(path, speculation=speculation))
    driver.admit(job("a", "the fox", max_tokens=40))

    steps = 0
    while "a" not in driver.outcomes:
        driver.step()
        steps += 1

    # One step for the prompt, then four tokens per step.
    assert steps == 1 + math.ceil(39 / 4)
    outcome = driver.outcomes["a"]
    assert isinstance(outcome, Completed)
    assert outcome.usage.output_tokens == 40


def test_draft_model_with_another_vocabulary_is_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    other = make_checkpoint("llama", tmp_path, vocab_size=500)

    with pytest.raises(ValueError, match=r"draft model has 500 tokens .* same vocabulary"):
        make_engine(checkpoint("llama"), speculation={"method": "draft", "checkpoint": str(other)})


def test_error_names_the_draft_model_that_cannot_be_loaded(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"the draft model: .* has no config.json"):
        make_engine(
            checkpoint("llama"), speculation={"method": "draft", "checkpoint": str(tmp_path)}
        )


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draft_tokens_do_not_change_the_distribution(temperature: float) -> None:
    """Tokens sampled after a proposal have the model's own probabilities.

    The draft tokens come from other logits, with the noise of the same position.
    """
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator)
    draft_logits = logits + 0.7 * torch.randn(6, generator=generator)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    counts: Counter[int] = Counter()
    agreed = 0
    rounds = 6000
    chat = ChatInput((), max_tokens=1, temperature=temperature)
    samplers = [Sampler(chat, prompt=(), seed=seed) for seed in range(rounds)]
    draft_tokens = propose(draft_logits.expand(rounds, -1), samplers, 0)
    rows = [Draw(sampler, row) for row, sampler in enumerate(samplers)]
    for draft_token, sampled in zip(
        draft_tokens, draw(logits.expand(rounds, -1), rows), strict=True
    ):
        assert isinstance(sampled, SampledToken)
        agreed += draft_token == sampled.token
        counts[sampled.token] += 1

    spread = sum(
        (counts[token] - rounds * float(p)) ** 2 / (rounds * float(p))
        for token, p in enumerate(probabilities)
    )
    assert spread < 20.5  # chi-squared, five degrees of freedom, one in a thousand
    # With separate noise the two would agree as rarely as independent samples.
    independent = float((probabilities * torch.softmax(draft_logits / temperature, dim=-1)).sum())
    assert agreed / rounds > independent + 0.2


def test_prompt_lookup_finds_what_followed_last_time() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 1, 2, 3])

    assert lookup.propose(2) == [4, 5]
    lookup.add(9)
    assert lookup.propose(2) == []
    for token in (7, 2, 3):
        lookup.add(token)
    assert lookup.propose(3) == [9, 7, 2]
