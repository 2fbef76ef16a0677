"""Archives that are written again without what was erased, and indexes for keys and their limits.

A manifest can change after its verification if only erasing did: the seal, the counts and the
amounts are the same, fewer rows are personal, and the rewrite is recorded.

Revision: 0026
"""

from __future__ import annotations

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

STEPS = (
    "('writing', 'verified'), ('verified', 'removing'), ('removing', 'removed'), "
    "('removed', 'removing'), ('removing', 'restoring'), ('removed', 'restoring')"
)
SEALED = (
    "EXISTS (SELECT 1 FROM periods WHERE month = NEW.month AND state = 'closed' "
    "AND sha256 = NEW.sha256)"
)
SAME = "CAST(NEW.manifest AS TEXT) = CAST(OLD.manifest AS TEXT)"
KEPT = ("month", "sha256", "receipts", "charge_nanos", "steps", "transfers")


def upgrade() -> None:
    op.create_index("ix_keys_prefix", "keys", ["prefix"])
    op.create_index("ix_rate_limits_key_id", "rate_limits", ["key_id"])
    _number_subscriptions(once=True)
    _guard(f"({SAME} OR ({_rewritten()}))")


def downgrade() -> None:
    op.drop_index("ix_rate_limits_key_id", "rate_limits")
    op.drop_index("ix_keys_prefix", "keys")
    _number_subscriptions(once=False)
    _guard(SAME)


def _number_subscriptions(*, once: bool) -> None:
    """Whether SQLite gives the number of a removed subscription to no other one."""
    if op.get_bind().dialect.name == "sqlite":
        with op.batch_alter_table(
            "notice_subscriptions", recreate="always", table_kwargs={"sqlite_autoincrement": once}
        ):
            pass


def _rewritten() -> str:
    """Return the condition that only erasing changed the manifest."""
    if op.get_bind().dialect.name == "sqlite":
        same = [
            f"json_extract(NEW.manifest, '$.{name}') IS json_extract(OLD.manifest, '$.{name}')"
            for name in KEPT
        ]
        fewer = (
            "json_extract(NEW.manifest, '$.personal') < json_extract(OLD.manifest, '$.personal')"
        )
        told = (
            "json_array_length(NEW.manifest, '$.rewrites') > "
            "coalesce(json_array_length(OLD.manifest, '$.rewrites'), 0)"
        )
    else:
        same = [
            f"NEW.manifest ->> '{name}' IS NOT DISTINCT FROM OLD.manifest ->> '{name}'"
            for name in KEPT
        ]
        fewer = (
            "CAST(NEW.manifest ->> 'personal' AS BIGINT) < "
            "CAST(OLD.manifest ->> 'personal' AS BIGINT)"
        )
        told = (
            "json_array_length(NEW.manifest -> 'rewrites') > "
            "coalesce(json_array_length(OLD.manifest -> 'rewrites'), 0)"
        )
    return " AND ".join(["NEW.state = OLD.state", *same, fewer, told])


def _guard(manifest: str) -> None:
    """Replace the triggers of ``archives``; ``manifest`` is when a verified one can change."""
    kept = (
        "NEW.month = OLD.month AND NEW.sha256 = OLD.sha256 AND (OLD.state = 'writing' OR "
        f"(NEW.nonce = OLD.nonce AND {manifest}))"
    )
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER archives_step")
        op.execute(
            "CREATE TRIGGER archives_step BEFORE UPDATE ON archives "
            f"WHEN NOT coalesce({kept} AND {SEALED} AND (NEW.state = OLD.state OR "
            f"(OLD.state, NEW.state) IN (VALUES {STEPS})), 0) "
            "BEGIN SELECT RAISE(ABORT, 'archives are not changed so'); END"
        )
        return
    op.execute(
        "CREATE OR REPLACE FUNCTION guard_archives() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF TG_OP = 'INSERT' THEN "
        f"IF NEW.state = 'writing' AND {SEALED} THEN RETURN NEW; END IF; "
        "ELSIF TG_OP = 'UPDATE' THEN "
        f"IF {kept} AND {SEALED} AND (NEW.state = OLD.state OR "
        f"(OLD.state, NEW.state) IN ({STEPS})) THEN RETURN NEW; END IF; "
        "ELSIF OLD.removed_receipts + OLD.removed_transfers = 0 THEN RETURN OLD; END IF; "
        "RAISE EXCEPTION 'archives are not changed so'; END $$"
    )
