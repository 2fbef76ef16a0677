"""Confirmation of mail subscriptions: nobody gets notices on the word of an account.

The address gets one mail with a token, which the account then sends. The token is derived from the
server's secret when the mail is sent and is stored nowhere, so lists of notices do not show it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, func, select

from gateway.notices.kinds import CONFIRMATION, Notice
from gateway.notices.store import known_keys, publish_to
from gateway.notices.subscriptions import Subscription, address_of
from gateway.tables.notices import notices

MAILS_MAX: Final = 20
"""Maximum confirmation mails of an account within a day."""
_SPAN: Final = timedelta(days=1)


class TooManyConfirmations(Exception):
    """The account has asked this address today, or too many addresses."""


def confirmation_token(pepper: bytes, account_id: int, url: str) -> str:
    digest = hmac.digest(pepper, f"confirmation:{account_id}:{url}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest[:24]).decode()


def is_token(pepper: bytes, of: Subscription, token: str) -> bool:
    expected = confirmation_token(pepper, of.account_id, of.url)
    return hmac.compare_digest(expected.encode(), token.encode())


def ask(connection: Connection, of: Subscription, account: str) -> None:
    """Send a mail that asks its receiver to agree to an account's subscription.

    The account is locked. Raise ``TooManyConfirmations``.
    """
    now = datetime.now(UTC)
    address = address_of(of.url)
    key = f"{CONFIRMATION}:{of.account_id}:{address}:{now:%Y-%m-%d}"
    recent = select(func.count()).where(
        notices.c.account_id == of.account_id,
        notices.c.kind == CONFIRMATION,
        notices.c.created_at > now - _SPAN,
    )
    if known_keys(connection, [key]):
        raise TooManyConfirmations(f"{address} was asked today; ask again tomorrow")
    if connection.execute(recent).scalar_one() >= MAILS_MAX:
        raise TooManyConfirmations(f"{MAILS_MAX} addresses were asked within a day; ask later")
    publish_to(
        connection,
        of,
        Notice(
            key=key,
            account_id=of.account_id,
            kind=CONFIRMATION,
            subject=f"subscription {of.id}",
            title=f"Do you want notices of {account}?",
            text=(
                f"Account {account} asks to send its notices to this address, such as budgets that "
                "are used up and keys that expire. If you agree, pass on the token below to "
                "whoever asked you. If not, ignore this mail: nothing else is sent."
            ),
            data={"subscription_id": of.id},
        ),
    )
