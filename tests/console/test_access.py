"""Contents: never shown to operators without a grant of an owner, and gone when it ends."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from gateway.accounts.accounts import find_account
from gateway.accounts.roles import ROLES
from gateway.files.retention import SentOrder, StoredInput, _encode
from gateway.notices.store import list_notices
from gateway.notices.subscriptions import subscribe
from gateway.sql.database import Database
from gateway.tables.files import media
from gateway.tables.users import content_grants
from tests.console.routes import console_routes
from tests.console.seeding import Seeded, seed
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.stack import CATALOG

PROMPT = "the words that nobody else may read"
OUTPUT = "A queue holds what waits."


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    """An installation with traffic; the last request of atlas has an input that is kept."""
    directory = tmp_path_factory.mktemp("access")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    seeded = seed(database, catalog, requests=12)
    _keep(database, seeded)
    database.dispose()
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


def _keep(database: Database, seeded: Seeded) -> None:
    sent = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0.5}
    asked = StoredInput({}, order=SentOrder("echo", "text-generation", sent))
    values = {
        "request_id": seeded.requests["atlas"][-3],
        "account_id": seeded.accounts["atlas"].id,
        "task": "text-generation",
        "asked": _encode(asked),
        "clear_at": datetime.now(UTC) + timedelta(hours=1),
    }
    with database.transaction() as connection:
        connection.execute(media.insert().values(values))


def pages_with(
    texts: Sequence[str], browser: Browser, installation: Installation, seeded: Seeded
) -> dict[str, set[str]]:
    """Return, by text, the pages about every account and request that have it."""
    atlas = seeded.accounts["atlas"].id
    found: dict[str, set[str]] = {text: set() for text in texts}
    for route in console_routes(installation.client.app):
        if route.method != "GET" or "/entrance" in route.path:
            continue
        path = route.path.replace("{request_id}", seeded.requests["atlas"][-3])
        path = path.replace("{account_id}", str(atlas))
        path = re.sub(r"\{(model|name)\}", "echo", path)
        path = re.sub(r"\{[^}]*\}", "1", path)
        for address in (path, f"{path}?account=atlas"):
            page = browser.get(address).text
            for text in texts:
                if text in page:
                    found[text].add(path)
    return found


def test_contents_are_on_no_page_of_the_installation(
    filled: tuple[Installation, Seeded],
) -> None:
    installation, seeded = filled
    request = f"/console/requests/{seeded.requests['atlas'][-3]}"

    for role in (*ROLES, "owner"):
        browser = installation.visitor(role, account="atlas")
        found = pages_with((PROMPT, OUTPUT), browser, installation, seeded)

        whole = {request, f"{request}/output", f"{request}/files"}
        seen = {PROMPT: {request}, OUTPUT: whole} if role == "owner" else {}
        assert {text: paths for text, paths in found.items() if paths} == seen, role


def test_grant_gives_operators_sight_until_it_ends(filled: tuple[Installation, Seeded]) -> None:
    installation, seeded = filled
    atlas = seeded.accounts["atlas"].id
    path, access = (
        f"/console/requests/{seeded.requests['atlas'][-3]}",
        f"/console/accounts/{atlas}/access",
    )
    owner, operator = (
        installation.visitor(role, account="atlas") for role in ("owner", "operator")
    )
    given = {"hours": "8", "reason": "ticket 4711"}

    for role in ("operator", "finance", "auditor", "member", "viewer"):
        refused = installation.visitor(role, account="atlas").post(access, given)
        assert refused.status_code == 404, role
    assert owner.post(access, {"hours": "9", "reason": "x"}).status_code == 400
    assert owner.post(access, {"hours": "8", "reason": ""}).status_code == 400
    assert owner.post(access, given).status_code == 303

    page = operator.get(path).text
    assert PROMPT in page
    assert OUTPUT in page
    assert "You see what was said in <b>atlas</b>" in page
    assert "ticket 4711" in operator.get("/console/models").text
    for role in ("owner", "viewer"):
        told = installation.visitor(role, account="atlas").get("/console/home").text
        assert "Operators see what was said in <b>atlas</b>" in told
    stranger = installation.visitor("owner", account="other").get("/console/home").text
    assert "ticket 4711" not in stranger
    for role in ("finance", "auditor"):
        assert PROMPT not in installation.visitor(role).get(path).text

    late = datetime.now(UTC) - timedelta(seconds=1)
    installation.execute(update(content_grants).values(ends_at=late))
    assert PROMPT not in operator.get(path).text
    assert "ticket 4711" not in owner.get("/console/home").text

    owner.post(access, {**given, "hours": "1"})
    assert PROMPT in operator.get(path).text
    assert owner.post(f"{access}/end").status_code == 303
    assert PROMPT not in operator.get(path).text
    assert owner.post(f"{access}/end").status_code == 404
    acts = [(each.act, each.reason) for each in installation.events(subject=f"account {atlas}")]
    assert acts == [
        ("access.end", ""),
        ("access.grant", "ticket 4711"),
        ("access.grant", "ticket 4711"),
    ]
    assert "ended by user" in operator.get(access).text


def test_operators_ask_and_owners_answer(filled: tuple[Installation, Seeded]) -> None:
    installation, seeded = filled
    atlas = seeded.accounts["atlas"].id
    request_id, access = seeded.requests["atlas"][-3], f"/console/accounts/{atlas}/access"
    owner, operator = (
        installation.visitor(role, account="atlas") for role in ("owner", "operator")
    )
    with installation.database.transaction() as connection:
        subscribe(connection, atlas, "https://example.com/hook", None)
    asked = {"reason": "why was it cut?", "request": request_id}

    assert "Ask the owners to let you look" in operator.get(f"/console/requests/{request_id}").text
    assert operator.post(f"{access}/ask", {**asked, "reason": ""}).status_code == 400
    assert operator.post(f"{access}/ask", asked).headers["location"].endswith("#made")
    assert operator.post(f"{access}/ask", asked).status_code == 400

    assert "why was it cut?" in owner.get("/console/home").text
    viewer = installation.visitor("viewer", account="atlas")
    assert "why was it cut?" not in viewer.get("/console/home").text
    with installation.database.transaction() as connection:
        (told,) = list_notices(
            connection, account_id=atlas, kind="access.asked", limit=9, before=None
        )
    assert told.data["request_id"] == request_id
    assert owner.post(f"{access}/decline").status_code == 303
    assert "why was it cut?" not in owner.get("/console/home").text
    assert PROMPT not in operator.get(f"/console/requests/{request_id}").text


def test_grants_over_http_are_for_owners(filled: tuple[Installation, Seeded]) -> None:
    installation, _ = filled
    secret, _ = installation.key()
    http, headers = installation.client, {"Authorization": f"Bearer {secret}"}
    body = {"hours": 1, "reason": "ticket"}

    refused = http.post("/v1/content-grants", json=body, headers=headers)

    assert refused.status_code == 403
    assert http.get("/v1/content-grants", headers=headers).json()["data"] == []
    assert http.get("/v1/account", headers=headers).json()["keep_inputs"] is False
    assert http.patch("/v1/account", json={"keep_inputs": True}, headers=headers).status_code == 403


def test_owner_decides_whether_inputs_are_kept(filled: tuple[Installation, Seeded]) -> None:
    installation, seeded = filled
    atlas = seeded.accounts["atlas"].id
    owner, path = (
        installation.visitor("owner", account="atlas"),
        f"/console/accounts/{atlas}/access/inputs",
    )

    for role in ("operator", "member"):
        other = installation.visitor(role, account="atlas")
        assert other.post(path, {"keep": "yes"}).status_code == 404
    assert owner.post(path, {"keep": "yes"}).status_code == 303

    with installation.database.transaction() as connection:
        assert find_account(connection, atlas).keep_inputs
    (event,) = installation.events(act="account.change", account_id=atlas)
    assert event.after == {"keep_inputs": True}
    assert "Stop keeping inputs" in owner.get(f"/console/accounts/{atlas}/access").text
