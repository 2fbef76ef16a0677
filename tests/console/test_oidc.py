"""Entering through a provider of OpenID Connect that runs here, and the logouts it announces."""

from __future__ import annotations

import re
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey
from pydantic import ValidationError
from sqlalchemy import select, update
from werkzeug.serving import make_server

from gateway.accounts.users import create_user
from gateway.console.entrance.logins import LoginFailed
from gateway.console.entrance.oidc import FAILED, NO_GROUP
from gateway.console.entrance.provider import LOGOUT_EVENT, IdentityProvider, Login
from gateway.operations.entrance.providers import granted
from gateway.settings import Settings
from gateway.tables.users import members, sessions, users
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import flask
    from oidc_provider_mock import app as provider_app
    from oidc_provider_mock._storage import storage

# The provider uses parts of authlib that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROLES = (
    '{"ops": "operator", "money": "finance", "devs": "account:acme:member",'
    ' "leads": "account:acme:owner", "gone": "account:nobody:viewer"}'
)


@dataclass
class Idp:
    """The provider."""

    url: str

    def person(self, **claims: Any) -> str:
        sub = f"person-{uuid.uuid4().hex[:8]}"
        self.change(sub, **claims)
        return sub

    def change(self, sub: str, **claims: Any) -> None:
        httpx.put(f"{self.url}/users/{sub}", json=claims).raise_for_status()

    def sign(self, **claims: Any) -> str:
        key = RSAKey.import_key(httpx.get(f"{self.url}/test/key").json())
        return jwt.encode({"alg": "RS256", "kid": key.kid}, claims, key)

    def logout_token(self, **claims: Any) -> str:
        now = int(time.time())
        return self.sign(
            **{"iss": self.url, "aud": "console", "iat": now, "exp": now + 60, "jti": "1",
               "events": {LOGOUT_EVENT: {}}, **claims}
        )  # fmt: skip


