"""Settings without their secrets, the API's reference, and what is part of this version."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.accounts.roles import MEMBER_ROLES, ROLES
from gateway.console.assets import bundled_packages
from gateway.doctor.settings_report import describe, meanings, risks, without_secrets
from gateway.settings import Settings
from tests.console.visiting import Installation, installed
from tests.databases import Databases
from tests.stack import PEPPER

SECRETS = {
    name: f"canary-{name}"
    for name, field in Settings.model_fields.items()
    if "SecretStr" in str(field.annotation) and name != "pepper"
}
URLS = {
    "database_url": "postgresql://ann:canary-1@db/tollgate?password=canary-2&sslmode=require",
    "redis_url": "rediss://:canary-3@queue:6379/0",
    "blob_url": "s3://canary-4:canary-5@bucket/path?secret_access_key=canary-6",
    "stripe_api_base": "https://canary-7@stripe.example",
}
MAIL = {"smtp_host": "mail.example", "smtp_user": "ann", "mail_from": "ann@example.com"}


@pytest.fixture(scope="module")
def own(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Installation]:
    """An installation in which every secret is set, and much is risky."""
    directory = tmp_path_factory.mktemp("settings")
    url = Databases("sqlite", directory, postgres).make()
    more = {**MAIL, "metrics": "open", "stripe_api_base": URLS["stripe_api_base"]}
    with installed(directory / "home", url, valkey, **SECRETS, **more) as made:
        yield made


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def test_no_secret_is_on_the_page_of_settings(own: Installation) -> None:
    page = own.visitor("operator").get("/console/settings").text

    assert len(SECRETS) >= 5
    assert "canary" not in page
    assert PEPPER not in page
    for field in SECRETS:
        variable = next(one["name"] for one in describe(own.settings) if one["name"].endswith(
            field.upper()))  # fmt: skip
        row = page.partition(f"<code>{variable}</code></th>")[2].partition("</tr>")[0]
        assert "set</span>" in row, variable
    assert "Everybody who reaches the gateway can read its metrics" in page


def test_no_secret_of_a_url_is_described() -> None:
    settings = Settings.model_validate({**SECRETS, **URLS, **MAIL, "pepper": "canary-pepper"})

    found = json.dumps(describe(settings, {}))

    assert "canary" not in found
    assert "sslmode=require" in found
    assert without_secrets("https://user:p@ss@host/x") == "https://•••@host/x"


def test_every_setting_has_its_sentence_and_origin(tmp_path: Path) -> None:
    assert meanings().keys() == Settings.model_fields.keys()
    settings = Settings.model_validate({"home": tmp_path, "port": 9000})
    found = {one["name"]: one for one in describe(settings, {"TOLLGATE_PORT": "9000"})}

    assert found["TOLLGATE_PORT"]["origin"] == "environment"
    assert found["TOLLGATE_HOME"]["origin"] == "start"
    assert found["TOLLGATE_HOST"]["origin"] == "default"
    assert found["DATABASE_URL"]["value"] is None
    (tmp_path / "pepper").write_text("x")
    found = {one["name"]: one for one in describe(settings, {})}
    assert found["TOLLGATE_PEPPER"]["origin"] == "file"
    assert found["TOLLGATE_METADATA_RETENTION_DAYS"]["value"] == "forever"


def test_risky_combinations_are_named() -> None:
    def named(**values: object) -> set[str]:
        return {one.part for one in risks(Settings.model_validate(values)) if one.level != "note"}

    assert named() == set()
    provider = {"oidc_issuer": "https://login.example", "oidc_client_id": "x"}
    assert named(**provider) >= {"TOLLGATE_CONSOLE_KEY_LOGIN"}
    assert named(**provider, console_key_login=False) == set()
    assert named(host="0.0.0.0") == {"TOLLGATE_PUBLIC_URL"}
    assert named(host="0.0.0.0", public_url="http://x") == {"TOLLGATE_PUBLIC_URL"}
    assert named(host="0.0.0.0", public_url="https://x") == set()
    assert named(console_insecure=True) == {"TOLLGATE_CONSOLE_INSECURE"}
    assert named(processes=2) == {"TOLLGATE_PROCESSES"}


def test_command_prints_what_the_page_shows_and_no_secret() -> None:
    environment = {"PATH": "", "TOLLGATE_METRICS_TOKEN": "canary", "TOLLGATE_METRICS": "open"}
    command = [sys.executable, "-m", "gateway", "settings", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    found = json.loads(done.stdout)
    assert "canary" not in done.stdout
    settings = Settings.model_validate({"metrics": "open", "metrics_token": SecretStr("canary")})
    assert found["settings"] == describe(settings, environment)
    assert found["risks"][0]["part"] == "TOLLGATE_METRICS"


def test_settings_are_for_operators_and_auditors(own: Installation) -> None:
    for role in (*ROLES, *MEMBER_ROLES):
        status = own.visitor(role).get("/console/settings").status_code
        assert status == (200 if role in ("operator", "auditor") else 404), role


def test_reference_has_every_route_of_the_document(own: Installation) -> None:
    operator, viewer = own.visitor("operator"), own.visitor("viewer")
    document = own.client.get("http://127.0.0.1:8000/schema/openapi.json").json()
    page = operator.get("/console/docs").text

    ids = {each["operationId"] for item in document["paths"].values() for each in item.values()}
    assert set(re.findall(r'href="/console/docs/(\w+)"', page)) == ids
    assert "/v1/admin" not in viewer.get("/console/docs").text
    assert viewer.get("/console/docs/ReloadCatalog").status_code == 404


def test_route_has_fields_types_and_an_example_of_a_model(own: Installation) -> None:
    viewer = own.visitor("viewer")
    found = viewer.get("/console/docs?q=temperature").text
    assert 'href="/console/docs/CreateChatCompletion"' in found
    assert "No route has all of these words" in viewer.get("/console/docs?q=xyzzy").text

    page = viewer.get("/console/docs/CreateChatCompletion?model=slow").text

    shown = unescape(page)
    assert '"model": "slow"' in shown
    assert '"max_tokens": 512' in shown
    assert "$TOLLGATE_API_KEY" in shown
    links = set(re.findall(r'href="(/console/docs/types/\w+)"', page))
    assert links
    for link in links:
        assert viewer.get(link).status_code == 200


def test_every_route_can_be_opened(own: Installation) -> None:
    operator = own.visitor("operator")
    page = operator.get("/console/docs").text

    for path in re.findall(r'href="(/console/docs/\w+)"', page)[::6]:
        assert operator.get(path).status_code == 200, path


def test_about_has_the_licence_of_each_package(own: Installation) -> None:
    page = text_of(own.visitor("viewer").get("/console/about").text)

    for package in bundled_packages():
        assert f"{package.name} {package.version}, {package.licence}" in page
    assert "Permission" in page
