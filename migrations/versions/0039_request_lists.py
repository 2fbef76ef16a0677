"""Lists of requests: indexes for those of all accounts, and the columns that a visitor hides.

The indexes are by model and by an unsuccessful status, newest first. That of models replaces the
one by time of settlement, so a settlement writes as many entries as before; statistics of a model
use it as well. That of statuses leaves out what succeeded. On PostgreSQL they are built partition
by partition while bookings continue.

Revision: 0039
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.migrations import build_index, drop_index

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None

MODELS = "ix_receipts_model_request_id"
MODELS_BY_TIME = "ix_receipts_model_settled_at"
NOT_SUCCEEDED = "ix_receipts_not_succeeded_of_all"


def upgrade() -> None:
    connection = op.get_bind()
    build_index(connection, MODELS, "receipts", columns="model, request_id", where="")
    build_index(
        connection,
        NOT_SUCCEEDED,
        "receipts",
        columns="status, request_id",
        where="status <> 'succeeded'",
    )
    drop_index(connection, MODELS_BY_TIME, "receipts")
    hidden = sa.Column("hidden", sa.String(length=200), server_default="task,tags", nullable=False)
    op.add_column("sessions", hidden)


def downgrade() -> None:
    connection = op.get_bind()
    build_index(connection, MODELS_BY_TIME, "receipts", columns="model, settled_at", where="")
    drop_index(connection, NOT_SUCCEEDED, "receipts")
    drop_index(connection, MODELS, "receipts")
    # Last, because it locks the sessions until the transaction ends.
    op.drop_column("sessions", "hidden")
