"""Run by Alembic: applies the versions to the database of the caller, or of the settings."""

from __future__ import annotations

from alembic import context

import gateway.batches.tables
import gateway.media.tables
import gateway.voices.tables
import gateway.workflows.tables  # noqa: F401 -- their tables belong to the metadata
from gateway.database import open_engine
from gateway.settings import Settings
from gateway.tables import metadata


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        context.configure(connection=connection, target_metadata=metadata)
        with context.begin_transaction():
            context.run_migrations()
        return
    engine = open_engine(Settings().sql_url, pool_size=1)
    with engine.begin() as own:
        context.configure(connection=own, target_metadata=metadata, render_as_batch=True)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


run()
