"""One-time links by which a person enters the console, each with a code that can be typed instead.

Only keyed hashes are stored. A link is used once. Too many wrong codes, of any visitor, void the
codes of all open links, because a code is short; the links remain valid.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection, delete, insert, select, update

from gateway.accounts.keys import hash_secret
from gateway.tables.users import login_links

CODE_LETTERS: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's alphabet, without letters that look like digits: 5 bits each."""
CODE_LENGTH: Final = 8
WRONG_CODES_MAX: Final = 5
_ALIKE: Final = str.maketrans({"O": "0", "I": "1", "L": "1", "-": None, " ": None})


@dataclass(frozen=True, slots=True)
class NewLink:
    """A link with its secrets, which are not stored."""

    token: str
    code: str
    ends_at: datetime


class LinkUsed(Exception):
    """A link that was used already, or has expired."""

    def __init__(self, user_id: int, why: str) -> None:
        super().__init__(why)
        self.user_id = user_id
        self.why = why


def make_link(
    connection: Connection, user_id: int, *, valid: timedelta, pepper: bytes, now: datetime
) -> NewLink:
    """Create a link for a user."""
    token = secrets.token_urlsafe(32)
    letters = "".join(secrets.choice(CODE_LETTERS) for _ in range(CODE_LENGTH))
    made = NewLink(token, f"{letters[:4]}-{letters[4:]}", now + valid)
    connection.execute(
        insert(login_links).values(
            token_hash=hash_secret(token, pepper),
            code_hash=hash_secret(letters, pepper),
            user_id=user_id,
            created_at=now,
            ends_at=made.ends_at,
        )
    )
    return made


def use_link(connection: Connection, token: str, *, pepper: bytes, now: datetime) -> int | None:
    """Use a link; return its user, or None if it is unknown. Raise ``LinkUsed``."""
    own = login_links.c.token_hash == hash_secret(token, pepper)
    used = update(login_links).where(
        own, login_links.c.used_at.is_(None), login_links.c.ends_at > now
    )
    user_id = connection.execute(used.values(used_at=now).returning(login_links.c.user_id)).scalar()
    if user_id is not None:
        return int(user_id)
    row = connection.execute(select(login_links).where(own)).first()
    if row is not None:
        raise LinkUsed(row.user_id, "used already" if row.used_at else "expired")
    return None


def use_code(connection: Connection, code: str, *, pepper: bytes, now: datetime) -> int | None:
    """Use the link of a code that was typed; return its user, or None, and count it, if it is
    wrong."""
    letters = code.upper().translate(_ALIKE)
    is_open = login_links.c.used_at.is_(None), login_links.c.ends_at > now
    valid = (
        login_links.c.code_hash == hash_secret(letters, pepper),
        login_links.c.wrong_codes < WRONG_CODES_MAX,
    )
    used = update(login_links).where(*is_open, *valid).values(used_at=now)
    user_id = connection.execute(used.returning(login_links.c.user_id)).scalar()
    if user_id is None:
        wrong = update(login_links).where(*is_open)
        connection.execute(wrong.values(wrong_codes=login_links.c.wrong_codes + 1))
        return None
    return int(user_id)


def void_links(connection: Connection, user_id: int, now: datetime) -> None:
    """End the open links of a user."""
    own = login_links.c.user_id == user_id, login_links.c.used_at.is_(None)
    connection.execute(update(login_links).where(*own).values(used_at=now))


def delete_ended_links(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete links that ended before a moment, the oldest first. Return their number."""
    query = select(login_links.c.id).where(login_links.c.ends_at < before)
    oldest = query.order_by(login_links.c.ends_at).limit(limit)
    return connection.execute(delete(login_links).where(login_links.c.id.in_(oldest))).rowcount
