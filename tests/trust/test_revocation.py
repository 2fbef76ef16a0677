"""A revoked key is refused immediately, on every route and in every gateway."""

from __future__ import annotations

import re
from typing import Any

import pytest
from litestar import Litestar
from litestar.routes import HTTPRoute

from gateway.accounts.key_uses import KeyUses
from gateway.accounts.keys import authenticate, create_key, hash_secret, revoke_key
from gateway.api.http.access import UNKNOWN_S, Access, Recent
from gateway.app import create_app
from gateway.errors import Unauthorized
from gateway.settings import Settings
from gateway.sql.database import Database
from tests.ledger.books import PEPPER, open_books
from tests.stack import Caller, Stack, chat, order

HELLO = chat("echo", "hello")


def handlers(stack: Stack) -> list[tuple[str, str, dict[str, Any]]]:
    """Every method and path of the gateway, with its handler's options."""
    app: Litestar = create_app(
        Settings(
            home=stack.directory,
            catalog=stack.catalog,
            database_url=stack.database_url,
            redis_url=stack.redis_url,
        )
    )
    return [
        (method, re.sub(r"\{[^}]*\}", "x1", numbered), dict(handler.opt))
        for route in app.routes
        if isinstance(route, HTTPRoute) and (numbered := re.sub(r"\{[^}]*:int\}", "1", route.path))
        for handler in route.route_handlers
        for method in handler.http_methods
        if method not in ("OPTIONS", "HEAD")
    ]


def revoke(stack: Stack, caller: Caller) -> None:
    """As another gateway does: this one hears of it from SQL alone."""
    database = Database(stack.database_url)
    with database.transaction() as connection:
        revoke_key(connection, str(caller.key_id))
    database.engine.dispose()


def test_revoked_key_is_refused_at_once_on_every_route(stack: Stack) -> None:
    caller = stack.caller(scopes=("inference", "read", "admin"))
    open_request = order(caller, "slow", "hello")
    # The gateway has read the key, and remembers it for the routes that end in a hold.
    assert caller.http.post("/v1/chat/completions", json=HELLO).is_success
    routes = [each for each in handlers(stack) if each[2].get("scope") is not None]

    revoke(stack, caller)
    allowed = [
        f"{method} {path} {answer.status_code}"
        for method, path, opt in routes
        if not opt.get("holds")
        and (answer := caller.http.request(method, path.replace("x1", open_request), json={}))
        .status_code
        != 401
    ]  # fmt: skip

    assert allowed == []
    assert len(routes) > 80


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO),
        ("/v1/responses", {"model": "echo", "input": "hello"}),
        ("/v1/requests", {"model": "echo", "input": {"messages": HELLO["messages"]}}),
    ],
)
def test_remembered_key_that_was_revoked_holds_nothing(
    path: str, body: dict[str, Any], stack: Stack
) -> None:
    caller = stack.caller()
    assert caller.http.post(path, json=body).is_success

    revoke(stack, caller)
    answer = caller.http.post(path, json=body)

    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "key_revoked"


def test_only_routes_that_end_in_a_hold_remember_keys(stack: Stack) -> None:
    remembering = {path for _, path, opt in handlers(stack) if opt.get("holds")}

    assert remembering == {
        "/v1/chat/completions",
        "/api/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/api/v1/embeddings",
        "/v1/responses",
        "/v1/requests",
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/images/variations",
        "/v1/videos",
        "/v1/videos/x1/remix",
        "/v1/videos/edits",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/rerank",
        "/api/v1/ie/requestqueue/apikey/requests",
        "/elevenlabs/v1/text-to-speech/x1",
        "/elevenlabs/v1/text-to-speech/x1/stream",
        "/elevenlabs/v1/text-to-speech/x1/with-timestamps",
        "/elevenlabs/v1/text-to-speech/x1/stream/with-timestamps",
        "/elevenlabs/v1/music",
        "/elevenlabs/v1/music/stream",
    }


# --- What is remembered ---------------------------------------------------------------------------


class Counting:
    """A database that counts its reads."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.reads = 0

    async def read(self, function: Any) -> Any:
        self.reads += 1
        return await self.database.read(function)


async def test_unknown_secret_is_asked_for_once_and_a_new_key_works_at_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = open_books(database, credit=0)
    counting = Counting(database)
    access = Access(counting, pepper=PEPPER, uses=KeyUses(database))  # type: ignore[arg-type]  # counts, otherwise the same
    for _ in range(20):
        with pytest.raises(Unauthorized, match="Unknown API key"):
            await access.key("tg_unknown", remembered=True)
    reads = counting.reads
    with database.transaction() as connection:
        secret, _ = create_key(connection, books.account.id, pepper=PEPPER)

    assert (await access.key(secret, remembered=True)).account_id == books.account.id
    assert reads == 1

    with database.transaction() as connection:
        revoke_key(connection, secret[:10])
        with pytest.raises(Unauthorized, match="revoked"):
            authenticate(connection, secret, PEPPER)
    for _ in range(2):
        with pytest.raises(Unauthorized, match="revoked"):
            await access.key(secret, remembered=False)
    await database.close()


def test_least_recently_used_is_dropped_first() -> None:
    recent = Recent[int](UNKNOWN_S, 2)
    one, two, three = (hash_secret(name, PEPPER) for name in ("one", "two", "three"))

    recent.put(one, 1, 0.0)
    recent.put(two, 2, 0.0)
    assert recent.get(one, 1.0) == 1
    recent.put(three, 3, 1.0)

    assert [recent.get(name, 1.0) for name in (one, two, three)] == [1, None, 3]
    assert recent.get(one, UNKNOWN_S) is None
