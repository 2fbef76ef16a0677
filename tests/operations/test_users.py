"""Users and members, roles of keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
from sqlalchemy.exc import DBAPIError

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.accounts.roles import ACT_AREAS, AREAS, ROLES, Area, check_role, may
from gateway.audit_log import ACTS, AuditFilter, Author, list_events
from gateway.errors import Conflict, Forbidden, InvalidRequest, NotFound
from gateway.operations import keys, users
from gateway.operations.keys import KeyBody, RotationBody
from gateway.operations.users import MemberBody, UserBody, UserChange
from gateway.sql.database import Database, migrate, open_engine
from gateway.tables.core import keys as keys_table
from tests.databases import file_of_version
from tests.ledger.books import PEPPER

OPERATOR = Author("ann", "cli")


def create(database: Database, **values: Any) -> users.UserView:
    with database.transaction() as connection:
        return users.create(connection, OPERATOR, UserBody.model_validate(values))


def change(database: Database, user: str, **values: Any) -> users.UserView:
    with database.transaction() as connection:
        return users.change(connection, OPERATOR, user, UserChange.model_validate(values))


def test_user_is_found_by_email_in_any_case_and_by_number(database: Database) -> None:
    made = create(database, name="Ann", email="Ann@Example.com", role="finance")

    assert made["email"] == "ann@example.com"
    assert change(database, "ANN@example.com", role=None)["role"] is None
    assert change(database, str(made["id"]), status="disabled")["status"] == "disabled"
    with pytest.raises(NotFound, match="nknown user"):
        change(database, "bob@example.com", name="Bob")


def test_email_belongs_to_one_user(database: Database) -> None:
    create(database, name="Ann", email="ann@example.com")
    bob = create(database, name="Bob")

    with pytest.raises(Conflict, match="is that of user"):
        create(database, name="Ann", email="ANN@example.com")
    with pytest.raises(Conflict, match="is that of user"):
        change(database, str(bob["id"]), email="ann@example.com")
    assert change(database, "ann@example.com", email="ann@example.com")["name"] == "Ann"


def test_email_is_given_once_in_a_race(database: Database) -> None:
    def try_to_create(number: int) -> str:
        try:
            return create(database, name=f"Ann {number}", email="ann@example.com")["name"]
        except Conflict as error:
            return error.code

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(try_to_create, range(8)))

    assert len([each for each in answers if each.startswith("Ann")]) == 1, answers
    assert len(set(answers)) == 2, answers


@pytest.mark.parametrize("email", ["ann", "@example.com", "ann@", "a b@example.com", "a@b@c"])
def test_texts_that_are_no_addresses_are_refused(database: Database, email: str) -> None:
    with pytest.raises(InvalidRequest, match="not a valid email"):
        create(database, name="Ann", email=email)


def test_membership_is_set_changed_and_removed(database: Database) -> None:
    create(database, name="Ann", email="ann@example.com")
    with database.transaction() as connection:
        acme = create_account(connection, "acme")
        create_account(connection, "other")
        for role in ("viewer", "owner"):
            body = MemberBody.model_validate({"role": role})
            users.put_member(connection, OPERATOR, "acme", "ann@example.com", body)
        users.put_member(
            connection, OPERATOR, "other", "ann@example.com", MemberBody(role="member")
        )

    with database.transaction() as connection:
        members = users.members_of(connection, "acme")
        page, _ = users.list_page(connection, role=None, status=None, limit=9, cursor=None)
        users.end_member(connection, OPERATOR, "acme", "ann@example.com")
        assert users.members_of(connection, "acme") == []
        with pytest.raises(NotFound, match="not a member"):
            users.end_member(connection, OPERATOR, "acme", "ann@example.com")
        found = list_events(connection, AuditFilter(account_id=acme.id), limit=9)
    assert [(one["email"], one["role"]) for one in members] == [("ann@example.com", "owner")]
    assert [one["role"] for one in page[0]["memberships"]] == ["owner", "member"]
    assert [(event.act, event.before and event.before.get("role")) for event in found] == [
        ("member.remove", "owner"),
        ("member.set", "viewer"),
        ("member.set", None),
    ]


def test_users_are_listed_in_pages_by_role_and_status(database: Database) -> None:
    for role in (*ROLES, None):
        create(database, name=role or "nobody", role=role)

    with database.snapshot() as connection:
        first, cursor = users.list_page(connection, role=None, status=None, limit=3, cursor=None)
        rest, end = users.list_page(connection, role=None, status=None, limit=3, cursor=cursor)
        auditors, _ = users.list_page(
            connection, role="auditor", status="active", limit=3, cursor=None
        )
    assert [one["name"] for one in first + rest] == [*ROLES, "nobody"]
    assert end is None
    assert [one["name"] for one in auditors] == ["auditor"]


def test_sql_refuses_unknown_roles(database: Database) -> None:
    with database.transaction() as connection:
        account = create_account(connection, "acme")
        create_key(connection, account.id, pepper=PEPPER)

    with pytest.raises(DBAPIError), database.transaction() as connection:
        connection.execute(keys_table.update().values(role="king"))


def test_administrators_key_has_a_role_and_rotation_keeps_it(database: Database) -> None:
    with database.transaction() as connection:
        account = str(create_account(connection, "acme").id)

        def made(**values: Any) -> keys.NewKeyView:
            body = KeyBody.model_validate(values)
            return keys.create(connection, OPERATOR, account, body, pepper=PEPPER)

        usual, auditor = made(scopes=["admin"]), made(scopes=["admin"], role="auditor")
        client = made()
        rotated = keys.rotate(
            connection, OPERATOR, str(auditor["id"]), RotationBody(), pepper=PEPPER
        )
        with pytest.raises(InvalidRequest, match="Only keys with the scope admin"):
            made(role="auditor")

    roles = [one["role"] for one in (usual, auditor, client, rotated)]
    assert roles == ["operator", "auditor", None, "auditor"]


def test_keys_of_administrators_before_roles_are_operators(tmp_path: Path) -> None:
    url = file_of_version(tmp_path / "old.db", "0017")
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO accounts (id, name, kind, created_at) VALUES (4, 'old', 'customer', 0)"
        )
        for id, scopes in ((1, '["inference", "read"]'), (2, '["admin", "read"]')):
            connection.exec_driver_sql(
                "INSERT INTO keys (id, account_id, prefix, secret_hash, scopes, created_at) "
                f"VALUES ({id}, 4, 'tg_x', x'0{id}', '{scopes}', 0)"
            )
    engine.dispose()

    migrate(url)

    engine = open_engine(url)
    with engine.begin() as connection:
        rows = connection.exec_driver_sql("SELECT role FROM keys ORDER BY id").scalars().all()
    engine.dispose()
    assert rows == [None, "operator"]


def test_every_area_has_rights_and_every_act_an_area() -> None:
    assert AREAS.keys() == set(get_args(Area))
    assert {act.partition(".")[0] for act in ACTS} == ACT_AREAS.keys()
    for rights in AREAS.values():
        assert rights.keys() == set(ROLES)
        # Auditors read everything and change nothing; operators are never below others.
        assert rights["auditor"] == "read"
        assert rights["operator"] in ("read", "write")


def test_refusal_names_the_roles_that_may() -> None:
    assert may("finance", "credit", write=True)
    with pytest.raises(Forbidden, match=r"finance may not read this \(keys\); allowed"):
        check_role("finance", "keys", write=False)
