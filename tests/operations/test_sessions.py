"""Sessions and one-time links in SQL, on both databases, and used by several at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from sqlalchemy import update

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.accounts.sessions import Origin
from gateway.accounts.users import create_user
from gateway.audit_log import AuditFilter, Author, list_events
from gateway.operations.entrance import sessions
from gateway.operations.entrance.links import LinkBody, create_link, operator_has_session
from gateway.operations.entrance.sessions import Credential, Entered, Entrance
from gateway.operations.keys import console_key
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.tables.users import sessions as table
from tests.ledger.books import PEPPER

AUTHOR = Author("test", "cli")
LIMITS = sessions.session_limits(Settings())
ENTRANCE = Entrance(Origin("192.0.2.0/24", "browser"), False, LIMITS, PEPPER)


def enter(database: Database, credential: Credential) -> Entered | None:
    with database.transaction() as connection:
        return sessions.enter(connection, credential, entrance=ENTRANCE)


def test_link_is_used_once_by_many_at_a_time(database: Database) -> None:
    with database.transaction() as connection:
        link = create_link(connection, AUTHOR, LinkBody(), pepper=PEPPER)
        again = create_link(connection, AUTHOR, LinkBody(), pepper=PEPPER)
    secret = link["path"].partition("#")[2]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: enter(database, Credential("link", secret)), range(4)))

    assert len([each for each in found if each is not None]) == 1
    assert again["user_id"] == link["user_id"]
    with database.transaction() as connection:
        assert operator_has_session(connection, datetime.now(UTC))
        refused = list_events(connection, AuditFilter(act="session.refuse"), limit=9)
    assert len(refused) == 3


def test_sessions_are_listed_until_they_are_idle_or_ended(database: Database) -> None:
    now = datetime.now(UTC)
    with database.transaction() as connection:
        account = create_account(connection, "acme")
        secret, key = create_key(connection, account.id, pepper=PEPPER)
        ann = create_user(connection, "Ann", role="operator").id
        code = create_link(connection, AUTHOR, LinkBody(user=ann), pepper=PEPPER)["code"]
    by_key = enter(database, Credential("key", secret))
    by_code = enter(database, Credential("code", code))
    assert by_key is not None
    assert by_code is not None

    def names() -> list[str]:
        with database.snapshot() as connection:
            found, _ = sessions.all_sessions(connection, limits=LIMITS, limit=9, cursor=None)
        return [each.name for each in found]

    assert names() == ["Ann", key.prefix]
    with database.transaction() as connection:
        idle = now - timedelta(minutes=31)
        connection.execute(update(table).values(seen_at=idle))
    assert names() == [key.prefix]
    with database.transaction() as connection:
        found = sessions.resume(connection, by_key.token, limits=LIMITS, pepper=PEPPER)
        assert found is not None
        assert found.identity.memberships[account.id].role == "member"
        token = sessions.prove(connection, found, Credential("key", secret), entrance=ENTRANCE)
        assert token is not None
        assert sessions.resume(connection, by_key.token, limits=LIMITS, pepper=PEPPER) is None
        sessions.leave(connection, found)
    assert names() == []


def test_key_of_the_console_is_made_once_by_many_at_a_time(database: Database) -> None:
    with database.transaction() as connection:
        account = create_account(connection, "acme")

    def find(_: int) -> int:
        with database.transaction() as connection:
            return console_key(
                connection, AUTHOR, account.id, spend_limit_nanos=5, pepper=PEPPER
            ).id

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(find, range(4)))) == 1
