"""Sight of an account's prompts and outputs: given and ended by owners, asked for by operators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypedDict

from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.accounts.content_grants import (
    ContentAsk,
    ContentGrant,
    active_grants,
    ask,
    close_asks,
    end,
    give,
    grants_of,
    open_asks,
)
from gateway.accounts.keys import KeyInfo
from gateway.accounts.sessions import Identity, key_roles
from gateway.audit_log import Author, record
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest, NotFound
from gateway.notices.kinds import Notice, in_words
from gateway.notices.store import publish
from gateway.operations.bodies import Body, Reason
from gateway.operations.refusals import refusals


class GrantBody(Body):
    """Sight of prompts and outputs for operators, for some hours, with the reason."""

    hours: Literal[1, 8, 24]
    reason: Reason


class AskBody(Body):
    """Why an operator needs sight; both sides read it."""

    reason: Reason


class ContentGrantView(TypedDict):
    """A grant; ``ended_by`` is who ended it before its time."""

    object: Literal["content_grant"]
    id: int
    account_id: int
    actor: str
    reason: str
    starts_at: str
    ends_at: str
    ended_by: str | None


@dataclass(frozen=True, slots=True)
class Sight:
    """What a visitor has to know of grants: those in force that concern it, and the questions that
    it can answer."""

    grants: tuple[ContentGrant, ...] = ()
    asks: tuple[ContentAsk, ...] = ()


def sight_of(connection: Connection, identity: Identity) -> Sight:
    """Return the grants in force of a visitor's accounts, for operators of all, and the questions
    to the accounts that it owns."""
    now = datetime.now(UTC)
    members = identity.memberships
    if identity.role != "operator" and not members:
        return Sight()
    whose = None if identity.role == "operator" else members.keys()
    owned = [id for id, each in members.items() if each.role == "owner"]
    return Sight(
        tuple(active_grants(connection, whose, now=now)),
        tuple(open_asks(connection, owned, now=now)),
    )


def key_sees(connection: Connection, key: KeyInfo, account_id: int) -> bool:
    """Return whether a key sees an account's contents over HTTP, as its session would: it is the
    account's own, or an operator's while a grant is in force."""
    role, member_role = key_roles(key)
    if member_role is not None and key.account_id == account_id:
        return True
    return role == "operator" and bool(
        active_grants(connection, [account_id], now=datetime.now(UTC))
    )


@refusals()
def grant(
    connection: Connection, author: Author, account_id: int, body: GrantBody
) -> ContentGrantView:
    """Give operators sight of what was said and made."""
    now = datetime.now(UTC)
    made = give(
        connection, account_id, actor=author.name, reason=body.reason, hours=body.hours, now=now
    )
    view = grant_view(made)
    record(
        connection,
        author,
        "access.grant",
        f"account {account_id}",
        account_id=account_id,
        after={"hours": body.hours, "ends_at": view["ends_at"]},
        reason=body.reason,
    )
    return view


def end_grant(connection: Connection, author: Author, account_id: int) -> ContentGrantView:
    """End the sight that operators have now. Raise ``NotFound``."""
    now = datetime.now(UTC)
    ended = end(connection, account_id, actor=author.name, now=now)
    if ended is None:
        raise NotFound("content_grant_not_found", "Operators have no sight of this account.")
    view = grant_view(next(e for e in grants_of(connection, account_id) if e.id == ended.id))
    record(
        connection,
        author,
        "access.end",
        f"account {account_id}",
        account_id=account_id,
        before={"ends_at": timestamp(ended.ends_at)},
        after={"ends_at": view["ends_at"]},
    )
    return view


def ask_for(
    connection: Connection,
    author: Author,
    account: Account,
    body: AskBody,
    *,
    request_id: str | None = None,
) -> None:
    """Ask the owners of an account for sight: in their console, and by a notice if one is wanted.

    Raise ``InvalidRequest`` if the same operator has asked already.
    """
    now = datetime.now(UTC)
    if any(each.actor == author.name for each in open_asks(connection, [account.id], now=now)):
        raise InvalidRequest(
            "already_asked", f"You have asked {account.name} already; its owners see it."
        )
    asked = ask(
        connection,
        account.id,
        actor=author.name,
        reason=body.reason,
        request_id=request_id,
        now=now,
    )
    publish(connection, [_notice(asked)], now=now)
    record(
        connection,
        author,
        "access.ask",
        f"account {account.id}" if request_id is None else f"request {request_id}",
        account_id=account.id,
        reason=body.reason,
    )


def decline(connection: Connection, author: Author, account_id: int) -> None:
    """Answer the open questions of operators with no. Raise ``NotFound`` if there are none."""
    if not close_asks(connection, account_id, now=datetime.now(UTC)):
        raise NotFound("content_grant_not_found", "No question is open.")
    record(connection, author, "access.decline", f"account {account_id}", account_id=account_id)


def list_grants(connection: Connection, account_id: int) -> list[ContentGrantView]:
    """List the latest grants of an account, newest first."""
    return [grant_view(each) for each in grants_of(connection, account_id)]


def grant_view(found: ContentGrant) -> ContentGrantView:
    return {
        "object": "content_grant",
        "id": found.id,
        "account_id": found.account_id,
        "actor": found.actor,
        "reason": found.reason,
        "starts_at": timestamp(found.starts_at),
        "ends_at": timestamp(found.ends_at),
        "ended_by": found.ended_by,
    }


def _notice(asked: ContentAsk) -> Notice:
    about = f" of {asked.request_id}" if asked.request_id else ""
    return Notice(
        key=f"ask:{asked.id}",
        account_id=asked.account_id,
        kind="access.asked",
        subject=f"account {asked.account_id}",
        title="An operator asks to see what was said",
        text=(
            f"{asked.actor} asks to see prompts and outputs{about} of {asked.account}: "
            f"{asked.reason}\n\nOperators see none without your consent. An owner can give sight "
            "for 1, 8 or 24 hours, or decline, in the console under Access. Asked at "
            f"{in_words(asked.asked_at)}."
        ),
        data={"request_id": asked.request_id, "actor": asked.actor, "reason": asked.reason},
    )
