"""What an examination finds: one line for each thing examined, with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["ok", "note", "warning", "problem"]
"""A ``problem`` keeps something from working; a ``warning`` makes it slow or will break it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing examined."""

    part: str
    """What was examined, such as ``database``."""
    level: Level
    found: str
    advice: str = ""
    """What to do, in one sentence; empty if nothing is to be done."""


def ok(part: str, found: str) -> Diagnosis:
    return Diagnosis(part, "ok", found)


def note(part: str, found: str, advice: str = "") -> Diagnosis:
    return Diagnosis(part, "note", found, advice)


def warning(part: str, found: str, advice: str) -> Diagnosis:
    return Diagnosis(part, "warning", found, advice)


def problem(part: str, found: str, advice: str) -> Diagnosis:
    return Diagnosis(part, "problem", found, advice)


def gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
