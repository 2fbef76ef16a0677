"""What the first operator of an installation finds: the playground, paid by the first account."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import delete

from gateway.settings import Settings
from gateway.tables.core import accounts
from gateway.up.first_start import console_link, prepare
from tests.console.visiting import FORM, Browser, Installation, installed
from tests.stack import CATALOG, PEPPER

ORDER = "/console/playground/order"
QUOTE = "/console/playground/quote"
JSON = {**FORM, "Accept": "application/json"}


def first_start(directory: Path) -> tuple[str, str]:
    """Prepare a new installation as ``tollgate up`` does; return its database and the secret of the
    one-time link that it prints."""
    directory.mkdir()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    url = f"sqlite:///{directory}/first.db"
    settings = Settings.model_validate(
        {"home": directory, "catalog": catalog, "database_url": url, "pepper": PEPPER}
    )
    prepare(settings)
    link = console_link(settings)
    assert link is not None
    return url, link.partition("#")[2].split()[0]


def entered(installation: Installation, secret: str) -> Browser:
    browser = installation.browser()
    assert browser.post("/console/enter/link", {"secret": secret}).status_code == 303
    return browser


def forget_other_accounts(installation: Installation) -> None:
    names = [installation.acme.name, installation.other.name]
    installation.execute(delete(accounts).where(accounts.c.name.in_(names)))


def test_first_operator_finds_the_playground_of_the_first_account(
    tmp_path: Path, valkey: str
) -> None:
    url, secret = first_start(tmp_path / "first")

    with installed(tmp_path / "home", url, valkey) as installation:
        forget_other_accounts(installation)
        browser = entered(installation, secret)
        overview = browser.get("/console").text
        form = browser.get("/console/playground")
        sent = {"model": "echo", "task": "text-generation", "message": "one"}
        quoted = browser.post(QUOTE, sent, headers=JSON)
        # No worker runs here, so the order is refused where it would be queued.
        refused = browser.post(ORDER, sent, headers=JSON)

        assert 'href="/console/playground"' in overview
        assert 'aria-label="Account: default"' in overview
        assert form.status_code == 200
        assert quoted.json()["most"].startswith("$")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")


def test_operator_of_several_accounts_begins_with_all_of_them(tmp_path: Path, valkey: str) -> None:
    url, secret = first_start(tmp_path / "first")

    with installed(tmp_path / "home", url, valkey) as installation:
        browser = entered(installation, secret)
        overview = browser.get("/console").text
        browser.post("/console/preferences", {"account": "default"})

        assert 'aria-label="Account: all accounts"' in overview
        assert browser.get("/console/playground").status_code == 200


def test_other_operators_see_no_contents_of_accounts(tmp_path: Path, valkey: str) -> None:
    url, _ = first_start(tmp_path / "first")

    with installed(tmp_path / "home", url, valkey) as installation:
        other = installation.visitor("operator")

        assert 'href="/console/playground"' not in other.get("/console").text
        assert other.get("/console/playground").status_code == 404
