"""What ``tollgate up`` does with the database: migrate, create a first account, open the console.

``prepare`` runs in the gateway's process before it serves, because the supervisor has not imported
SQL, and because other processes start meanwhile.
"""

from __future__ import annotations

import functools
import os
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection

from gateway.accounts.accounts import list_accounts
from gateway.accounts.pepper import read_pepper
from gateway.audit_log import Author
from gateway.catalog.loader import load_catalog
from gateway.operations import accounts, credit, keys, users
from gateway.operations.accounts import AccountBody
from gateway.operations.credit import CreditBody
from gateway.operations.database import record_migration
from gateway.operations.entrance.links import (
    LINK_MINUTES,
    LinkBody,
    create_link,
    operator_has_session,
)
from gateway.operations.keys import KeyBody
from gateway.operations.users import MemberBody, UserBody
from gateway.settings import Settings
from gateway.sql.database import Database, migrate
from gateway.up.home import KEYS_FILE

STARTING_CREDIT: Final = "5"


def prepare(settings: Settings) -> None:
    """Check the catalog and migrate the database; without any account, create the first one, its
    keys and its owner. Raise ``CatalogError``, or what the database raises."""
    load_catalog(settings.catalog)
    author = Author("tollgate up", "system")
    recorded = functools.partial(record_migration, author=author)
    migrate(settings.sql_url, prepare=settings.database_prepare, migrated=recorded)
    pepper = read_pepper(settings)
    database = Database(settings.sql_url, prepare=settings.database_prepare)
    try:
        with database.transaction() as connection:
            if list_accounts(connection):
                return
            name = accounts.create(connection, author, AccountBody(name="default"))["name"]
            first = KeyBody(name="first key")
            scopes = ("inference", "read", "admin")
            operators = KeyBody(name="first admin key", scopes=scopes)
            secret = keys.create(connection, author, name, first, pepper=pepper)["secret"]
            admin = keys.create(connection, author, name, operators, pepper=pepper)["secret"]
            given = CreditBody.model_validate(
                {
                    "kind": "grant",
                    "amount": STARTING_CREDIT,
                    "reference": "starting credit",
                    "reason": "starting credit",
                }
            )
            credit.add(connection, author, name, given)
            _create_operator(connection, author, name)
            # Written before the commit: stored keys whose secrets are lost would be worse than a
            # file with keys that do not exist.
            path = settings.home / KEYS_FILE
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"TOLLGATE_API_KEY={secret}\nTOLLGATE_ADMIN_KEY={admin}\n")
    finally:
        database.dispose()


def _create_operator(connection: Connection, author: Author, account: str) -> None:
    """Create the first operator, for whom one-time links without a user are, as an owner of the
    first account: the playground is for members, and what it orders is charged to an account."""
    user = users.create(connection, author, UserBody(name="operator", role="operator"))
    owner = MemberBody(role="owner")
    users.put_member(connection, author, account, str(user["id"]), owner)


def console_link(settings: Settings) -> str | None:
    """Return a new one-time address of the console, with its code; None if an operator is in it
    already."""
    database = Database(settings.sql_url, prepare=settings.database_prepare)
    try:
        with database.transaction() as connection:
            if operator_has_session(connection, datetime.now(UTC)):
                return None
            author, pepper = Author("tollgate up", "system"), read_pepper(settings)
            made = create_link(connection, author, LinkBody(), pepper=pepper)
    finally:
        database.dispose()
    return (
        f"{settings.console_url}{made['path']}   (once, {LINK_MINUTES} minutes; or type "
        f"{made['code']} at /console/enter)"
    )
