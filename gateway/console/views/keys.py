"""Keys as lists and pages show them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from zoneinfo import ZoneInfo

from gateway.checks.moments import read_moment
from gateway.console.views.formats import count
from gateway.console.views.requests import StateKind
from gateway.operations.keys import KeyView
from gateway.pricing import format_usd, parse_usd

KINDS: Final[Mapping[str, StateKind]] = {"active": "good", "expired": "warn", "revoked": "idle"}


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key, without its secret, which is not stored."""

    id: int
    prefix: str
    name: str
    account: str
    status: str
    kind: StateKind
    scopes: Sequence[str]
    role: str | None
    models: Sequence[str] | None
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    replaces: int | None
    replaced_by: int | None
    spent_nanos: int
    held_nanos: int
    limit_nanos: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None

    @property
    def rates(self) -> Sequence[str]:
        """Its own limits, as words."""
        limits = (
            (self.requests_per_minute, "requests a minute"),
            (self.tokens_per_minute, "tokens a minute"),
            (self.concurrent, "at a time"),
        )
        return [f"{count(number)} {of}" for number, of in limits if number is not None]

    def entered(self, zone: str) -> dict[str, str]:
        """Return its terms as a form has them."""
        expires = self.expires_at.astimezone(ZoneInfo(zone)) if self.expires_at else None
        limit = None if self.limit_nanos is None else format_usd(self.limit_nanos)
        terms = {
            "name": self.name,
            "models": ", ".join(self.models or ()),
            "expires_at": expires.date().isoformat() if expires else None,
            "spend_limit": limit,
            "requests_per_minute": self.requests_per_minute,
            "tokens_per_minute": self.tokens_per_minute,
            "concurrent": self.concurrent,
        }
        return {name: "" if value is None else str(value) for name, value in terms.items()}


def key_row(view: KeyView) -> KeyRow:
    limits = view["limits"]
    return KeyRow(
        id=view["id"],
        prefix=view["prefix"],
        name=view["name"],
        account=view["account"],
        status=view["status"],
        kind=KINDS[view["status"]],
        scopes=view["scopes"],
        role=view["role"] or view["member_role"],
        models=view["models"],
        created_at=read_moment(view["created_at"]),
        expires_at=_moment(view["expires_at"]),
        last_used_at=_moment(view["last_used_at"]),
        replaces=view["replaces"],
        replaced_by=view["replaced_by"],
        spent_nanos=parse_usd(view["spent"]),
        held_nanos=parse_usd(view["held"]),
        limit_nanos=None if limits["spend"] is None else parse_usd(limits["spend"]),
        requests_per_minute=limits["requests_per_minute"],
        tokens_per_minute=limits["tokens_per_minute"],
        concurrent=limits["concurrent"],
    )


def _moment(text: str | None) -> datetime | None:
    return None if text is None else read_moment(text)
