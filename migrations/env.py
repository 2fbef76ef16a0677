"""Alembic's entry point: migrates the caller's database, or the one in the settings."""

from __future__ import annotations

from alembic import context

from gateway.settings import Settings
from gateway.sql.database import open_engine
from gateway.sql.lanes import MIGRATE
from gateway.tables.core import metadata


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        context.configure(connection=connection, target_metadata=metadata)
        with context.begin_transaction():
            context.run_migrations()
        return
    settings = Settings()
    engine = open_engine(settings.sql_url, lane=MIGRATE, prepare=settings.database_prepare)
    with engine.connect() as own:
        context.configure(
            connection=own,
            target_metadata=metadata,
            render_as_batch=True,
            transaction_per_migration=True,
        )
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


run()
