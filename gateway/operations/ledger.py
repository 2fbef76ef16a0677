"""The ledger's hourly sums: rebuild."""

from __future__ import annotations

from sqlalchemy import Connection

from gateway.audit_log import Author, record
from gateway.billing.usage.rollups import Seal, rebuild


def rebuild_rollups(connection: Connection, author: Author) -> list[tuple[Seal, Seal]]:
    """Rebuild every sealed hour; return the old and new seals of those that differ."""
    differing = rebuild(connection)
    after = {"differing": [f"{old.hour:%Y-%m-%dT%H:%MZ}" for old, _ in differing]}
    record(connection, author, "ledger.rebuild", "ledger", after=after)
    return differing
