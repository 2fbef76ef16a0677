"""How text is pronounced, sentence by sentence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engines.speech.text import TURN_TAG, Language, with_turn_tags


@pytest.mark.parametrize(
    ("language", "written", "said"),
    [
        ("en", "I have 2 dogs and 1,234.5 cats", "two dogs and one thousand two hundred and"),
        ("en", "$3.50 or €5", "three dollars fifty cents or five euros"),
        ("en", "It is -5 °", "minus five degrees"),
        ("en", "on 2026-11-21", "November twenty-first twenty twenty-six"),
        ("en-US", "on 4/7/2026", "April seventh"),
        ("en-GB", "on 4/7/2026", "July"),
        ("en", "the 22nd of May 1987", "twenty-second of May nineteen eighty-seven"),
        ("en", "at 17:30", "seventeen thirty"),
        ("en", "5% & more", "five percent and more"),
        ("en", "Dr. Smith, e.g.", "doctor Smith, for example"),
        ("en", "call 0049 or 12345678901234567", "zero zero four nine"),
        ("en", "version 1.2.3", "one two three"),
        ("en", "GPT4 and A4", "GPT four and A four"),
        ("de", "1.234,5 Meter", "eintausendzweihundertvierunddreißig Komma fünf Meter"),
        ("de", "am 3.5.2026", "Mai"),
        ("de", "z.B. 20 %", "zum Beispiel zwanzig"),
        ("fr", "21 chats", "vingt et un chats"),
        ("fr", "5 €", "cinq euros"),
        ("pt-BR", "12 gatos", "doze gatos"),
    ],
)
def test_numbers_and_signs_are_written_out(language: str, written: str, said: str) -> None:
    found = Language(language).sentences(written, characters_max=1_000)

    assert said in " ".join(" ".join(found).replace(",", ", ").split()).replace(" ,", ",") or (
        said.replace(",", "") in " ".join(" ".join(found).replace(",", " ").split())
    )


def test_text_is_split_into_sentences() -> None:
    text = 'Dr. Smith came at 5 p.m. He said "Hi!" Then what?\n\nA new one.'

    found = Language("en").sentences(text, characters_max=1_000)

    assert found[0].startswith("doctor Smith came")
    assert found[-1] == "A new one."
    assert len(found) >= 3


def test_long_sentence_is_split_at_the_best_place() -> None:
    text = "one two three, four five six, seven eight nine ten eleven twelve thirteen " + "x" * 50

    found = Language("en").sentences(text, characters_max=24)

    assert found[0] == "one two three,"
    assert all(len(piece) <= 24 for piece in found)
    assert "".join(found).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("text", ["", "   ", "...", "?!", "\n\n", "—"])
def test_text_without_letters_has_no_sentence(text: str) -> None:
    assert Language("en").sentences(text, characters_max=100) == []


def test_language_without_rules_is_unchanged() -> None:
    assert Language("sw").sentences("Nina 5 samaki.", characters_max=100) == ["Nina 5 samaki."]


@pytest.mark.parametrize("tag", ["", "xx-klingon", "1", "english please"])
def test_unknown_language_is_refused(tag: str) -> None:
    with pytest.raises(ValueError, match="unknown language"):
        Language(tag)


def test_without_normalisation_text_is_only_split() -> None:
    assert Language("en").sentences("2 dogs. 3 cats.", characters_max=99, normalize=False) == [
        "2 dogs.",
        "3 cats.",
    ]


@pytest.mark.parametrize("end", [",", ", ", "、", ";:,"])
def test_long_word_before_a_comma_is_split(end: str) -> None:
    pieces = Language("en").sentences("x" * 70 + end, characters_max=40, normalize=False)

    assert "".join(pieces).startswith("x" * 70)
    assert all(len(piece) <= 40 for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200), st.sampled_from(["en", "de", "fr", "ja", "ar", "hi"]))
def test_any_text_can_be_split(text: str, language: str) -> None:
    for piece in Language(language).sentences(text, characters_max=40):
        assert piece.strip()
        assert len(piece) <= 40


def test_turn_tags_are_kept_and_prefixed_to_each_sentence() -> None:
    said = Language("en").sentences("Hi. I am 2. [S2] So am I. Good! [S1] Bye.", characters_max=100)

    assert "S one" not in " ".join(said)
    turns = with_turn_tags(said)
    assert "".join(turns).count("[S1]") + "".join(turns).count("[S2]") >= len(turns)
    assert all(TURN_TAG.match(turn) for turn in turns)
    assert turns[:2] == ["[S1] Hi.", "[S1] I am two."]
