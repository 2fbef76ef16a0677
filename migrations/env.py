"""Run by Alembic: applies the versions to the database of the caller, or of the settings."""

from __future__ import annotations

from alembic import context

import gateway.aside
import gateway.batches.tables
import gateway.ledger.tables
import gateway.media.tables
import gateway.payments.tables
import gateway.requests.tables
import gateway.voices.tables
import gateway.workflows.tables  # noqa: F401 -- their tables belong to the metadata
from gateway.database import open_engine
from gateway.lanes import MIGRATE
from gateway.settings import Settings
from gateway.tables import metadata


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        context.configure(connection=connection, target_metadata=metadata)
        with context.begin_transaction():
            context.run_migrations()
        return
    settings = Settings()
    engine = open_engine(settings.sql_url, lane=MIGRATE, prepare=settings.database_prepare)
    with engine.begin() as own:
        context.configure(connection=own, target_metadata=metadata, render_as_batch=True)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


run()
