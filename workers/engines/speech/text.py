"""Text normalisation for speech: splits a text into sentences and writes out numbers.

``sentencex`` splits sentences, ``num2words`` writes out numbers, and Unicode's tables (``babel``)
supply the names of months and currencies. If a library lacks the language, the text is unchanged.
Independent of any model.
"""

from __future__ import annotations

import datetime
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from itertools import zip_longest
from typing import Final

import sentencex
from babel import Locale, UnknownLocaleError
from babel.dates import format_date
from babel.numbers import NumberFormatError, get_currency_name, parse_decimal
from num2words import CONVERTER_CLASSES, num2words

_DIGITS_MAX: Final = 15
"""Longer numbers are identifiers, not quantities, and are read digit by digit."""
_CURRENCIES: Final = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR", "₩": "KRW"}
_SIGN_NAMES: Final[dict[str, dict[str, str]]] = {
    "en": {"%": "percent", "&": "and", "+": "plus", "=": "equals", "@": "at", "°": "degrees"},
    "de": {"%": "Prozent", "&": "und", "+": "plus", "=": "gleich", "@": "at", "°": "Grad"},
    "fr": {"%": "pour cent", "&": "et", "+": "plus", "=": "égale", "@": "arobase", "°": "degrés"},
    "es": {"%": "por ciento", "&": "y", "+": "más", "=": "igual a", "@": "arroba", "°": "grados"},
    "it": {"%": "per cento", "&": "e", "+": "più", "=": "uguale", "@": "chiocciola", "°": "gradi"},
    "pt": {"%": "por cento", "&": "e", "+": "mais", "=": "igual a", "@": "arroba", "°": "graus"},
    "nl": {"%": "procent", "&": "en", "+": "plus", "=": "is", "@": "apenstaartje", "°": "graden"},
}
_ABBREVIATIONS: Final[dict[str, dict[str, str]]] = {
    "en": {
        "dr.": "doctor",
        "mr.": "mister",
        "mrs.": "missis",
        "ms.": "miz",
        "prof.": "professor",
        "vs.": "versus",
        "e.g.": "for example",
        "i.e.": "that is",
        "etc.": "et cetera",
        "approx.": "approximately",
    },
    "de": {
        "dr.": "Doktor",
        "hr.": "Herr",
        "fr.": "Frau",
        "prof.": "Professor",
        "z.b.": "zum Beispiel",
        "z. b.": "zum Beispiel",
        "d.h.": "das heißt",
        "usw.": "und so weiter",
        "bzw.": "beziehungsweise",
        "ca.": "circa",
        "nr.": "Nummer",
    },
}
TURN_TAG: Final = re.compile(r"\[S\d\]")
"""Marks the speaker of what follows, for models with several speakers."""
FIRST_TURN_TAG: Final = "[S1]"
_NUMBER: Final = r"\d+(?:[.,\u00a0\u202f'\u2019]\d+)*"
_SIGNS: Final = "".join(map(re.escape, _CURRENCIES))
_AMOUNT: Final = re.compile(rf"([{_SIGNS}])\s?({_NUMBER})|({_NUMBER})\s?([{_SIGNS}])")
_ISO_DATE: Final = re.compile(r"(?<![\d-])(\d{4})-(\d{2})-(\d{2})(?![\d-])")
_LOCAL_DATE: Final = re.compile(r"(?<![\d./])(\d{1,2})([./])(\d{1,2})\2(\d{4})(?![\d])")
_TIME: Final = re.compile(r"(?<![\d:])(\d{1,2}):(\d{2})(?![\d:])")
_ORDINAL: Final = re.compile(r"\b(\d{1,6})(?:st|nd|rd|th)\b")
_PLAIN: Final = re.compile(rf"(?<![\w.,])([-\u2212]?)({_NUMBER})|(\d+)")
_CLAUSE: Final = re.compile("(?<=[,;:\u2013\u2014\u3001\uff0c\uff1b\uff1a])\\s*")
_WORD: Final = re.compile(r"\s+")


