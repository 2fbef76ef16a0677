"""Texts of others are texts on every page: payloads in every field that takes words."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser

import httpx
import pytest

from gateway.accounts.accounts import create_account
from gateway.accounts.budgets import create_budget
from gateway.accounts.keys import create_key
from gateway.console.rendering import environment
from gateway.pricing import NANOS_PER_USD
from tests.console.payloads import PAYLOADS, STORED
from tests.console.routes import pages_of
from tests.console.seeding import PEPPER, Seeded, seed
from tests.console.visiting import FORM, Browser, Installation

MARK = "evilmark"
"""Part of each payload as it is stored, by which it is found on pages."""
PARTS = (
    *("/console/find", "/console/speed/", "/console/requests/histogram", "/console/jobs/"),
    *("/console/playground", "/console/prices", "/console/payments", "/console/batches"),
)
"""Starts of the addresses from which our own parts are read."""

ICON = environment().globals["mark_address"]
"""Address of the icon, which is within each page."""


class Elements(HTMLParser):
    """Elements of a page that run or load something, and the texts that it shows."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.texts += [value for value in given.values() if value]
        if tag in ("iframe", "object", "embed", "base", "style", "math"):
            self.found.append(f"<{tag}>")
        address = given.get("src") or given.get("href") or ""
        own = address.startswith("/console/assets/") or address == ICON
        if tag == "script" and not own:
            self.found.append("<script>")
        if tag == "link" and not own:
            self.found.append(f"link to {given.get('href')}")
        for name, value in attrs:
            if name.startswith("on") or name in ("style", "srcdoc", "autofocus"):
                self.found.append(f"{tag}[{name}]")
            if name in ("href", "src", "action", "formaction", "xlink:href") and value != ICON:
                self._check_address(tag, name, value or "")
            if name == "hx-get" and not (value or "").startswith(PARTS):
                self.found.append(f"hx-get of {value}")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def _check_address(self, tag: str, name: str, value: str) -> None:
        scheme = value.partition(":")[0].lower() if ":" in value.partition("/")[0] else ""
        if scheme in ("javascript", "data", "vbscript") or value.startswith("//"):
            self.found.append(f"{tag}[{name}={value[:40]}]")


@pytest.fixture(scope="module")
def seeded(installation: Installation) -> Seeded:
    """Traffic, and every payload as the name of a key, a budget, an account and a file."""
    made = seed(installation.database, installation.settings.catalog)
    atlas = made.accounts["atlas"].id
    with installation.database.transaction() as connection:
        for payload in STORED:
            name = f"{MARK}{payload}"[:120]
            create_key(connection, atlas, pepper=PEPPER, name=name)
            create_budget(connection, atlas, NANOS_PER_USD, window="day", name=name)
            if "/" not in name:  # which names of accounts do not contain
                create_account(connection, name)
    return made


def problems(browser: Browser, path: str) -> Iterator[str]:
    """Yield what runs or loads something on a page, also if it is the page of an error."""
    answer, page = browser.get(path), Elements()
    assert answer.headers["x-content-type-options"] == "nosniff"
    page.feed(answer.text)
    yield from (f"{path}: {each}" for each in page.found)


@pytest.mark.parametrize("role", ["operator", "owner"])
def test_stored_payloads_are_text_on_every_page(
    installation: Installation, seeded: Seeded, role: str
) -> None:
    browser = installation.visitor(role, account="atlas")
    shown: set[str] = set()

    for path in pages_of(installation.client.app, role, seeded):  # type: ignore[arg-type]  # a role
        page = Elements()
        page.feed(browser.get(path).text)
        assert page.found == [], path
        shown |= {each for each in STORED for text in page.texts if f"{MARK}{each}"[:120] in text}

    # Lists show 50 rows, the newest or the oldest first.
    assert len(shown) == len(STORED), set(STORED) - shown


@pytest.mark.parametrize("payload", PAYLOADS)
def test_payload_in_an_address_is_text(
    installation: Installation, seeded: Seeded, payload: str
) -> None:
    operator = installation.visitor("operator", account="atlas")
    for name, path in FIELDS:
        query = str(httpx.QueryParams({name: payload}))
        assert list(problems(operator, f"{path}?{query}")) == []
    quoted = urllib.parse.quote(payload, safe="")
    for path in ("/console/models", "/console/prices", "/console/requests", "/console"):
        assert list(problems(operator, f"{path}/{quoted}")) == []


FIELDS = (
    *(("q", path) for path in ("/console/find", "/console/models", "/console/docs")),
    *((name, "/console/requests") for name in ("account", "model", "key", "tag", "id", "cursor")),
    *((name, "/console/audit") for name in ("actor", "subject", "act", "call")),
    *(("account", path) for path in ("/console/ledger", "/console/usage", "/console/balance")),
    *(("name", path) for path in ("/console/accounts", "/console/keys")),
    *(("from", path) for path in ("/console/usage", "/console/failures")),
    *(("need", path) for path in ("/console/pick",)),
    *(("next", path) for path in ("/console/enter", "/console/prove")),
)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_payload_that_was_entered_in_a_form_is_text_beside_its_mistake(
    installation: Installation, seeded: Seeded, payload: str
) -> None:
    owner = installation.visitor("owner", account="atlas")
    operator = installation.visitor("operator")
    headers = {**FORM, "User-Agent": payload.encode("ascii", "ignore").decode()}

    answers = [
        owner.post("/console/keys/new", {"name": payload, "spend_limit": payload, "read": "yes"},
                   headers=headers),
        owner.post("/console/preferences", {"zone": payload}, headers=headers),
        owner.post("/console/members", {"name": payload, "email": payload, "role": payload}),
        owner.post("/console/playground/quote",
                   {"model": "echo", "task": "text-generation", "message": payload,
                    "max_tokens": payload, "tools": payload, "schema": payload},
                   headers={**headers, "Accept": "text/html"}),
        operator.post("/console/accounts/new", {"name": payload, "credit_limit": payload}),
        operator.post("/console/catalog/check", {"text": payload}),
        operator.get("/console/sessions"),
        operator.get("/console/users/sessions"),
    ]  # fmt: skip

    for answer in answers:
        page = Elements()
        page.feed(answer.text)
        assert page.found == [], answer.url
