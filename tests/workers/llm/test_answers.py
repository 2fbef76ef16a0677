"""What is emitted of a growing answer: text up to a stop string, and its log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.llm.checkpoints import make_marked_tokenizer, make_tokenizer
from workers.contract.jobs import ChatInput, ChatMessage, Choice
from workers.engines.llm.request import ChoiceState
from workers.engines.llm.sampling import SampledToken
from workers.engines.llm.vocabulary import Vocabulary

END = 1
VOCABULARY = Vocabulary(make_tokenizer(), size=320, end_tokens=frozenset({END}))
WORDS = [
    token
    for token in range(5, 320)
    if (text := VOCABULARY.token_text(token)).strip().isalpha() and text.isascii()
]


def _answer(stop: Sequence[str] = (), *, limit: int = 100) -> ChoiceState:
    chat = ChatInput(messages=(), max_tokens=limit, stop=tuple(stop), logprobs=True)
    return ChoiceState(0, chat, VOCABULARY, prompt=[5], limit=limit)


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=30), st.data())
def test_logprobs_are_emitted_with_their_text(tokens: list[int], data: st.DataObject) -> None:
    texts = [VOCABULARY.token_text(token) for token in tokens]
    whole = "".join(texts)
    places = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 8))
    stops = [whole[a : a + size] for a, size in data.draw(st.lists(places, max_size=2))]
    answer = _answer(stops)

    shown, logprobs = "", 0
    for token in tokens:
        event = answer.add(SampledToken(token, -1.0))
        shown += event.text
        logprobs += len(event.logprobs or ())

        begins = [len("".join(texts[:count])) for count in range(len(answer.tokens))]
        assert whole.startswith(shown)
        assert logprobs == sum(begin < len(shown) for begin in begins)
        if event.finish_reason:
            break

    assert not any(stop in shown for stop in stops)
    assert answer.choice().text == shown
    assert len(answer.choice().logprobs or ()) == logprobs


def test_withheld_text_is_emitted_at_the_end() -> None:
    first, second = WORDS[:2]
    begin = VOCABULARY.token_text(first) + VOCABULARY.token_text(second)
    answer = _answer([begin + "!"])
    assert answer.add(SampledToken(first, -1.0)).text == ""
    assert answer.add(SampledToken(second, -2.0)).logprobs == ()

    last = answer.add(SampledToken(END, -3.0))

    assert (last.text, last.finish_reason) == (begin, "stop")
    assert [one.logprob for one in last.logprobs or ()] == [-1.0, -2.0]


def test_stop_string_takes_precedence_over_the_limit() -> None:
    word = VOCABULARY.token_text(WORDS[0])
    plain, stopped = _answer(limit=1), _answer([word], limit=1)

    assert plain.add(SampledToken(WORDS[0], -1.0)).finish_reason == "length"
    assert stopped.add(SampledToken(WORDS[0], -1.0)).finish_reason == "stop"


@pytest.mark.parametrize("special", [False, True], ids=["plain-marks", "special-marks"])
def test_thoughts_are_counted_and_kept_out_of_the_text(special: bool) -> None:
    tokenizer = make_marked_tokenizer("qwen3", special_calls=special)
    vocabulary = Vocabulary(tokenizer, size=len(tokenizer), end_tokens=frozenset({END}))
    chat = ChatInput(messages=(ChatMessage("user", "the fox"),), max_tokens=100)
    prompt = vocabulary.encode(chat.messages)
    thoughts = tokenizer.encode("<think>\nthe fox jumps\n</think>")
    answer = tokenizer.encode("\n\nover a dog")

    choice = ChoiceState(0, chat, vocabulary, prompt=prompt, limit=100)
    events = [choice.add(SampledToken(token)) for token in [*thoughts, *answer, END]]

    done = choice.choice()
    assert (done.reasoning, done.text) == ("the fox jumps", "over a dog")
    assert done.reasoning_tokens == len(thoughts)
    assert "".join(event.reasoning for event in events) == done.reasoning
    assert "".join(event.text for event in events) == done.text


def test_prompt_can_begin_the_thoughts_or_leave_them_out() -> None:
    tokenizer = make_marked_tokenizer("qwen3")
    vocabulary = Vocabulary(tokenizer, size=len(tokenizer), end_tokens=frozenset({END}))
    chat = ChatInput(messages=(ChatMessage("user", "the fox"),), max_tokens=100)
    said = tokenizer.encode("the fox</think>a dog")

    def answer(tail: str, chat: ChatInput = chat) -> Choice:
        prompt = [*vocabulary.encode(chat.messages), *tokenizer.encode(tail)]
        choice = ChoiceState(0, chat, vocabulary, prompt=prompt, limit=100)
        for token in said:
            choice.add(SampledToken(token))
        return choice.choice()

    begun = answer("<think>\n")
    assert (begun.reasoning, begun.text) == ("the fox", "a dog")
    assert begun.reasoning_tokens == len(said) - len(tokenizer.encode("a dog"))
    closed = answer("<think>\n\n</think>\n\n")
    assert (closed.reasoning, closed.reasoning_tokens) == ("", 0)
    assert closed.text == "the fox</think>a dog"
    raw = answer("<think>", ChatInput(messages=chat.messages, max_tokens=100, prompts=("a",)))
    assert raw.text == "the fox</think>a dog"