@pytest.fixture(scope="module")
def idp() -> Iterator[Idp]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        app = provider_app(require_nonce=True)

        @app.get("/test/key")
        def key() -> Any:
            return flask.jsonify(storage.jwk.as_dict(is_private=True))

        server = make_server("localhost", 0, app, threaded=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield Idp(f"http://localhost:{server.server_port}")
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def company(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str, idp: Idp
) -> Iterator[Installation]:
    directory = tmp_path_factory.mktemp("company")
    url = Databases("sqlite", directory, postgres).make()
    oidc = {
        "oidc_issuer": idp.url, "oidc_client_id": "console", "oidc_client_secret": "secret",
        "oidc_roles": ROLES,
    }  # fmt: skip
    with installed(directory / "home", url, valkey, **oidc) as made:
        yield made


@pytest.fixture(autouse=True)
def _new_network(company: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = company.client.app.state.services.attempts
    monkeypatch.setattr(attempts, "_namespace", f"{attempts._namespace}-{id(monkeypatch)}")


def log_in(browser: Browser, sub: str, path: str = "/console/enter/oidc") -> httpx.Response:
    """Follow the redirects through the provider, where a person logs in."""
    away = browser.get(path)
    assert away.status_code == 303, away.text
    answer = httpx.post(away.headers["location"], data={"sub": sub})
    back = urlsplit(answer.headers["location"])
    return browser.get(f"{back.path}?{back.query}")


def user(company: Installation, sub: str) -> Any:
    return company.execute(select(users).where(users.c.subject == sub)).one()


def test_person_enters_with_the_roles_of_the_groups(company: Installation, idp: Idp) -> None:
    sub = idp.person(name="Ann", groups=["money", "devs", "leads", "other"])
    browser = company.browser()

    answer = log_in(browser, sub, "/console/enter/oidc?next=/console/sessions")

    assert (answer.status_code, answer.headers["location"]) == (303, "/console/sessions")
    assert browser.inside
    made = user(company, sub)
    assert (made.name, made.role, made.issuer) == ("Ann", "finance", idp.url)
    role = select(members.c.role).where(members.c.user_id == made.id)
    assert company.execute(role).scalars().all() == ["owner"]
    assert next(event.actor for event in company.events(act="user.create")) == "provider"


def test_roles_are_set_at_each_login(company: Installation, idp: Idp) -> None:
    sub = idp.person(name="Bob", groups=["ops", "devs"])
    before = company.browser()
    log_in(before, sub)

    idp.change(sub, name="Bob", groups=["devs"])
    after = company.browser()
    log_in(after, sub)

    assert user(company, sub).role is None
    assert not before.inside
    assert after.inside
    idp.change(sub, name="Bob", groups=[])
    refused = log_in(company.browser(), sub)
    assert refused.status_code == 403
    assert NO_GROUP in refused.text
    assert not after.inside


def test_person_without_a_group_is_refused_and_not_stored(company: Installation, idp: Idp) -> None:
    sub = idp.person(name="Eve", groups=["strangers"])

    answer = log_in(company.browser(), sub)

    assert answer.status_code == 403
    assert NO_GROUP in answer.text
    assert company.execute(select(users).where(users.c.subject == sub)).first() is None


def test_user_with_the_same_verified_address_is_the_person(company: Installation, idp: Idp) -> None:
    for verified in (True, False):
        email = f"{uuid.uuid4().hex[:8]}@example.com"
        with company.database.transaction() as connection:
            known = create_user(connection, "known", email=email).id
        sub = idp.person(name="C", groups=["ops"], email=email, email_verified=verified)

        log_in(company.browser(), sub)

        assert (user(company, sub).id == known) is verified


def test_disabled_user_is_refused(company: Installation, idp: Idp) -> None:
    sub = idp.person(name="D", groups=["ops"])
    browser = company.browser()
    log_in(browser, sub)
    company.execute(update(users).where(users.c.subject == sub).values(status="disabled"))

    assert log_in(company.browser(), sub).status_code == 403
    assert not browser.inside


@pytest.mark.parametrize("change", ["state", "cookie", "code", "nonce"])
def test_answer_of_another_login_is_refused(
    company: Installation, idp: Idp, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sub = idp.person(name="F", groups=["ops"])
    browser = company.browser()
    if change == "nonce":
        real = IdentityProvider.claims

        async def other(self: IdentityProvider, login: Login, code: str, redirect: str) -> Any:
            return await real(self, Login(login.state, "x" * 32, login.verifier), code, redirect)

        monkeypatch.setattr(IdentityProvider, "claims", other)
    away = browser.get("/console/enter/oidc").headers["location"]
    asked = parse_qs(urlsplit(away).query)
    assert asked["code_challenge_method"] == ["S256"]
    back = httpx.post(away, data={"sub": sub}).headers["location"]
    path = back.partition(":8000")[2]
    if change == "state":
        path = re.sub(r"state=[\w-]+", "state=other", path)
    elif change == "code":
        path = re.sub(r"code=[\w-]+", "code=other", path)
    elif change == "cookie":
        browser.cookies["tollgate-oidc"] = "x" + browser.cookies["tollgate-oidc"]

    answer = browser.get(path)

    assert answer.status_code == 403
    assert FAILED in answer.text
    assert not browser.inside


@pytest.mark.parametrize("by", ["sid", "sub"])
def test_provider_ends_sessions(company: Installation, idp: Idp, by: str) -> None:
    sub = idp.person(name="G", groups=["ops"], sid="s1")
    first = company.browser()
    log_in(first, sub)
    idp.change(sub, name="G", groups=["ops"], sid="s2")
    second = company.browser()
    log_in(second, sub)

    def tell(**claims: Any) -> int:
        token = idp.logout_token(**claims)
        form = {"logout_token": token}
        return company.client.post("/console/oidc/logout", data=form).status_code

    assert tell(sub=sub, aud="another") == 400
    assert tell(sub=sub, events={}) == 400
    assert tell(sub=sub, iss="https://evil.example") == 400
    assert first.inside
    assert tell(**({"sid": "s1"} if by == "sid" else {"sub": sub})) == 200
    assert not first.inside
    assert second.inside is (by == "sid")


async def test_tokens_with_other_algorithms_are_refused(company: Installation, idp: Idp) -> None:
    provider, now = IdentityProvider(company.settings), int(time.time())
    claims = {"iss": idp.url, "aud": "console", "sub": "x", "iat": now, "exp": now + 60}
    unsigned = "eyJhbGciOiJub25lIn0." + idp.sign(**claims).split(".")[1] + "."

    for token in (unsigned, "", "a.b.c", idp.sign(**{**claims, "exp": now - 3600})):
        with pytest.raises(LoginFailed):
            await provider._decode(token, nonce="n")


def test_proof_at_the_provider_needs_the_same_person(company: Installation, idp: Idp) -> None:
    sub, other = (idp.person(name="H", groups=["ops"]) for _ in range(2))
    browser = company.browser()
    log_in(browser, sub)
    old = browser.cookies["tollgate"]

    refused = log_in(browser, other, "/console/prove/oidc")
    asked = parse_qs(urlsplit(browser.get("/console/prove/oidc").headers["location"]).query)
    idp.change(sub, name="H", groups=["ops"], auth_time=int(time.time()) - 3600)
    stale = log_in(browser, sub, "/console/prove/oidc")
    idp.change(sub, name="H", groups=["ops"], auth_time=int(time.time()))
    proved = log_in(browser, sub, "/console/prove/oidc?next=/console/sessions")

    assert stale.status_code == 403
    assert refused.status_code == 403
    assert (asked["prompt"], asked["max_age"]) == (["login"], ["0"])
    assert proved.headers["location"] == "/console/sessions"
    assert browser.cookies["tollgate"] != old
    methods = company.execute(select(sessions.c.method)).scalars().all()
    assert set(methods) == {"oidc"}


async def test_new_keys_of_the_provider_are_read_at_once(
    company: Installation, idp: Idp, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, now = IdentityProvider(company.settings), int(time.time())
    other = KeySet([RSAKey.generate_key(2048, {"kid": "old"})])
    provider._keys = time.monotonic() - 20, other
    claims = {"iss": idp.url, "aud": "console", "sub": "x", "iat": now, "exp": now + 60}

    found = await provider._decode(idp.sign(**claims, nonce="n"), nonce="n")

    assert found["sub"] == "x"


def test_the_highest_role_of_the_groups_counts() -> None:
    roles = {"a": "auditor", "b": "operator", "c": "account:x:y:viewer", "d": "account:x:y:owner"}

    assert granted({"a", "b"}, roles).role == "operator"
    assert granted({"c", "d"}, roles).members == {"x:y": "owner"}
    assert granted({"z"}, roles) == granted(set(), {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"oidc_issuer": "http://login.example.com", "oidc_client_id": "x"},
        {"oidc_issuer": "https://login.example.com"},
        {"oidc_roles": "operator"},
        {"oidc_roles": '{"ops": "root"}'},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="TOLLGATE_OIDC"):
        Settings.model_validate(wrong)
