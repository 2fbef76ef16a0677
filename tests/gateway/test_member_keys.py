"""Keys of members: each route of an account has a least role, and a member who leaves is out."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from gateway.accounts.roles import MEMBER_ROLES, MemberRole, least_role
from gateway.app import create_app
from gateway.settings import Settings
from tests.stack import Stack, chat

OWNERS = {
    *("CreateVoiceConsent", "UpdateVoiceConsent", "DeleteVoiceConsent"),
    *("CreateVoice", "DeleteVoice", "ElevenLabsAddVoice", "ElevenLabsDeleteVoice"),
    *("DeleteFile", "RedeliverWebhook", "GetWebhookSecret", "CreatePayment"),
    *("CreateOwnKey", "ChangeOwnKey", "RotateOwnKey", "RevokeOwnKey"),
    *("AddOwnSubscription", "ConfirmOwnSubscription", "RemoveOwnSubscription"),
    *("CreateKeyBudget", "ChangeKeyBudget", "EndKeyBudget"),
    *("ChangeOwnAccount", "GrantContents", "EndContentGrant"),
}
VIEWERS_THAT_POST = {"CreateQuote"}


def account_routes(tmp_path: Path) -> Iterator[tuple[str, str, HTTPRouteHandler]]:
    """Yield path, method and handler of each route that needs a key of an account."""
    for route in create_app(Settings(home=tmp_path)).routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                if handler.opt.get("scope") in ("inference", "read"):
                    for method in handler.http_methods - {"OPTIONS", "HEAD"}:
                        yield route.path_format, str(method), handler


def least_of(handler: HTTPRouteHandler) -> MemberRole:
    return least_role(handler.opt["scope"], handler.opt.get("least"))


class Team:
    """An account with a user and a key for each role, and an operator."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.admin = stack.caller(credit="0", scopes=("admin",)).http
        self.account = stack.caller()
        self.path = f"/v1/admin/accounts/{self.account.account_id}"
        self.emails: dict[str, str] = {}
        self.http: dict[str, httpx.Client] = {}
        for role in MEMBER_ROLES:
            email = self.emails[role] = f"{role}-{uuid.uuid4().hex[:8]}@example.com"
            self.call("POST", "/v1/admin/users", {"name": role, "email": email})
            self.call("PUT", f"{self.path}/members/{email}", {"role": role})
            made = self.call("POST", f"{self.path}/keys", {"user": email})
            assert made["member_role"] == role
            self.http[role] = self.client(made["secret"])

    def client(self, secret: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {secret}"}
        made = httpx.Client(base_url=self.stack.url, headers=headers, timeout=40)
        self.stack.clients.append(made)
        return made

    def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.admin.request(method, path, json=body)
        assert answer.is_success, answer.text
        return answer.json()


def ask(http: httpx.Client) -> httpx.Response:
    return http.post("/v1/chat/completions", json=chat("echo", "a", max_tokens=5))


def refused(answer: httpx.Response) -> bool:
    # Not every dialect has a place for the code.
    return answer.status_code == 403 and "of this key's member may not do this" in answer.text


def test_every_route_of_an_account_has_the_least_role_of_the_page(tmp_path: Path) -> None:
    routes = list(account_routes(tmp_path))

    names = {handler.operation_id for _, _, handler in routes if least_of(handler) == "owner"}
    assert names == OWNERS
    for path, method, handler in routes:
        if least_of(handler) == "viewer":
            reads = method == "GET" or handler.operation_id in VIEWERS_THAT_POST
            assert reads, f"a viewer could change something by {method} {path}"


@pytest.mark.parametrize("role", MEMBER_ROLES)
def test_every_route_refuses_keys_with_less_than_its_role(
    stack: Stack, tmp_path: Path, role: MemberRole
) -> None:
    http = Team(stack).http[role]

    for template, method, handler in account_routes(tmp_path):
        path = re.sub(r"\{[^}]*\}", "999999999", template)
        # Bodies are read after the role is checked; large uploads are not needed to see that.
        answer = http.request(
            method, path, headers={"xi-api-key": http.headers["authorization"][7:]}
        )
        allowed = MEMBER_ROLES.index(role) <= MEMBER_ROLES.index(least_of(handler))
        assert refused(answer) != allowed, f"{role} {method} {path}: {answer.text}"


def test_removed_member_is_out_at_once_and_a_changed_role_holds(stack: Stack) -> None:
    team = Team(stack)
    member, viewer, owner = (team.http[role] for role in ("member", "viewer", "owner"))
    # Remembered by the gateway, which would not ask again for some seconds.
    assert ask(member).is_success
    assert ask(owner).is_success
    refusal = ask(viewer)
    assert refused(refusal)
    assert "The role viewer of this key's member" in refusal.json()["error"]["message"]

    team.call("DELETE", f"{team.path}/members/{team.emails['member']}")
    team.call("PATCH", f"/v1/admin/users/{team.emails['owner']}", {"status": "disabled"})
    team.call("PUT", f"{team.path}/members/{team.emails['viewer']}", {"role": "owner"})

    for http in (member, owner):
        for answer in (ask(http), http.get("/v1/balance")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "key_revoked")
    assert viewer.get("/v1/keys/self").json()["member_role"] == "owner"
    answer = team.admin.post(f"{team.path}/keys", json={"user": team.emails["member"]})
    assert (answer.status_code, "not a member" in answer.text) == (400, True)


def test_owner_manages_the_keys_of_the_own_account_and_their_budgets(stack: Stack) -> None:
    team, stranger = Team(stack), stack.caller()
    owner = team.http["owner"]

    made = owner.post("/v1/keys", json={"name": "ci", "user": team.emails["member"]}).json()
    budget = owner.post("/v1/budgets", json={"key": made["id"], "limit": "0", "window": "day"})

    assert (made["member_role"], budget.status_code) == ("member", 201)
    assert ask(team.client(made["secret"])).json()["error"]["code"] == "budget_exceeded"
    path = f"/v1/budgets/{budget.json()['id']}"
    assert owner.patch(path, json={"limit": "1"}).json()["limit"] == "1"
    assert ask(team.client(made["secret"])).is_success
    assert owner.delete(path).is_success
    changed = owner.patch(f"/v1/keys/{made['prefix']}", json={"name": "new"}).json()
    assert changed["name"] == "new"
    rotated = owner.post(f"/v1/keys/{made['id']}/rotate", json={"overlap_s": 0}).json()
    assert (rotated["user_id"], rotated["member_role"]) == (made["user_id"], "member")
    assert owner.delete(f"/v1/keys/{rotated['id']}").json()["status"] == "revoked"
    names = [each["name"] for each in team.http["viewer"].get("/v1/keys").json()["data"]]
    assert names.count("new") == 2
    # Neither other accounts' keys and budgets, nor those that the operator set for the account.
    team.call(
        "POST",
        "/v1/admin/budgets",
        {"account": str(team.account.account_id), "limit": "9", "window": "day"},
    )
    (whole,) = owner.get("/v1/budgets").json()["data"]
    for answer in (
        owner.delete(f"/v1/keys/{stranger.key_id}"),
        owner.post("/v1/budgets", json={"key": stranger.key_id, "limit": "1", "window": "day"}),
        owner.delete(f"/v1/budgets/{whole['id']}"),
    ):
        assert answer.status_code == 404, answer.text
    assert owner.post("/v1/keys", json={"scopes": ["admin"]}).status_code == 400
    # Keys without a member stay as they are: they manage no keys.
    closed = team.account.http.post("/v1/keys", json={})
    assert (closed.status_code, closed.json()["error"]["code"]) == (403, "role_not_allowed")
    assert ask(team.account.http).is_success
