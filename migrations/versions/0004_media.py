"""What requests have in the blob store, and files that are sent along with requests.

Revision: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.sql.database import UtcDateTime

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
PURPOSES = "purpose IN ('batch', 'batch_output', 'vision', 'user_data')"


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        # A table's checks cannot be changed there: it is written anew, without the old one.
        with op.batch_alter_table("files", recreate="always") as files:
            files.create_check_constraint(op.f("ck_files_purpose"), PURPOSES)
    else:
        op.drop_constraint(op.f("ck_files_purpose"), "files", type_="check")
        op.create_check_constraint(op.f("ck_files_purpose"), "files", PURPOSES)
    op.create_table(
        "media",
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("account_id", ROW_ID, nullable=False),
        sa.Column("task", sa.String(length=40), nullable=False),
        sa.Column("asked", sa.LargeBinary(), nullable=True),
        sa.Column("forgotten", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("clear_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_media_account_id")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_media")),
    )
    for columns in (["account_id", "request_id"], ["clear_at"]):
        op.create_index(op.f(f"ix_media_{'_'.join(columns)}"), "media", columns, unique=False)
