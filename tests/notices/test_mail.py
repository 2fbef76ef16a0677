"""Mail: over real SMTP, encrypted, within a time limit, and without injected headers."""

from __future__ import annotations

import asyncio
import contextlib
import email.policy
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from email import message_from_bytes
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session
from pydantic import SecretStr, ValidationError

from gateway.checks.mail_addresses import check_mail_address
from gateway.notices import mail
from gateway.notices.mail import Mailer, mailer_of
from gateway.notices.store import StoredNotice
from gateway.settings import Settings
from gateway.webhooks.sender import Rejected, SendFailed

TOLD = StoredNotice(
    "notice_1",
    4,
    "budget.passed",
    "budget 1",
    "Budget 1 “team” of acme passed 80 % of its limit",
    "Budget 1 passed 80 %.",
    {},
    datetime(2026, 11, 1, tzinfo=UTC),
)
PASSWORD = "a password that is in no log"


class Inbox:
    """What a mail server accepted; ``replies`` are what it answers to recipients."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []
        self.recipients: list[str] = []
        self.encrypted: list[bool] = []
        self.replies = {"nobody@example.com": "550 unknown", "full@example.com": "452 later"}

    async def handle_RCPT(
        self, server: Any, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.replies:
            return self.replies[address]
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Session, envelope: Envelope) -> str:
        assert isinstance(envelope.content, bytes)
        found = message_from_bytes(envelope.content, policy=email.policy.default)
        assert isinstance(found, EmailMessage)
        self.mails.append(found)
        self.recipients += envelope.rcpt_tos
        self.encrypted.append(session.ssl is not None)
        return "250 OK"


def authenticate(
    server: Any, session: Session, envelope: Envelope, mechanism: str, data: object
) -> AuthResult:
    given = isinstance(data, LoginPassword) and data.password == PASSWORD.encode()
    return AuthResult(success=given, handled=False)


@contextlib.asynccontextmanager
async def mail_server(inbox: Inbox, **options: Any) -> AsyncIterator[Mailer]:
    """Run a mail server; yield a mailer that sends to it without encryption."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: SMTP(inbox, hostname="localhost", **options), "127.0.0.1", 0
    )
    async with server:
        yield Mailer("127.0.0.1", port_of(server), "none", "tollgate@example.com")


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


async def test_mail_is_plain_text_with_the_title_as_its_subject() -> None:
    inbox = Inbox()
    async with mail_server(inbox) as mailer:
        code = await mailer.send("ann@example.com", TOLD, id="sent_1")

    (found,) = inbox.mails
    assert code == 250
    assert inbox.recipients == ["ann@example.com"]
    assert found["From"] == "Tollgate <tollgate@example.com>"
    assert found["To"] == "ann@example.com"
    assert found["Subject"] == f"[Tollgate] {TOLD.title}"
    assert found["Message-ID"] == "<sent_1@example.com>"
    assert found.get_content_type() == "text/plain"
    assert found.get_content().splitlines()[0] == TOLD.text


async def test_mail_is_encrypted_and_authenticated(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    inbox = Inbox()
    options = {
        "tls_context": context,
        "require_starttls": True,
        "auth_required": True,
        "authenticator": authenticate,
    }
    async with mail_server(inbox, **options) as plain:
        known = replace(plain, security="starttls", user="tollgate", password=PASSWORD)

        with pytest.raises(SendFailed, match="tls"):
            await known.send("ann@example.com", TOLD, id="sent_1")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
        assert await known.send("ann@example.com", TOLD, id="sent_1") == 250
        wrong = replace(known, password="wrong")
        assert await wrong.send("ann@example.com", TOLD, id="sent_1") == 535
        assert await plain.send("ann@example.com", TOLD, id="sent_1") == 530

    assert inbox.encrypted == [True]
    assert PASSWORD not in repr(known)


async def test_encryption_is_never_skipped() -> None:
    inbox = Inbox()
    async with mail_server(inbox) as plain:
        with pytest.raises(SendFailed, match="protocol"):
            await replace(plain, security="starttls").send("ann@example.com", TOLD, id="sent_1")

    assert inbox.mails == []


async def test_recipients_are_refused_for_good_or_for_now() -> None:
    async with mail_server(Inbox()) as mailer:
        with pytest.raises(Rejected) as refused:
            await mailer.send("nobody@example.com", TOLD, id="sent_1")
        assert refused.value.code == 550
        assert await mailer.send("full@example.com", TOLD, id="sent_1") == 452


async def test_server_that_hangs_or_refuses_is_left_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "TIMEOUT_S", 0.3)
    silent = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silent.wait()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        hanging = Mailer("127.0.0.1", port_of(server), "none", "tollgate@example.com")
        with pytest.raises(TimeoutError):
            await hanging.send("ann@example.com", TOLD, id="sent_1")
        silent.set()
    with pytest.raises(SendFailed, match="connect"):
        await hanging.send("ann@example.com", TOLD, id="sent_1")


async def test_nothing_of_a_notice_becomes_a_header() -> None:
    inbox = Inbox()
    evil = replace(
        TOLD, title="x\r\nBcc: eve@example.com\r\n\r\nbody", text="y\r\n.\r\nRCPT TO:<z>"
    )
    async with mail_server(inbox) as mailer:
        await mailer.send("ann@example.com", evil, id="sent_1")

    (found,) = inbox.mails
    assert inbox.recipients == ["ann@example.com"]
    assert found["Bcc"] is None
    assert found["Subject"] == "[Tollgate] x  Bcc: eve@example.com    body"
    assert found.get_content().splitlines()[:3] == ["y", ".", "RCPT TO:<z>"]


@pytest.mark.parametrize(
    "address",
    [
        "ann",
        "@example.com",
        "ann@",
        "ann@example.com\r\nBcc: eve@example.com",
        "ann@example.com, eve@example.com",
        "Ann <ann@example.com>",
        '"a b"@example.com',
        "ann@exa mple.com",
        "änn@example.com",
        "ann@-example.com",
        "a" * 65 + "@example.com",
        "ann@example.com\n",
    ],
)
def test_addresses_that_could_be_more_than_one_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="not a valid mail address"):
        check_mail_address(address)


def test_settings_without_a_sender_or_with_a_password_in_the_clear_are_refused() -> None:
    host = {"smtp_host": "mail.example.com", "mail_from": "tollgate@example.com"}
    secret = {"smtp_user": "tollgate", "smtp_password": SecretStr(PASSWORD)}

    mailer = mailer_of(Settings(**host, **secret))

    assert mailer is not None
    assert (mailer.port, mailer.security) == (587, "starttls")
    assert mailer_of(Settings()) is None
    for wrong in (
        {"smtp_host": "mail.example.com"},
        {**host, "smtp_user": "tollgate"},
        {**host, **secret, "smtp_security": "none"},
        {**host, "mail_from": "Tollgate <tollgate@example.com>"},
    ):
        with pytest.raises(ValidationError) as refused:
            Settings(**wrong)
        assert PASSWORD not in str(refused.value)
