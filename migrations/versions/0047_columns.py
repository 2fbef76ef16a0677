"""Columns that visitors hide, of each list of the console.

What was chosen for the list of requests is kept. ``hidden`` stays for gateways of the version
before.

Revision: 0047
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0047"
down_revision = "0046"
branch_labels = None
depends_on = None

DEFAULT = "task,tags"


def upgrade() -> None:
    json = sa.JSON(none_as_null=True)
    op.add_column("sessions", sa.Column("columns", json, nullable=True))
    sessions = sa.table(
        "sessions", sa.column("id"), sa.column("hidden"), sa.column("columns", json)
    )
    connection = op.get_bind()
    chosen = sa.select(sessions.c.id, sessions.c.hidden).where(sessions.c.hidden != DEFAULT)
    for id, hidden in connection.execute(chosen).all():
        kept = {"requests": [name for name in hidden.split(",") if name]}
        connection.execute(sa.update(sessions).where(sessions.c.id == id).values({"columns": kept}))


def downgrade() -> None:
    op.drop_column("sessions", "columns")
