"""Log probabilities of an answer's tokens, as people read them. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.api.http.text_stream import choices_of
from gateway.ledger.closed import ClosedRequest
from workers.contract.jobs import TokenLogprob

TOKENS_MAX: Final = 500
"""Tokens of a choice that a page shows; all of them are fetched by the API."""


class ShownToken(msgspec.Struct, frozen=True):
    text: str
    """In quotes, so that spaces and line breaks are seen."""
    logprob: str
    chance: float
    percent: str
    others: str
    """What else was likely, with the chance of each; empty if that was not asked for."""


class ShownTokens(msgspec.Struct, frozen=True):
    """The tokens of one choice, from its start."""

    tokens: Sequence[ShownToken]
    count: int
    """How many there are in all."""


def shown_tokens(closed: ClosedRequest) -> list[ShownTokens]:
    """Return the log probabilities of each choice, if they were asked for."""
    return [
        ShownTokens([_token(one) for one in choice.logprobs[:TOKENS_MAX]], len(choice.logprobs))
        for choice in choices_of(closed)
        if choice.logprobs
    ]


def _token(token: TokenLogprob) -> ShownToken:
    others = [
        f"{_quoted(text)} {_percent(logprob)}" for text, logprob in token.top if text != token.text
    ]
    return ShownToken(
        text=_quoted(token.text),
        logprob=f"{token.logprob:.4f}",
        chance=_chance(token.logprob),
        percent=_percent(token.logprob),
        others=", ".join(others),
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _chance(logprob: float) -> float:
    return math.exp(min(logprob, 0.0))


def _percent(logprob: float) -> str:
    return f"{_chance(logprob):.1%}"
