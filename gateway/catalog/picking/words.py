"""Matches words that people use with the texts of catalog entries.

An entry is found by its own texts and by the usual words for its tasks and its tier. A word's
weight is that of the most telling text in which it occurs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import yaml

from gateway.catalog.derived import once_per_entry
from gateway.catalog.market.contract import contract_of
from gateway.catalog.schema import CatalogEntry, CatalogModel, Tier
from gateway.catalog.tasks import Task

TEXT_MAX: Final = 300
"""Maximum characters of a text that somebody asks by."""
PURPOSE: Final = 3
"""Weight of a word for what a model does or is good for."""
REASON: Final = 2
"""Weight of a word in its reason and its strengths."""
MENTION: Final = 1
"""Weight of a word anywhere else."""

_FILE: Final = Path(__file__).with_name("words.yaml")
_WORD: Final = re.compile(r"[a-z0-9]+(?:&[a-z0-9]+)*")
_ENDINGS: Final = (
    *("ications", "ication", "ations", "ation", "ators", "ator", "ates", "ate"),
    *("ings", "ing", "ement", "ment", "ers", "est", "er", "ive", "ies", "ify"),
    *("es", "ed", "e", "s", "y"),
)
_STEM_MIN: Final = 4
_PREFIX_MIN: Final = 4


class _Words(CatalogModel):
    tasks: Mapping[Task, str]
    tiers: Mapping[Tier, str]
    roles: Mapping[str, str]
    ignored: str


def stems(text: str) -> dict[str, str]:
    """Return the telling words of a text by their stems, each once, in order."""
    found = {stem(word): word for word in _WORD.findall(text.lower())}
    return {each: word for each, word in found.items() if each not in _ignored()}


def stem(word: str) -> str:
    """Return a word without its ending: ``exploration`` and ``explore`` are both ``explor``."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _STEM_MIN:
            return word.removesuffix(ending)
    return word


@once_per_entry
def weights(entry: CatalogEntry) -> Mapping[str, int]:
    """Return the weight of each stem by which an entry is found."""
    known = _words()
    found: dict[str, int] = {}
    for weight, texts in (
        (MENTION, (entry.name, entry.description, entry.family or "", entry.vendor or "")),
        (MENTION, (known.tiers[entry.tier],) if entry.tier else ()),
        (REASON, (entry.why or "", *strengths_of(entry))),
        (PURPOSE, (*entry.good_for, *(known.tasks[task] for task in (entry.task, *entry.also)))),
    ):
        for text in texts:
            found |= dict.fromkeys(stems(text), weight)
    return found


def weight(entry: CatalogEntry, word: str) -> int:
    """Return the weight of a stem in an entry's texts; 0 if it does not occur.

    A beginning of a word counts as the word: ``perf`` is found in ``performance``.
    """
    found = weights(entry)
    if word in found or len(word) < _PREFIX_MIN:
        return found.get(word, 0)
    return max((found[each] for each in found if each.startswith(word)), default=0)


def strengths_of(entry: CatalogEntry) -> tuple[str, ...]:
    """Return an entry's strengths: its own, or those of its contract."""
    if entry.strengths:
        return entry.strengths
    contract = contract_of(entry)
    return contract.strengths if contract is not None else ()


def tasks_meant(words: Iterable[str]) -> frozenset[Task]:
    """Return the tasks whose usual words include most of some stems; none if none does."""
    asked = frozenset(words)
    counts = {task: len(asked & stems(usual).keys()) for task, usual in _words().tasks.items()}
    most = max(counts.values())
    return frozenset(task for task, count in counts.items() if count == most > 0)


def roles_meant(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known roles that a text names, such as ``student`` for ``an AI student``."""
    asked = stems(text).keys()
    usual = _words().roles
    return tuple(
        role for role in known if asked & stems(f"{role} {usual.get(role.lower(), '')}").keys()
    )


@cache
def _words() -> _Words:
    return _Words.model_validate(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


@cache
def _ignored() -> frozenset[str]:
    return frozenset(stem(word) for word in _WORD.findall(_words().ignored))
