"""The engine answers as the model alone would, whoever else is running."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.workers.llm.checkpoints import Driver, job, make_engine, run_alone, texts
from workers.contract.jobs import Cancelled, Completed, Failed
from workers.engines.protocol import Admitted, Wait

Checkpoint = Callable[[str], Path]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3")
QUESTIONS = (
    "the fox",
    "a lazy dog and 0123 counts",
    "jumps over the quick brown fox and the lazy dog, over and over",
    "漢字 ☂ äöü",
    "!",
    "the quick brown fox jumps over a lazy dog and counts to 0123456789 " * 2,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_generate(family: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(family)
    engine = make_engine(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    for number, question in enumerate(QUESTIONS):
        outcome = run_alone(engine, job(f"r{number}", question))

        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )[0, ids.shape[1] :]
        assert isinstance(outcome, Completed)
        assert outcome.usage.output_tokens == len(expected)
        assert texts(outcome) == [tokenizer.decode(expected, skip_special_tokens=True)]


@pytest.mark.parametrize("seed", range(4))
def test_answers_do_not_depend_on_who_else_runs(seed: int, checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("qwen3"))
    r = random.Random(seed)
    jobs = [
        job(
            f"r{number}",
            r.choice(QUESTIONS),
            max_tokens=r.randint(1, 30),
            temperature=r.choice([0.0, 0.0, 1.0]),
            seed=number,
            n=r.choice([1, 1, 2]),
        )
        for number in range(10)
    ]
    alone = {wanted.request_id: texts(run_alone(engine, wanted)) for wanted in jobs}

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
            assert texts(outcome) == alone[wanted.request_id]


def test_events_tell_the_same_text_as_the_outcome(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("qwen3")))
    driver.admit(job("a", QUESTIONS[3], n=2, temperature=1.0, max_tokens=40, seed=3))

    driver.finish("a")

    assert texts(driver.outcomes["a"]) == [driver.texts["a/0"], driver.texts["a/1"]]
    assert driver.texts["a/0"] != driver.texts["a/1"]


def test_a_full_engine_lets_newcomers_wait(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("llama"), slots=2))
    driver.admit(job("a", "the", max_tokens=3))
    driver.admit(job("b", "fox", max_tokens=3))

    assert isinstance(driver.admit(job("c", "dog", max_tokens=3)), Wait)

    driver.finish("a", "b")
    assert isinstance(driver.admit(job("c", "dog", max_tokens=3)), Admitted)
    driver.finish("c")


def test_a_cancelled_request_leaves_within_one_step(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("llama")))
    driver.admit(job("a", "the quick", max_tokens=100))
    driver.admit(job("b", "brown fox", max_tokens=6))
    driver.step()
    driver.step()

    driver.engine.cancel("a", "client")
    driver.step()

    outcome = driver.outcomes["a"]
    assert isinstance(outcome, Cancelled)
    assert outcome.usage.output_tokens == 2
    assert texts(outcome) == [driver.texts["a/0"]]
    driver.finish("b")


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("llama"), context_tokens=32))

    answer = driver.admit(job("a", "the quick brown fox " * 30))

    assert isinstance(answer, Failed)
    assert answer.code == "context_length_exceeded"
    assert "32" in answer.message
    assert answer.param == "messages"


def test_an_answer_ends_where_the_context_does(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("llama"), context_tokens=24)

    outcome = run_alone(engine, job("a", "the fox", max_tokens=200))

    assert isinstance(outcome, Completed)
    assert outcome.usage.input_tokens + outcome.usage.output_tokens <= 24


def test_a_structured_format_is_refused_by_name(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("llama")))

    answer = driver.admit(job("a", "x", response_format={"type": "json_object"}))

    assert isinstance(answer, Failed)
    assert (answer.code, answer.param) == ("unsupported_parameter", "response_format")


def test_logprobs_are_those_of_the_model(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint("llama"))

    outcome = run_alone(engine, job("a", "the fox", logprobs=True, top_logprobs=3, max_tokens=4))

    assert isinstance(outcome, Completed)
    tokens = outcome.output["choices"][0].logprobs
    assert "".join(token.text for token in tokens) == texts(outcome)[0]
    for token in tokens:
        assert token.top[0] == (token.text, token.logprob)
        assert token.logprob <= 0


def test_an_unproven_family_is_refused_with_the_way_out(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel .*upstream"):
        make_engine(checkpoint("gpt2"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "float16 is many times slower"),
        ({"dtype": "int3"}, "one of float32"),
        ({"slotz": 3}, "options of the engine llm are dtype, device, slots"),
        ({"slots": 0}, "at least 1"),
    ],
)
def test_options_that_cannot_be_met_are_refused(
    options: dict[str, object], message: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(checkpoint("llama"), **options)


def test_the_four_phases_are_told_apart(checkpoint: Checkpoint) -> None:
    driver = Driver(make_engine(checkpoint("llama")))
    driver.admit(job("a", "the fox"))
    driver.finish("a")

    assert set(driver.clock.phases) == {"preprocess", "transfer", "forward", "postprocess"}
