"""Chooses among the candidates of a step: by the verdict of a judge, or by majority. Pure.

A choice depends on what the attempts have returned only, so every gateway makes the same one. A
candidate that failed is left out, as long as another one is left.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from gateway.ledger.closed import Output
from gateway.ledger.workflow_plan import Choice

_NUMBER: Final = re.compile(r"[0-9]+")
_EDGES: Final = " \t\n.,;:!?\"'`*_()[]{}"
"""Characters at the ends of an answer that do not make it another one."""


def choose(
    choice: Choice, outputs: Mapping[str, Output | None], lost: Collection[str]
) -> str | None:
    """Return the candidate that was chosen, or None while that is open.

    ``outputs`` has the steps that succeeded, ``lost`` those that failed and are not tried again.
    """
    left = remaining(choice, outputs, lost)
    if left is None or not left:
        return None
    if len(left) == 1:
        return left[0]
    if choice.judge is None:
        return _majority(left, outputs)
    if choice.judge not in outputs:
        return None
    return _verdict(choice, text_of(outputs[choice.judge]), left)


def remaining(
    choice: Choice, outputs: Mapping[str, Output | None], lost: Collection[str]
) -> list[str] | None:
    """Return the candidates that succeeded, in order; None while one still runs."""
    if any(name not in outputs and name not in lost for name in choice.candidates):
        return None
    return [name for name in choice.candidates if name in outputs]


def text_of(output: Output | None) -> str:
    """Return the first text of an output."""
    choices = output.value.get("choices", ()) if output is not None else ()
    return str(choices[0].get("text", "")) if choices else ""


def normalized(answer: str) -> str:
    """Return an answer without what does not make it another one: case, space, punctuation around
    it, and compatible forms of characters."""
    return " ".join(unicodedata.normalize("NFKC", answer).casefold().split()).strip(_EDGES)


def _majority(left: Sequence[str], outputs: Mapping[str, Output | None]) -> str:
    answers = {name: normalized(text_of(outputs[name])) for name in left}
    votes = Counter(answers.values())
    # The first of the greatest, so that a tie goes to the earlier candidate.
    return max(left, key=lambda name: votes[answers[name]])


def _verdict(choice: Choice, text: str, left: Sequence[str]) -> str:
    """Return the candidate that a verdict names first; if it names none, the first that is left."""
    for found in _NUMBER.findall(text):
        place = int(found[:3]) - 1
        if 0 <= place < len(choice.candidates) and choice.candidates[place] in left:
            return choice.candidates[place]
    return left[0]
