"""Conversations to tokens and tokens to text, with tokenizers of different kinds."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.workers.llm.checkpoints import TEXT, make_tokenizer
from workers.contract.jobs import ChatMessage
from workers.engines.llm.text import TextStream
from workers.engines.llm.vocabulary import Vocabulary


def _byte_level(*, size: int = 1000, template: str | None = None) -> Vocabulary:
    tokenizer = make_tokenizer() if template is None else make_tokenizer(template)
    return Vocabulary(tokenizer, size=size, end_tokens=frozenset({1}))


def _words() -> Vocabulary:
    """A vocabulary that marks word starts and drops the mark before the first, like Llama 2's."""
    pieces = ["<unk>", "</s>", "▁the", "▁fox", "es", "▁,", "▁."]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=True,
    )
    return Vocabulary(wrapped, size=len(pieces), end_tokens=frozenset({1}))


def test_conversation_is_rendered_up_to_the_answer() -> None:
    vocabulary = _byte_level()
    messages = [
        ChatMessage("system", "be brief"),
        ChatMessage("user", "count", name="ada"),
        ChatMessage("assistant", "0123"),
        ChatMessage("user", "漢字?"),
    ]

    ids = vocabulary.encode(messages)

    shown = "".join(map(vocabulary.token_text, ids))
    assert shown.count("\ufffd") > 0, "bytes of a character are separate tokens"
    assert vocabulary.decode(ids) == "be briefcount0123漢字?"
    assert vocabulary.token_text(ids[-1]) == "<assistant>"


def test_name_is_passed_to_the_template() -> None:
    vocabulary = _byte_level(template="{{ messages[0]['name'] }}")

    assert vocabulary.decode(vocabulary.encode([ChatMessage("user", "x", name="ada")])) == "ada"


@pytest.mark.parametrize(
    ("template", "size", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", 1000, "roles must alternate"),
        ("{{ messages[0].content.missing.more }}", 1000, "has no attribute"),
        ("", 1000, "it has no tokens"),
        ("{{ messages[0].content }}", 9, "tokens are 0 to 8"),
    ],
)
def test_conversation_that_cannot_be_tokenized_is_refused(
    template: str, size: int, message: str
) -> None:
    vocabulary = _byte_level(template=template, size=size)

    with pytest.raises(ValueError, match=message):
        vocabulary.encode([ChatMessage("user", "hello")])


def test_text_of_a_token_is_that_between_others() -> None:
    vocabulary = _words()

    assert [vocabulary.token_text(token) for token in (2, 3, 4, 1)] == [
        " the",
        " fox",
        "es",
        "</s>",
    ]


def test_emitted_text_never_changes() -> None:
    vocabulary = _words()
    ids = [2, 3, 4, 5, 2, 3, 6]
    stream = TextStream(vocabulary.decode, ())

    pieces = [stream.push(token) for token in ids]

    assert pieces == ["the", " fox", "es", " ,", " the", " fox", " ."]
    assert "".join(pieces) == vocabulary.decode(ids)


def test_bytes_are_emitted_as_whole_characters() -> None:
    vocabulary = _byte_level()
    ids = vocabulary.encode([ChatMessage("user", TEXT)])
    stream = TextStream(vocabulary.decode, ())

    pieces = [stream.push(token) for token in ids]

    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
