"""What the newest requests tell: the names of their tags, and when they were booked."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import Connection, String, cast, select

from gateway.tables.core import receipts

NEWEST: Final = 2_000
"""Requests whose tags are looked at."""
NAMES_MAX: Final = 50


def tag_names(connection: Connection, account_ids: Sequence[int] | None = None) -> list[str]:
    """Return the names of the tags of the newest requests, in order; at most ``NAMES_MAX``."""
    newest = select(cast(receipts.c["metadata"], String).label("tags"))
    newest = newest.order_by(receipts.c.request_id.desc()).limit(NEWEST)
    if account_ids is not None:
        newest = newest.where(receipts.c.account_id.in_(account_ids))
    # Most requests have no tags, or those of others: reading each took longer than the report.
    some = newest.subquery()
    found = connection.execute(select(some.c.tags).where(some.c.tags.is_not(None)).distinct())
    names = {name for tags in found.scalars() for name in msgspec.json.decode(tags) or ()}
    return sorted(names)[:NAMES_MAX]


def newest_booking(
    connection: Connection, account_ids: Sequence[int] | None = None
) -> datetime | None:
    """Return when the newest request was booked; None if there is none."""
    query = select(receipts.c.settled_at).order_by(receipts.c.request_id.desc()).limit(1)
    if account_ids is not None:
        query = query.where(receipts.c.account_id.in_(account_ids))
    return connection.execute(query).scalar()
