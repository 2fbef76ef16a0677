"""Sends notices by mail: plain text over SMTP, one connection and one recipient for each.

Nothing of a notice can become a header: recipients are checked when they subscribe, and titles are
encoded. The password is sent over TLS only, and is in no log.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Final, Literal, TypeAlias

import aiosmtplib

from gateway.notices.store import StoredNotice
from gateway.settings import Settings
from gateway.webhooks.sender import TIMEOUT_S, Rejected, SendFailed, is_tls

Security: TypeAlias = Literal["starttls", "tls", "none"]

PORTS: Final[dict[Security, int]] = {"starttls": 587, "tls": 465, "none": 25}
SENT: Final = 250
"""SMTP's reply to a mail that was accepted."""
REJECTED: Final = frozenset({550, 551, 553, 556})
"""Replies by which a server refuses a recipient for good (RFC 5321, 7504)."""
SUBJECT_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Mailer:
    """Sends mail through the configured server."""

    host: str
    port: int
    security: Security
    sender: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    async def send(self, to: str, told: StoredNotice, *, id: str) -> int:
        """Send a notice and return the server's reply. Raise ``Rejected`` if the recipient is
        refused for good, ``TimeoutError`` or ``SendFailed`` if the server does not answer.

        ``id`` is the same whenever the mail is sent again, so that its reader can drop a twin.
        """
        message = compose(told, sender=self.sender, to=to, id=id)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await aiosmtplib.send(
                    message,
                    sender=self.sender,
                    recipients=[to],
                    hostname=self.host,
                    port=self.port,
                    username=self.user,
                    password=self.password,
                    use_tls=self.security == "tls",
                    start_tls=self.security == "starttls",
                    timeout=TIMEOUT_S,
                )
        except aiosmtplib.SMTPRecipientsRefused as error:
            code = error.recipients[0].code
            if code in REJECTED:
                raise Rejected(code) from None
            return code
        except aiosmtplib.SMTPResponseException as error:
            return error.code
        except TimeoutError:
            raise
        except (aiosmtplib.SMTPException, OSError) as error:
            if is_tls(error):
                raise SendFailed("tls") from error
            # Without an OSError, the server lacks STARTTLS or a way to authenticate.
            raise SendFailed("connect" if isinstance(error, OSError) else "protocol") from error
        return SENT


def mailer_of(settings: Settings) -> Mailer | None:
    """Return the mailer that the settings describe; None without a mail server."""
    if settings.smtp_host is None or settings.mail_from is None:
        return None
    password = settings.smtp_password
    return Mailer(
        settings.smtp_host,
        settings.smtp_port or PORTS[settings.smtp_security],
        settings.smtp_security,
        settings.mail_from,
        settings.smtp_user,
        None if password is None else password.get_secret_value(),
    )


def compose(told: StoredNotice, *, sender: str, to: str, id: str) -> EmailMessage:
    """Build the mail of a notice. Raise ``ValueError`` if an address could not be a header."""
    message = EmailMessage()
    message["From"] = Address("Tollgate", addr_spec=sender)
    message["To"] = Address(addr_spec=to)
    message["Subject"] = _one_line(f"[Tollgate] {told.title}")[:SUBJECT_MAX]
    message["Date"] = format_datetime(told.created_at)
    message["Message-ID"] = f"<{id}@{sender.rpartition('@')[2]}>"
    # RFC 3834: no answer of an absent reader comes back.
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(f"{told.text}\n\n{told.kind} · {told.id}\n")
    return message


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
