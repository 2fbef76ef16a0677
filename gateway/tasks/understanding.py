"""Checks whether a model understands the texts of an input. Pure.

Words that a model does not know are reported with its answer. A text of which it understands
nothing is refused before anything is held, with examples that work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from gateway.catalog.listing import examples_of
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS
from gateway.catalog.vocabulary.words import Reading, known_words, read, texts_of, unknown_words
from gateway.errors import InvalidRequest
from workers.contract.jobs import PromptWarning

TOLD: Final = ("prompt", "text")
"""Fields that say what is to be made; of each, something must be understood."""
EXAMPLES_MAX: Final = 3
SHOWN_MAX: Final = 10
"""Maximum words in the message of a refusal."""


def check_understood(
    entry: CatalogEntry,
    given: Mapping[str, Any],
    *,
    prefix: str,
    names: Mapping[str, str] = MappingProxyType({}),
) -> tuple[PromptWarning, ...]:
    """Return warnings of words of an input that the model does not know.

    ``prefix`` is the input's place in the client's body, ``names`` has fields that are elsewhere.
    Raise ``InvalidRequest`` if the model understands nothing of a text. Without a vocabulary, it
    understands all.
    """
    if entry.vocabulary is None or TASKS[entry.task].makes not in ("image", "video", "audio"):
        return ()
    prefix = f"{prefix}." if prefix else ""
    texts = texts_of(given)
    params = {field: names.get(field, f"{prefix}{field}") for field in texts}
    for field in texts.keys() & TOLD:
        found = read(entry, texts[field])
        if not found.is_understood:
            raise _not_understood(entry, given, field, found, param=params[field])
    return unknown_words(entry, {params[field]: text for field, text in texts.items()})


def _not_understood(
    entry: CatalogEntry, given: Mapping[str, Any], field: str, found: Reading, *, param: str
) -> InvalidRequest:
    examples = [example[field] for example in _examples(entry, given, field)]
    known = known_words(entry)
    unknown = f" ({_quoted(found.unknown)})" if found.unknown else ""
    if examples:
        hint = f"These work: {'; '.join(map(_in_quotes, examples))}."
    else:
        hint = f"It knows {_quoted(known)}."
    return InvalidRequest(
        "prompt_not_understood",
        f"{entry.name} understands nothing of {param}{unknown}. {hint} "
        f"GET /v1/catalog/{entry.name} has its whole vocabulary.",
        param=param,
        details={"unknown": list(found.unknown), "known": list(known), "examples": examples},
    )


def _examples(
    entry: CatalogEntry, given: Mapping[str, Any], field: str
) -> Sequence[Mapping[str, Any]]:
    """Return examples with a text, those with attachments first if the input has any."""
    found = [one for one in examples_of(entry) if isinstance(one.get(field), str)]
    return sorted(found, key=lambda one: _has_media(one) != _has_media(given))[:EXAMPLES_MAX]


def _has_media(input: Mapping[str, Any]) -> bool:
    return any(input.get(name) for name in ("image", "images", "video"))


def _quoted(words: tuple[str, ...]) -> str:
    shown = ", ".join(map(_in_quotes, words[:SHOWN_MAX]))
    return f"{shown}, …" if len(words) > SHOWN_MAX else shown


def _in_quotes(text: str) -> str:
    return f'"{text}"'
