"""A key that is limited to models uses and sees only these, in each dialect."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stack import Caller, Stack, chat, wait_for

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("POST", chat("slow", "a")),
    "/api/v1/chat/completions": ("POST", chat("slow", "a")),
    "/v1/completions": ("POST", {"model": "slow", "prompt": "a"}),
    "/v1/responses": ("POST", {"model": "slow", "input": "a"}),
    "/v1/requests": ("POST", {"model": "slow", "input": {"prompt": "a"}}),
    "/v1/quote": ("POST", {"model": "slow", "input": {"prompt": "a"}}),
    "/v1/videos": ("POST", {"model": "Veo3", "prompt": "a"}),
    "/v1/models/slow": ("GET", {}),
    "/v1/catalog/slow": ("GET", {}),
    "/api/v1/ie/requestqueue/apikey/requests": ("POST", {"model": "Veo3", "payload": {}}),
}


@pytest.fixture
def limited(stack: Stack) -> Caller:
    return stack.caller(models=["echo"])


@pytest.mark.parametrize("path", CALLS)
def test_other_models_are_refused(limited: Caller, path: str) -> None:
    method, body = CALLS[path]

    answer = limited.http.request(method, path, json=body or None)

    assert answer.status_code == 403, answer.text
    assert "may not use the model" in answer.text
    assert "only echo" in answer.text


def test_its_own_model_is_served(limited: Caller) -> None:
    answer = limited.http.post("/v1/chat/completions", json=chat("echo", "hello"))

    assert answer.status_code == 200, answer.text
    assert limited.http.get("/v1/models/echo").status_code == 200


def test_lists_have_only_its_models(limited: Caller) -> None:
    for path in ("/v1/models", "/api/v1/models"):
        assert [one["id"] for one in limited.http.get(path).json()["data"]] == ["echo"]
    names = [one["name"] for one in limited.http.get("/v1/catalog").json()["data"]]
    assert names == ["echo"]
    queue = "/api/v1/ie/requestqueue/apikey/models"
    assert limited.http.get(queue).json()["model_ids"] == []


def test_change_is_in_force_within_ten_seconds(stack: Stack) -> None:
    admin = stack.caller(credit="0", scopes=("admin",))
    caller = stack.caller()
    assert caller.http.post("/v1/chat/completions", json=chat("echo", "a")).is_success

    changed = admin.http.patch(f"/v1/admin/keys/{caller.key_id}", json={"models": ["slow"]})

    assert changed.json()["models"] == ["slow"]
    wait_for(
        lambda: caller.http.post("/v1/chat/completions", json=chat("echo", "a")).status_code == 403,
        "the change",
        patience_s=15,
    )


def test_last_use_is_shown(stack: Stack) -> None:
    caller = stack.caller()
    caller.http.get("/v1/models").raise_for_status()

    wait_for(
        lambda: caller.http.get("/v1/keys/self").json()["last_used_at"] is not None, "the last use"
    )


def test_keys_are_listed_in_pages(stack: Stack) -> None:
    admin = stack.caller(credit="0", scopes=("admin",))
    owner = str(admin.account_id)
    for _ in range(2):
        made = admin.http.post(f"/v1/admin/accounts/{owner}/keys", json={"name": "ci"})
        assert made.status_code == 201

    first = admin.http.get("/v1/admin/keys", params={"account": owner, "limit": 2}).json()
    rest = admin.http.get(
        "/v1/admin/keys",
        params={"account": owner, "limit": 2, "cursor": first["next_cursor"]},
    ).json()

    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert [key["name"] for key in first["data"] + rest["data"]] == ["", "ci", "ci"]
    named = admin.http.get("/v1/admin/keys", params={"account": owner, "name": "c"}).json()
    assert len(named["data"]) == 2
