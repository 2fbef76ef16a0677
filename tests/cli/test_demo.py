"""``tollgate demo`` with some of the pocket models, on an installation that it starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from sqlalchemy import func, select

from gateway.accounts.accounts import find_account
from gateway.accounts.budgets import budget_states, list_budgets
from gateway.ledger.reconcile import reconcile
from gateway.sql.database import Database
from gateway.tables.core import receipts, refunds
from gateway.tables.usage import usage_hours
from gateway.tables.voices import voice_recordings
from tests.cli.here import run_here
from tests.stack import free_port

ROOT = Path(__file__).parents[2]
MODELS = ("pocket-chat", "pocket-image-turbo", "pocket-image", "pocket-speech", "pocket-upscale")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "workers").symlink_to(ROOT / "workers")
    shipped = yaml.safe_load((ROOT / "catalog.yaml").read_text())["models"]
    chosen = [entry for entry in shipped if entry["name"] in MODELS]
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text(yaml.safe_dump({"version": 1, "models": chosen}))
    kept = {k: v for k, v in os.environ.items() if k not in ("REDIS_URL", "DATABASE_URL")}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "TOLLGATE_HOME": str(tmp_path / "home"),
        "TOLLGATE_PORT": str(free_port()),
        "TOLLGATE_CATALOG": str(catalog),
    }


def test_demo_fills_a_new_installation_whose_books_agree(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "demo", "--days", "3"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert "they agree" in done.stdout
    database = Database(f"sqlite:///{tmp_path / 'home' / 'tollgate.db'}")
    with database.snapshot() as connection:
        assert reconcile(connection, now=datetime.now(UTC)) == []
        by = select(receipts.c.status, func.count()).group_by(receipts.c.status)
        ends = dict(connection.execute(by).all())
        assert ends["succeeded"] > 80
        assert ends["failed"] >= 2
        days = select(func.count()).select_from(usage_hours)
        assert connection.execute(days).scalar_one() > 48
        assert connection.execute(select(func.count()).select_from(refunds)).scalar_one() >= 1
        assert (
            connection.execute(select(func.count()).select_from(voice_recordings)).scalar_one() == 2
        )
        orca = find_account(connection, "studio-orca")
        now = datetime.now(UTC)
        (spent,) = [
            state
            for state in budget_states(connection, list_budgets(connection, orca.id), now)
            if state.budget.name == "previews"
        ]
        assert spent.spent_nanos + 200_000 > spent.budget.limit_nanos
        assert find_account(connection, "driftwood").status == "suspended"
    database.dispose()

    again = run_here(("demo",), {name: environment[name] for name in environment})
    assert again.exit_code == 1
