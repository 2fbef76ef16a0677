"""The SQL tables beside ``price_periods``; they share the metadata of ``gateway.tables``.

``price_version`` has one row. Triggers increment it with every row that is inserted into
``price_periods`` or ``batch_discounts``, whoever inserts it, so that a gateway learns from one row
whether it knows all prices and discounts. The writer holds the row's lock until it commits: a
version that can be read stands for everything up to it.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, CheckConstraint, Column, Integer, Table

from gateway.tables import metadata

ONLY: Final = 1
"""Id of the only row of ``price_version``."""

price_version = Table(
    "price_version",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("id = 1", name="only"),
)
