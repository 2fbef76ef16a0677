"""The engine gives the same answers as the model alone, whatever else is running."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.workers.llm.checkpoints import Reference, make_engine
from tests.workers.llm.driver import Driver, choices, job, run_alone, texts
from workers.contract.jobs import Cancelled, ChatMessage, Completed, RequestId
from workers.engines.llm.scheduling.pacing import PrefillPacing
from workers.protocol.engine import Admitted, Wait

Checkpoint = Callable[[str], Path]
EXPERTS = ("mixtral", "qwen3moe", "deepseek2", "deepseek3")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3", *EXPERTS)
QUESTIONS = (
    "the fox",
    "a lazy dog and 0123 counts",
    "jumps over the quick brown fox and the lazy dog, over and over",
    "漢字 ☂ äöü",
    "!",
    "the quick brown fox jumps over a lazy dog and counts to 0123456789 " * 2,
)
LONG = "the quick brown fox jumps over a lazy dog and counts to 0123456789. " * 110
"""More tokens than one step prefills."""


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_those_of_generate(family: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(family)
    engine, reference = make_engine(path), Reference(path)

    for number, question in enumerate(QUESTIONS):
        outcome = run_alone(engine, job(f"r{number}", question))

        assert isinstance(outcome, Completed)
        usage = outcome.usage
        assert (usage.input_tokens, usage.output_tokens, *texts(outcome)) == reference.generate(
            question, 12
        )
        assert (usage.requests, usage.cached_input_tokens) == (1, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_in_a_batch_equal_those_of_generate(
    family: str, checkpoint: Checkpoint
) -> None:
    path = checkpoint(family)
    driver, reference = Driver(make_engine(path, slots=5)), Reference(path)

    driver.admit(job("early", QUESTIONS[2], max_tokens=60))
    for number, question in enumerate(QUESTIONS[:4]):
        driver.step()
        assert isinstance(driver.admit(job(f"r{number}", question, max_tokens=40)), Admitted)
    driver.step()
    driver.engine.cancel("r1", "client")
    driver.step()
    driver.admit(job("late", QUESTIONS[5], max_tokens=40))
    driver.finish("early", "r0", "r2", "r3", "late")

    assert isinstance(driver.outcomes["r1"], Cancelled)
    for name, question, tokens in (
        ("early", QUESTIONS[2], 60),
        ("r0", QUESTIONS[0], 40),
        ("r2", QUESTIONS[2], 40),
        ("r3", QUESTIONS[3], 40),
        ("late", QUESTIONS[5], 40),
    ):
        assert texts(driver.outcomes[name]) == [reference.generate(question, tokens)[2]]


@pytest.mark.parametrize(
    ("seed", "family", "slots", "dtype"),
    [
        (0, "qwen3", 4, "float32"),
        pytest.param(1, "llama", 3, "float32", marks=pytest.mark.long),
        (2, "phi3", 8, "bfloat16"),
        pytest.param(3, "gemma3", 4, "float32", marks=pytest.mark.long),
        pytest.param(4, "mistral", 2, "bfloat16", marks=pytest.mark.long),
        pytest.param(5, "qwen2", 6, "float32", marks=pytest.mark.long),
        (6, "deepseek3", 4, "float32"),
        pytest.param(7, "deepseek2", 5, "bfloat16", marks=pytest.mark.long),
    ],
)
def test_answers_are_batch_invariant_to_the_last_bit(
    seed: int, family: str, slots: int, dtype: str, checkpoint: Checkpoint
) -> None:
    engine = make_engine(checkpoint(family), slots=slots, dtype=dtype)
    r = random.Random(seed)
    jobs = [
        job(
            f"r{number}",
            r.choice(QUESTIONS),
            max_tokens=r.randint(1, 80),
            temperature=r.choice([0.0, 0.0, 1.0]),
            top_p=r.choice([1.0, 0.9]),
            frequency_penalty=r.choice([0.0, 0.5]),
            logprobs=True,
            top_logprobs=3,
            seed=number,
            n=r.choice([1, 1, 2]),
        )
        for number in range(10)
    ]
    alone = {wanted.request_id: choices(run_alone(engine, wanted)) for wanted in jobs}

    driver = Driver(engine)
    waiting = list(jobs)
    cancelled = r.choice(jobs).request_id
    while len(driver.outcomes) < len(jobs):
        while waiting and r.random() < 0.7 and isinstance(driver.admit(waiting[0]), Admitted):
            admitted = waiting.pop(0).request_id
            if admitted == cancelled:
                engine.cancel(admitted, "client")
        driver.step()

    for wanted in jobs:
        outcome = driver.outcomes[wanted.request_id]
        if wanted.request_id == cancelled:
            assert isinstance(outcome, Cancelled)
        else:
            assert choices(outcome) == alone[wanted.request_id]


def test_each_choice_equals_a_request_with_its_seed(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("qwen3"))

    together = run_alone(engine, job("a", QUESTIONS[0], n=3, seed=11, temperature=1.0))

    alone = [
        texts(run_alone(engine, job("b", QUESTIONS[0], seed=seed, temperature=1.0)))[0]
        for seed in (11, 12, 13)
    ]
    assert texts(together) == alone
    assert len(set(alone)) == 3
    assert isinstance(together, Completed)
    assert together.usage.output_tokens == 36


def test_events_add_up_to_the_outcome(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("qwen3")))
    asked = {"n": 2, "temperature": 1.0, "max_tokens": 40, "seed": 3, "logprobs": True}
    driver.admit(job("a", QUESTIONS[3], stop=["the", "o"], **asked))

    driver.finish("a")

    outcome = driver.outcomes["a"]
    assert isinstance(outcome, Completed)
    assert outcome.usage.output_tokens == sum(
        event.count for events in driver.events.values() for event in events
    )
    for choice in outcome.output["choices"]:
        events = driver.events[f"a/{choice.index}"]
        assert "".join(event.text for event in events) == choice.text
        assert tuple(one for event in events for one in event.logprobs or ()) == choice.logprobs
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == choice.finish_reason


def test_long_prompt_is_prefilled_in_chunks_and_answered_as_by_generate(
    checkpoint: Checkpoint,
) -> None:
    path = checkpoint("llama")
    reference = Reference(path)

    outcome = run_alone(make_engine(path), job("a", LONG, logprobs=True, top_logprobs=5))

    assert isinstance(outcome, Completed)
    usage = outcome.usage
    assert (usage.input_tokens, usage.output_tokens, *texts(outcome)) == reference.generate(
        LONG, 12
    )
    assert usage.input_tokens > 2048
    top = [logprob for _, logprob in choices(outcome)[0]["logprobs"][0]["top"]]
    assert top == pytest.approx(reference.logprobs(LONG).topk(5).values.tolist(), abs=1e-5)


def test_answers_do_not_depend_on_the_slot(
    checkpoint: Checkpoint, thread_count: Callable[[int], None]
) -> None:
    # With two threads the rows of a matrix product are computed alike only if their number is a
    # multiple of four.
    thread_count(2)
    driver = Driver(make_engine(checkpoint("qwen3"), slots=5, threads=2))
    names = "abcde"
    for name in names:
        driver.admit(job(name, QUESTIONS[0], logprobs=True, top_logprobs=5, max_tokens=20))

    driver.finish(*names)

    found = [choices(driver.outcomes[name]) for name in names]
    assert found == [found[0]] * 5


@pytest.mark.parametrize(("token_us", "read"), [(1.0, 1984), (1_000.0, 64)])
def test_decoding_continues_while_a_long_prompt_is_prefilled(
    token_us: float, read: int, checkpoint: Checkpoint
) -> None:
    driver = Driver(make_engine(checkpoint("qwen3"), prefix_cache=False))
    long = job("long", LONG, n=2, seed=3, logprobs=True, top_logprobs=3)
    alone = choices(run_alone(driver.engine, long))
    driver.admit(job("short", QUESTIONS[0], max_tokens=6))
    driver.step()
    driver.admit(long)
    pacing = driver.engine._model.pacing = PrefillPacing(block_tokens=64)
    pacing.record(decodes=0, prefill_tokens=1000, spent_us=1000 * token_us)

    weights = driver.step()

    # As many chunks of 64 tokens as leave room for the other sequence's next token, or fit 50 ms.
    assert weights.keys() == {"short", "long"}
    assert driver.engine._model.scheduler._groups["long"][0].prefilled == read
    assert weights["long"] > read * weights["short"] > read
    assert len(driver.events["short/0"]) == 2
    assert "long/0" not in driver.events
    driver.finish("short", "long")
    assert choices(driver.outcomes["long"]) == alone


def test_request_cancelled_during_prefill_is_billed_for_the_prefilled_tokens(
    checkpoint: Checkpoint,
) -> None:
    driver = Driver(make_engine(checkpoint("qwen3")))
    driver.admit(job("long", LONG))
    driver.step()

    driver.engine.cancel("long", "deadline")
    driver.step()

    outcome = driver.outcomes["long"]
    assert isinstance(outcome, Cancelled)
    assert outcome.reason == "deadline"
    assert (outcome.usage.input_tokens, outcome.usage.output_tokens) == (2048, 0)


def test_full_engine_lets_new_requests_wait(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("llama"), slots=2))
    driver.admit(job("a", "the", max_tokens=3))
    driver.admit(job("b", "fox", max_tokens=3))

    driver.admit(job("c", "quick", max_tokens=3))
    driver.admit(job("d", "lazy", max_tokens=3))

    assert isinstance(driver.admit(job("e", "dog", max_tokens=3)), Wait)
    assert set(driver.step()) == {"a", "b"}

    driver.finish("a", "b")
    driver.step()
    assert isinstance(driver.admit(job("e", "dog", max_tokens=3)), Admitted)
    driver.finish("c", "d", "e")


def test_cancelled_request_ends_within_one_step(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("llama"), slots=2))
    driver.admit(job("a", "the quick", max_tokens=100))
    driver.admit(job("b", "brown fox", max_tokens=6))
    driver.step()
    driver.step()

    driver.engine.cancel("a", "client")
    weights = driver.step()

    outcome = driver.outcomes["a"]
    assert isinstance(outcome, Cancelled)
    assert outcome.usage.output_tokens == 2
    assert texts(outcome) == [driver.text("a/0")]
    assert "a" not in weights
    assert isinstance(driver.admit(job("c", "dog")), Admitted)
    driver.finish("b", "c")


def test_answer_ends_at_its_limit_and_at_the_end_of_the_context(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("llama"), context_tokens=24)

    short = run_alone(engine, job("a", "the fox", max_tokens=3))
    full = run_alone(engine, job("b", "the fox", max_tokens=200))

    assert isinstance(short, Completed)
    assert isinstance(full, Completed)
    assert short.usage.output_tokens == 3
    assert full.usage.input_tokens + full.usage.output_tokens == 24
    assert [choices(outcome)[0]["finish_reason"] for outcome in (short, full)] == ["length"] * 2


def test_stop_token_is_counted_but_not_emitted(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("llama"))

    outcome = run_alone(engine, job("a", "the fox", logit_bias={1: 100.0}, logprobs=True))

    assert isinstance(outcome, Completed)
    assert outcome.usage.output_tokens == 1
    assert choices(outcome) == [{"index": 0, "text": "", "finish_reason": "stop", "logprobs": ()}]


def test_stop_string_across_tokens_is_hidden_with_its_logprobs(checkpoint: Checkpoint) -> None:
    path = checkpoint("qwen3")
    engine, tokenizer = make_engine(path), Reference(path).tokenizer
    words = [token for token in range(5, 320) if len(tokenizer.decode([token])) > 2]
    asked = {
        "max_tokens": 40,
        "temperature": 1.0,
        "logit_bias": dict.fromkeys(words, 100.0),
        "logprobs": True,
    }
    (whole,) = choices(run_alone(engine, job("a", "the fox", **asked)))
    tokens = [token["text"] for token in whole["logprobs"]]
    stop = (tokens[10] + tokens[11] + tokens[12])[1:-1]
    place = whole["text"].index(stop)
    begins = [len("".join(tokens[:count])) for count in range(len(tokens))]

    driver = Driver(engine)
    driver.admit(job("b", "the fox", stop=[stop], **asked))
    driver.finish("b")

    (cut,) = choices(driver.outcomes["b"])
    assert cut["text"] == driver.text("b/0") == whole["text"][:place]
    assert cut["finish_reason"] == "stop"
    shown = [token for token, begin in zip(tokens, begins, strict=True) if begin < place]
    assert [token["text"] for token in cut["logprobs"]] == shown


def test_logprobs_equal_those_of_the_model(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("llama"))

    outcome = run_alone(engine, job("a", "the fox", logprobs=True, top_logprobs=3, max_tokens=4))

    assert isinstance(outcome, Completed)
    tokens = outcome.output["choices"][0].logprobs
    assert "".join(token.text for token in tokens) == texts(outcome)[0]
    for token in tokens:
        assert token.top[0] == (token.text, token.logprob)
        assert token.logprob <= 0


def test_two_models_answer_side_by_side(checkpoint: Checkpoint) -> None:
    engines = [make_engine(checkpoint(family)) for family in ("llama", "gemma3")]
    wanted = job("a", QUESTIONS[5], max_tokens=20)
    alone = [texts(run_alone(engine, wanted)) for engine in engines]

    drivers = [Driver(engine) for engine in engines]
    for driver in drivers:
        driver.admit(wanted)
    for _ in range(20):
        for driver in drivers:
            driver.step()

    assert [texts(driver.outcomes["a"]) for driver in drivers] == alone
    assert alone[0] != alone[1]


def test_four_phases_are_timed_separately(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("llama")))
    driver.admit(job("a", "the fox"))
    assert driver.clock.phases == ["preprocess"]

    driver.step()

    phases = [phase for phase, _ in itertools.groupby(driver.clock.phases)]
    assert phases == ["preprocess", "transfer", "forward", "postprocess"]


def _cached(driver: Driver, name: str) -> tuple[int, int]:
    outcome = driver.outcomes[name]
    assert isinstance(outcome, Completed)
    return outcome.usage.cached_input_tokens, outcome.usage.input_tokens


@pytest.mark.parametrize(
    ("options", "caches"),
    [
        ({}, False),
        ({"batch_invariant": False}, True),
        ({"cache_answers": True}, True),
        ({"cache_answers": True, "speculation": {"method": "lookup"}}, True),
        ({"cache_answers": True, "prefix_cache": False}, False),
    ],
)
def test_next_turn_reads_no_more_than_is_new_if_answers_are_cached(
    options: dict[str, Any], caches: bool, checkpoint: Checkpoint
) -> None:
    driver = Driver(make_engine(checkpoint("qwen3"), **options))
    first = job("first", "", prompts=(tuple(range(5, 45)),), max_tokens=100)
    driver.admit(first)
    (choice,) = driver.engine._requests[RequestId("first")].choices.values()
    driver.finish("first")
    said = [*choice.prompt, *choice.tokens]
    assert len(choice.tokens) == 100, "the answer fills blocks"

    again = job("again", "", prompts=((*said, 7, 8, 9),), max_tokens=5)
    driver.admit(again)
    driver.finish("again")

    # 140 tokens are two full blocks of 64; the prompt alone filled none.
    assert _cached(driver, "again") == ((128, 15) if caches else (0, 143))
    alone = run_alone(make_engine(checkpoint("qwen3")), again)
    assert texts(driver.outcomes["again"]) == texts(alone)


def test_system_prompt_is_read_once_for_all_conversations_of_an_account(
    checkpoint: Checkpoint,
) -> None:
    driver = Driver(make_engine(checkpoint("qwen3")))
    system = ChatMessage("system", "the quick brown fox jumps over a lazy dog and counts " * 8)
    names = ("first", "second", "stranger")
    for name in names:
        wanted = job(name, "")
        messages = msgspec.to_builtins((system, ChatMessage("user", f"{name} wants a dog")))
        given = msgspec.structs.replace(wanted, input={**wanted.input, "messages": messages})
        if name == "stranger":
            given = msgspec.structs.replace(given, account_id="2")
        driver.admit(given)
        driver.finish(name)

    cached = [_cached(driver, name)[0] for name in names]
    assert cached[0] == cached[2] == 0
    assert cached[1] >= 64
    assert cached[1] % 64 == 0