class Language:
    """A language, with what the libraries support for it."""

    def __init__(self, tag: str) -> None:
        """Raise ``ValueError`` if the tag is not a known language."""
        try:
            locale = Locale.parse(tag.replace("-", "_"))
        except (ValueError, UnknownLocaleError) as error:
            raise ValueError(f"unknown language {tag!r}") from error
        self.tag = tag
        self.name: str = locale.language
        self._locale = locale
        regional = str(locale)
        known = (one for one in (regional, self.name) if one in CONVERTER_CLASSES)
        self._numbers: str | None = next(known, None)

    def sentences(self, text: str, *, characters_max: int, normalize: bool = True) -> list[str]:
        """Split a text into sentences of at most ``characters_max`` characters each."""
        found: list[str] = []
        for part in sentencex.segment(self.name, unicodedata.normalize("NFC", text)):
            spoken = self.normalize(part) if normalize else part
            spoken = _WORD.sub(" ", spoken).strip()
            found += [piece for piece in _split(spoken, characters_max) if _is_speakable(piece)]
        return found

    def normalize(self, text: str) -> str:
        """Write out numbers, amounts, dates, times, signs and common abbreviations."""
        if turns := TURN_TAG.findall(text):
            spoken = (self.normalize(part) for part in TURN_TAG.split(text))
            return "".join(map("".join, zip_longest(spoken, turns, fillvalue="")))
        for abbreviation, full in _ABBREVIATIONS.get(self.name, {}).items():
            pattern = rf"(?<![\w.]){re.escape(abbreviation)}(?!\w)"
            text = re.sub(pattern, full, text, flags=re.IGNORECASE)
        if self._numbers is not None:
            for rule, to_words in self._rules():
                text = rule.sub(_or_unchanged(to_words), text)
        for sign, name in _SIGN_NAMES.get(self.name, {}).items():
            text = text.replace(sign, f" {name} ")
        return text

    # --- Rules ------------------------------------------------------------------------------------

    def _rules(self) -> list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]]:
        rules: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
            (_AMOUNT, self._amount),
            (_ISO_DATE, lambda found: self._date(found[1], found[2], found[3])),
            (_LOCAL_DATE, self._local_date),
            (_TIME, self._time),
        ]
        if self.name == "en":
            rules.append((_ORDINAL, lambda found: self._words(int(found[1]), "ordinal")))
        return [*rules, (_PLAIN, self._plain)]

    def _amount(self, found: re.Match[str]) -> str:
        code = _CURRENCIES[found[1] or found[4]]
        amount = self._parse(found[2] or found[3])
        try:
            if amount != int(amount):
                spoken = num2words(float(amount), to="currency", lang=self._numbers, currency=code)
                return str(spoken).replace(",", "")
        except (NotImplementedError, KeyError, AttributeError, TypeError):
            pass
        name = get_currency_name(code, count=float(amount), locale=self._locale)
        return f"{self._words(amount)} {name}"

    def _local_date(self, found: re.Match[str]) -> str:
        first, second, year = found[1], found[3], found[4]
        months_first = self._locale.date_formats["short"].pattern.lower().startswith("m")
        if months_first and found[2] == "/":
            first, second = second, first
        return self._date(year, second, first)

    def _date(self, year: str, month: str, day: str) -> str:
        date = datetime.date(int(year), int(month), int(day))
        written = format_date(date, "long", locale=self._locale)

        def to_words(found: re.Match[str]) -> str:
            if len(found[0]) == 4:
                return self._words(int(found[0]), "year")
            return self._words(int(found[0]), "ordinal" if self.name == "en" else "cardinal")

        return re.sub(r"\d+", to_words, written)

    def _time(self, found: re.Match[str]) -> str:
        hour, minute = int(found[1]), int(found[2])
        if hour > 24 or minute > 59:
            raise ValueError("not a time of day")
        return f"{self._words(hour)} {self._words(minute)}" if minute else self._words(hour)

    def _plain(self, found: re.Match[str]) -> str:
        sign, written = found[1] or "", found[2] or found[3]
        digits = re.sub(r"\D", "", written)
        if len(digits) > _DIGITS_MAX or (
            written == digits and len(digits) > 1 and digits[0] == "0"
        ):
            return " ".join(self._words(int(digit)) for digit in digits)
        try:
            number = self._parse(written)
        except NumberFormatError:  # such as a version or an address: read each part
            return " ".join(self._words(int(part)) for part in re.findall(r"\d+", written))
        if written == digits and len(digits) == 4 and not sign and self._is_year(int(number)):
            return self._words(int(number), "year")
        spoken = self._words(-number if sign else number)
        return f" {spoken} " if found[3] else spoken

    def _is_year(self, number: int) -> bool:
        return self.name == "en" and (1100 <= number < 2000 or 2010 <= number < 2100)

    def _parse(self, written: str) -> Decimal:
        return Decimal(parse_decimal(written, locale=self._locale, strict=True))

    def _words(self, number: Decimal | int, to: str = "cardinal") -> str:
        whole = int(number) if number == int(number) else number
        return str(num2words(whole, lang=self._numbers, to=to)).replace(",", "")


def with_turn_tags(sentences: Sequence[str]) -> list[str]:
    """Prefix each sentence with the tag of its speaker."""
    turn, found = FIRST_TURN_TAG, []
    for sentence in sentences:
        found.append(sentence if TURN_TAG.match(sentence) else f"{turn} {sentence}")
        turn = (TURN_TAG.findall(sentence) or [turn])[-1]
    return found


def _or_unchanged(to_words: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
    """Wrap a rule so that text is unchanged if the library does not support it."""

    def attempt(found: re.Match[str]) -> str:
        try:
            return to_words(found)
        except (ValueError, NotImplementedError, OverflowError, LookupError, TypeError):
            return found[0]

    return attempt


def _is_speakable(piece: str) -> bool:
    return any(character.isalnum() for character in piece)


def _split(text: str, characters_max: int) -> Iterator[str]:
    """Split at the best place: after clauses, otherwise between words, otherwise anywhere."""
    if len(text) <= characters_max:
        yield text
        return
    for cut in (_CLAUSE, _WORD):
        # A text that ends with a cut has nothing behind it.
        parts = [part for part in cut.split(text) if part]
        if len(parts) > 1:
            break
    else:
        yield from (text[at : at + characters_max] for at in range(0, len(text), characters_max))
        return
    chunk = ""
    for part in parts:
        if chunk and len(chunk) + 1 + len(part) > characters_max:
            yield from _split(chunk, characters_max)
            chunk = part
        else:
            chunk = f"{chunk} {part}" if chunk else part
    yield from _split(chunk, characters_max)
