"""Which key sent each request of a page, and in which service class. Reads only."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import Connection, select, union_all

from gateway.tables.core import holds, keys, receipts


class RequestOrigin(NamedTuple):
    key: str
    """Its prefix."""
    key_name: str
    service_class: str


def origins_of(connection: Connection, request_ids: Collection[str]) -> dict[str, RequestOrigin]:
    """Return the origins of open and closed requests by their ids."""
    each = union_all(
        *(
            select(table.c.request_id, keys.c.prefix, keys.c.name, table.c.service_class)
            .join(keys, keys.c.id == table.c.key_id)
            .where(table.c.request_id.in_(request_ids))
            for table in (holds, receipts)
        )
    )
    # A request is in both tables while it is settled.
    return {row.request_id: RequestOrigin(*row[1:]) for row in connection.execute(each)}
