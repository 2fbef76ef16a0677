"""A visitor of the console: who it is, what it may do, and what it looks at.

Built anew for each request from the session's row, so that it is never out of date.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeAlias

from litestar.connection import ASGIConnection
from litestar.di import NamedDependency

from gateway.accounts.content_grants import ContentGrant
from gateway.accounts.roles import MemberRole, Role
from gateway.accounts.sessions import Method, Session, Theme
from gateway.audit_log import CALL_PREFIX, Author
from gateway.console.csrf import form_token
from gateway.console.roles import MAY, Act
from gateway.ids import new_id
from gateway.operations.entrance.content_grants import Sight
from gateway.operations.entrance.sessions import author_of


@dataclass(frozen=True, slots=True)
class Visitor:
    """Either a user or a key. ``account_id`` is the account that it looks at; None: all."""

    session: Session
    user_id: int | None
    key_id: int | None
    name: str
    role: Role | None
    memberships: Mapping[int, MemberRole]
    accounts: Mapping[int, str]
    """Names of the accounts that it is a member of."""
    account_id: int | None
    account: str | None
    csrf: str
    """Token of its forms."""
    proved_at: datetime
    zone: str
    theme: Theme
    hidden: Mapping[str, Sequence[str]]
    """Columns that lists leave out, by list, as it has chosen."""
    method: Method
    sight: Sight
    call_id: str
    """Identifies this request in the log and in the audit log."""

    def may(self, act: Act, account_id: int | None = None) -> bool:
        """Whether it may do something: in an account or, by default, in the one it looks at."""
        account = self.account_id if account_id is None else account_id
        if act == "contents.read" and self.role == "operator" and self._is_granted(account):
            return True
        return self.role in MAY[act] or (
            account is not None and self.memberships.get(account) in MAY[act]
        )

    @property
    def grants(self) -> Sequence[ContentGrant]:
        """Grants of sight that concern what the visitor looks at."""
        here = self.account_id
        return [each for each in self.sight.grants if here in (None, each.account_id)]

    def _is_granted(self, account_id: int | None) -> bool:
        """Whether an owner has given operators sight of an account's contents for now."""
        return any(each.account_id == account_id for each in self.sight.grants)

    def author(self, reason: str = "") -> Author:
        """Return it as the author of acts."""
        return replace(author_of(self.session.identity, reason), call_id=self.call_id)


CurrentVisitor: TypeAlias = NamedDependency[Visitor]
"""Type of the parameter ``visitor`` of handlers."""


def visitor_of_session(session: Session, sight: Sight) -> Visitor:
    identity = session.identity
    own = identity.memberships
    return Visitor(
        session=session,
        user_id=identity.user_id,
        key_id=identity.key_id,
        name=identity.name,
        role=identity.role,
        memberships={id: each.role for id, each in own.items()},
        accounts={id: each.account for id, each in own.items()},
        account_id=session.account_id,
        account=session.account,
        csrf=form_token(session.csrf),
        proved_at=session.proved_at,
        zone=session.zone,
        theme=session.theme,
        hidden=session.hidden,
        method=session.method,
        sight=sight,
        call_id=new_id(CALL_PREFIX),
    )


def visitor_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Visitor | None:
    """Return the visitor that a guard found; None if nobody has entered."""
    found: Visitor | None = connection.scope["state"].get("visitor")
    return found
