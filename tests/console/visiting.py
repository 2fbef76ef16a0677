"""Visits the console in this process: an installation, and browsers with cookies of their own."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
from litestar import Litestar
from litestar.testing import TestClient
from sqlalchemy import func, select, update

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import KeyInfo, create_key
from gateway.accounts.roles import MEMBER_ROLES, ROLES
from gateway.app import create_app
from gateway.audit_log import AuditEvent, AuditFilter, Author, list_events
from gateway.console.guards import PROVED
from gateway.operations.entrance.links import LinkBody, LoginLinkView, create_link
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.tables.users import sessions
from tests.stack import CATALOG, PEPPER, wait_for

ORIGIN = "http://127.0.0.1:8000"
FORM = {"Sec-Fetch-Site": "same-origin"}
TOKEN = re.compile(r'name="csrf" value="(\w+)"')


class Browser:
    """A browser with its own cookies, that follows no redirect by itself."""

    def __init__(self, client: TestClient[Litestar], origin: str = ORIGIN) -> None:
        self._client = client
        self._origin = origin
        self.cookies: dict[str, str] = {}

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.send("GET", path, headers)

    def post(
        self, path: str, form: Mapping[str, str] | None = None, *, token: str | None = None,
        headers: Mapping[str, str] = FORM, files: Mapping[str, Any] | None = None,
    ) -> httpx.Response:  # fmt: skip
        """Send a form with the token of the visitor, unless another one is given."""
        if token is None:
            token = self.token("/console/enter" if "/enter" in path else "/console/sessions")
        sent = {"csrf": token, **(form or {})}
        return self.send("POST", path, headers, sent, files)

    def token(self, path: str = "/console/sessions") -> str:
        """Read the token of forms from a page, as a browser has it."""
        answer = self.get(path)
        # A visitor who has not entered is shown the entrance.
        page = answer.text if answer.status_code == 200 else self.get("/console/enter").text
        return TOKEN.findall(page)[-1]

    def finished(self, path: str) -> str:
        """Return a page once the job that it shows has ended."""
        pages: list[str] = []

        def has_ended() -> bool:
            pages.append(self.get(path).text)
            return 'id="job"' not in pages[-1]

        wait_for(has_ended, f"the job of {path}")
        return pages[-1]

    def enter(self, link: LoginLinkView) -> httpx.Response:
        secret = link["path"].partition("#")[2]
        return self.post("/console/enter/link", {"secret": secret})

    @property
    def inside(self) -> bool:
        return self.get("/console/sessions").status_code == 200

    def send(
        self, method: str, path: str, headers: Mapping[str, str],
        form: Mapping[str, str] | None = None, files: Mapping[str, Any] | None = None,
    ) -> httpx.Response:  # fmt: skip
        self._client.cookies.clear()
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        answer = self._client.request(
            method,
            f"{self._origin}{path}",
            data=form,
            files=files,
            headers={**headers, **({"Cookie": cookie} if cookie else {})},
            follow_redirects=False,
        )
        for line in answer.headers.get_list("set-cookie"):
            for name, morsel in SimpleCookie(line).items():
                self.cookies[name] = morsel.value
                if morsel["max-age"] == "0":
                    del self.cookies[name]
        return answer


def open_link(database: Database, role: str, account: str) -> LoginLinkView:
    """Create a one-time link for a new person with a role; for members, in an account."""
    where = {"account": account} if role in MEMBER_ROLES else {}
    name = f"{role} {uuid.uuid4().hex[:8]}"
    body = LinkBody.model_validate({"role": role, "name": name, **where})
    with database.transaction() as connection:
        return create_link(connection, Author("test", "cli"), body, pepper=PEPPER.encode())


class Installation:
    """The application in this process, with two accounts."""

    def __init__(self, settings: Settings, client: TestClient[Litestar]) -> None:
        self.settings = settings
        self.client = client
        self.database = Database(settings.sql_url)
        self.author = Author("test", "cli")
        with self.database.transaction() as connection:
            self.acme = create_account(connection, "acme")
            self.other = create_account(connection, "other")

    def browser(self) -> Browser:
        return Browser(self.client)

    def link(self, **wanted: Any) -> LoginLinkView:
        with self.database.transaction() as connection:
            body = LinkBody.model_validate(wanted)
            return create_link(connection, self.author, body, pepper=PEPPER.encode())

    def visitor(self, role: str | None, *, account: str = "acme") -> Browser:
        """Return a browser in which a new person with a role has entered; None: nobody."""
        browser = self.browser()
        if role is not None:
            where = {"account": account} if role in MEMBER_ROLES else {}
            name = f"{role} {uuid.uuid4().hex[:8]}"
            answer = browser.enter(self.link(role=role, name=name, **where))
            assert answer.status_code == 303, answer.text
        return browser

    def key(self, **values: Any) -> tuple[str, KeyInfo]:
        with self.database.transaction() as connection:
            return create_key(connection, self.acme.id, pepper=PEPPER.encode(), **values)

    def events(self, **wanted: Any) -> list[AuditEvent]:
        with self.database.transaction() as connection:
            return list_events(connection, AuditFilter(**wanted), limit=100)

    def forget_last_proof(self) -> None:
        """Make the proof of the newest session older than what moves much admits."""
        late = datetime.now(UTC) - PROVED - timedelta(minutes=1)
        newest = select(func.max(sessions.c.id)).scalar_subquery()
        self.execute(update(sessions).where(sessions.c.id == newest).values(proved_at=late))

    def execute(self, statement: Any) -> Any:
        with self.database.transaction() as connection:
            return connection.execute(statement)


CALLERS: tuple[str | None, ...] = (None, *ROLES, *MEMBER_ROLES)


@contextmanager
def installed(directory: Path, url: str, valkey: str, **more: Any) -> Iterator[Installation]:
    """Run the application with a database that is migrated."""
    directory.mkdir(parents=True, exist_ok=True)
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    settings = Settings.model_validate(
        {
            "home": directory,
            "catalog": catalog,
            "database_url": url,
            "redis_url": valkey,
            "namespace": f"t{uuid.uuid4().hex[:8]}",
            "pepper": PEPPER,
            **more,
        }
    )
    with TestClient(create_app(settings), base_url=ORIGIN) as client:
        made = Installation(settings, client)
        try:
            yield made
        finally:
            made.database.dispose()
