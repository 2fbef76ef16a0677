"""Logins at a provider of OpenID Connect, as far as they need no library."""

from __future__ import annotations

from dataclasses import dataclass


class LoginFailed(Exception):
    """The provider does not answer, or what it sent is not valid."""


@dataclass(frozen=True, slots=True)
class Login:
    """A login that has begun: what the browser keeps until it returns."""

    state: str
    nonce: str
    verifier: str
