"""What is emitted of a growing answer: text up to a stop string, and its log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.workers.llm.checkpoints import make_tokenizer
from workers.contract.jobs import ChatInput
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
