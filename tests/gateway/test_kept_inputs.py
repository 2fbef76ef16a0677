"""Inputs are kept beside outputs if the account wants it: every field, as long as the output."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from gateway.accounts.accounts import change_account
from gateway.sql.database import Database
from gateway.tables.files import media
from tests.stack import Caller, Stack, chat, ended

MESSAGES = [
    {"role": "system", "content": "You are asked to be brief."},
    {"role": "user", "content": "What is a hold?"},
]


def keeping(stack: Stack) -> Caller:
    """Return a caller whose account keeps inputs."""
    caller = stack.caller()
    database = Database(stack.database_url)
    with database.transaction() as connection:
        change_account(connection, caller.account_id, keep_inputs=True)
    database.dispose()
    return caller


def kept(caller: Caller, request_id: str) -> Any:
    return caller.http.get(f"/v1/requests/{request_id}/input")


def test_chat_is_kept_with_every_field_that_was_sent(stack: Stack) -> None:
    caller = keeping(stack)
    sent = {"messages": MESSAGES, "temperature": 0.25, "max_tokens": 7, "stop": ["x"], "seed": 3}
    placed = caller.http.post("/v1/requests", json={"model": "echo", "input": sent}).json()
    ended(caller, placed["id"])
    answered = caller.http.post("/v1/chat/completions", json=chat("echo", "by chat", top_p=0.5))
    request_id = answered.headers["x-request-id"]

    native, spoken = kept(caller, placed["id"]).json(), kept(caller, request_id).json()

    assert (native["model"], native["task"], native["input"]) == ("echo", "text-generation", sent)
    assert spoken["input"]["messages"] == [{"role": "user", "content": "by chat"}]
    assert spoken["input"]["top_p"] == 0.5
    again = caller.http.post("/v1/requests", json={"model": "echo", "input": native["input"]})
    assert again.status_code == 202
    assert kept(stack.caller(), placed["id"]).status_code == 404


def test_large_input_outlives_its_place_in_the_queue(stack: Stack) -> None:
    caller = keeping(stack)
    words = "word " * 12_000
    answered = caller.http.post("/v1/chat/completions", json=chat("echo", words, max_tokens=1))
    assert answered.status_code == 200, answered.text

    found = kept(caller, answered.headers["x-request-id"]).json()

    assert found["input"]["messages"][0]["content"] == words


def test_nothing_is_kept_without_being_asked_for(stack: Stack) -> None:
    caller = stack.caller()
    answered = caller.http.post("/v1/chat/completions", json=chat("echo", "not kept"))

    found = kept(caller, answered.headers["x-request-id"])

    assert found.status_code == 404
    assert found.json()["error"]["code"] == "input_not_kept"
    database = Database(stack.database_url)
    with database.transaction() as connection:
        mine = select(media.c.request_id).where(media.c.account_id == caller.account_id)
        assert connection.execute(mine).all() == []
    database.dispose()


async def test_kept_input_is_erased_with_its_request(stack: Stack) -> None:
    caller = keeping(stack)
    answered = caller.http.post("/v1/chat/completions", json=chat("echo", "forget this"))
    request_id = answered.headers["x-request-id"]
    assert kept(caller, request_id).status_code == 200

    erased = stack.caller(scopes=["admin"]).http.post(
        "/v1/admin/erasures", json={"request": request_id}
    )

    assert erased.status_code == 200, erased.text
    assert kept(caller, request_id).status_code == 404
