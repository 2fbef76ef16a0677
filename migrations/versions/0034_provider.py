"""The session at a provider of OpenID Connect, by which it ends a session of the console.

Revision: 0034
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("provider_sid", sa.String(length=255), nullable=True))
    op.create_index(op.f("ix_sessions_provider_sid"), "sessions", ["provider_sid"])


def downgrade() -> None:
    op.drop_index(op.f("ix_sessions_provider_sid"), "sessions")
    op.drop_column("sessions", "provider_sid")
