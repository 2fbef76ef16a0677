"""Notices: subscribe, test, and list what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from gateway.audit_log import Author, record
from gateway.checks.mail_addresses import check_mail_address
from gateway.checks.moments import timestamp
from gateway.checks.public_urls import check_public_url
from gateway.errors import Conflict, InvalidRequest, TooManyRequests
from gateway.ids import is_id, new_id
from gateway.notices.confirmation import TooManyConfirmations, ask, is_token
from gateway.notices.kinds import OPERATOR, TEST, AccountKind, Kind, Notice, kinds_of
from gateway.notices.mail import mailer_of
from gateway.notices.sender import NoticeEvent, notice_event
from gateway.notices.store import (
    ID_PREFIX,
    NoticeDelivery,
    StoredNotice,
    deliveries_of,
    list_notices,
    publish_to,
)
from gateway.notices.subscriptions import (
    MAILTO,
    Subscription,
    SubscriptionExists,
    TooManySubscriptions,
    address_of,
    confirm,
    find_subscription,
    list_subscriptions,
    subscribe,
    unsubscribe,
)
from gateway.operations.accounts import find_owner, owner_id
from gateway.operations.bodies import Body
from gateway.operations.pages import cut_page, read_cursor
from gateway.operations.refusals import refusals, sentence
from gateway.operations.webhooks import AttemptView, attempt_views
from gateway.settings import Settings
from gateway.webhooks.sender import signing_secret

URL_MAX = 2000


class SubscriptionBody(Body):
    """A subscription: either ``url`` or ``email``. Without ``account`` it is the operator's, and
    without ``kinds`` it gets all."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"account": "acme", "email": "ops@example.com", "kinds": ["budget.passed"]}
            ]
        }
    )

    account: str | None = None
    url: Annotated[str, Field(max_length=URL_MAX)] | None = None
    email: str | None = None
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] | None = None


class OwnSubscriptionBody(Body):
    """A subscription of the caller's account: either ``url`` or ``email``, which is asked first.
    Without ``kinds`` it gets all."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"email": "ops@example.com", "kinds": ["budget.passed"]}]}
    )

    url: Annotated[str, Field(max_length=URL_MAX)] | None = None
    email: str | None = None
    kinds: Annotated[tuple[AccountKind, ...], Field(min_length=1)] | None = None


class ConfirmationBody(Body):
    """The token that the address of a subscription received."""

    token: Annotated[str, Field(max_length=100)]


class SubscriptionView(TypedDict):
    """Where notices go. ``account_id`` is null for the operator's, and ``kinds`` for all. Nothing
    is sent before it is ``confirmed``."""

    object: Literal["notice.subscription"]
    id: int
    account_id: int | None
    url: str | None
    email: str | None
    kinds: list[str] | None
    created_at: str
    confirmed: bool


class NewSubscriptionView(SubscriptionView):
    """A new subscription; ``secret`` signs webhooks to the operator. Accounts have their own."""

    secret: str | None


class NoticeDeliveryView(TypedDict):
    """A notice on its way to one receiver."""

    subscription_id: int
    url: str | None
    email: str | None
    status: str
    next_attempt_at: str | None
    ended_at: str | None
    attempts: list[AttemptView]


class NoticeView(NoticeEvent):
    """A notice, and to whom it was sent. ``account_id`` is null if it was for the operator."""

    deliveries: list[NoticeDeliveryView]


@refusals()
def add(
    connection: Connection,
    author: Author,
    body: SubscriptionBody,
    *,
    settings: Settings,
    pepper: bytes,
) -> NewSubscriptionView:
    """Send notices of an account, or those for the operator, to a URL or an address."""
    account_id = owner_id(connection, body.account) or OPERATOR
    made = _subscribe(connection, account_id, body, settings, confirmed=True)
    view = _view(made)
    _record(connection, author, "notice.subscribe", made, after=_logged(made))
    signed = account_id == OPERATOR and body.url is not None
    return {**view, "secret": signing_secret(pepper, OPERATOR) if signed else None}


@refusals()
def add_own(
    connection: Connection,
    author: Author,
    account_id: int,
    body: OwnSubscriptionBody,
    *,
    settings: Settings,
) -> SubscriptionView:
    """Send notices of the caller's account to a URL, or to an address once it has agreed."""
    made = _subscribe(connection, account_id, body, settings, confirmed=body.url is not None)
    if made.confirmed_at is None:
        try:
            ask(connection, made, find_owner(connection, account_id).name)
        except TooManyConfirmations as error:
            raise TooManyRequests("too_many_confirmations", sentence(error)) from None
    _record(connection, author, "notice.subscribe", made, after=_logged(made))
    return _view(made)


@refusals()
def confirm_own(
    connection: Connection,
    author: Author,
    account_id: int,
    subscription_id: int,
    body: ConfirmationBody,
    *,
    pepper: bytes,
) -> SubscriptionView:
    """Begin to send notices to an address, with the token that it received."""
    found = _own(connection, account_id, subscription_id)
    if found.confirmed_at is None:
        if not is_token(pepper, found, body.token):
            raise InvalidRequest("invalid_value", "This is not the token.", param="token")
        found = confirm(connection, found.id)
        _record(connection, author, "notice.confirm", found, after=_logged(found))
    return _view(found)


@refusals()
def remove_own(
    connection: Connection, author: Author, account_id: int, subscription_id: int
) -> SubscriptionView:
    """Stop sending notices of the caller's account there."""
    return remove(connection, author, _own(connection, account_id, subscription_id).id)


def _own(connection: Connection, account_id: int, subscription_id: int) -> Subscription:
    """Find a subscription of an account. Raise ``LookupError``."""
    found = find_subscription(connection, subscription_id)
    if found.account_id != account_id:
        raise LookupError(f"unknown subscription {subscription_id}")
    return found


def _subscribe(
    connection: Connection,
    account_id: int,
    body: SubscriptionBody | OwnSubscriptionBody,
    settings: Settings,
    *,
    confirmed: bool,
) -> Subscription:
    if (body.url is None) == (body.email is None):
        raise InvalidRequest("invalid_value", "Send either url or email.", param="url")
    if body.url is not None:
        url = check_public_url(
            body.url, param="url", private_allowed=settings.webhook_private_addresses
        )
    else:
        if mailer_of(settings) is None:
            raise InvalidRequest(
                "mail_not_configured",
                "No mail server is configured; set TOLLGATE_SMTP_HOST and TOLLGATE_MAIL_FROM.",
                param="email",
            )
        url = MAILTO + check_mail_address(body.email or "")
    try:
        return subscribe(connection, account_id, url, body.kinds, confirmed=confirmed)
    except SubscriptionExists as error:
        raise Conflict("subscription_exists", sentence(error), param="url") from None
    except TooManySubscriptions as error:
        raise Conflict("too_many_subscriptions", sentence(error)) from None


def list_page(
    connection: Connection, *, account: str | None, limit: int, cursor: str | None
) -> tuple[list[SubscriptionView], str | None]:
    """List subscriptions in order of their numbers, and return the cursor of the next page."""
    found = list_subscriptions(
        connection,
        account_id=owner_id(connection, account),
        limit=limit + 1,
        after=read_cursor(cursor, "a subscription"),
    )
    page, more = cut_page(found, limit)
    return [_view(each) for each in page], more


@refusals()
def remove(connection: Connection, author: Author, subscription_id: int) -> SubscriptionView:
    """Stop sending notices there."""
    found = find_subscription(connection, subscription_id)
    unsubscribe(connection, found.id)
    _record(connection, author, "notice.unsubscribe", found, before=_logged(found))
    return _view(found)


@refusals()
def send_test(connection: Connection, author: Author, subscription_id: int) -> NoticeView:
    """Send a notice to one subscription; the list of what was sent shows how it went."""
    found = find_subscription(connection, subscription_id)
    if found.confirmed_at is None:
        raise ValueError(f"the receiver of subscription {found.id} has not agreed yet")
    told = Notice(
        key=new_id("test_"),
        account_id=found.account_id,
        kind=TEST,
        subject=f"subscription {found.id}",
        title="This is a test",
        text=(
            f"This is a test of subscription {found.id}. It receives notices of these kinds: "
            f"{', '.join(sorted(found.kinds or kinds_of(found.account_id)))}."
        ),
        data={"subscription_id": found.id},
    )
    notice_id = publish_to(connection, found, told)
    _record(connection, author, "notice.test", found, after={"notice": notice_id})
    (made,) = list_notices(connection, account_id=found.account_id, kind=TEST, limit=1, before=None)
    return _notice_view(made, deliveries_of(connection, [made.id])[made.id])


def sent(
    connection: Connection,
    account_id: int | None,
    *,
    kind: str | None,
    limit: int,
    cursor: str | None,
) -> tuple[list[NoticeView], str | None]:
    """List notices, newest first, with their deliveries: of an account, or of all for None.

    Also return the cursor of the next page.
    """
    if cursor is not None and not is_id(ID_PREFIX, cursor):
        raise InvalidRequest(
            "invalid_value", f"{cursor!r} is not the id of a notice.", param="cursor"
        )
    found = list_notices(
        connection, account_id=account_id, kind=kind, limit=limit + 1, before=cursor
    )
    page = found[:limit]
    deliveries = deliveries_of(connection, [each.id for each in page])
    more = page[-1].id if len(found) > limit else None
    return [_notice_view(each, deliveries[each.id]) for each in page], more


def sent_of(
    connection: Connection,
    *,
    account: str | None,
    kind: str | None,
    limit: int,
    cursor: str | None,
) -> tuple[list[NoticeView], str | None]:
    """List notices of a named account, or of all accounts and the operator."""
    owner = owner_id(connection, account)
    return sent(connection, owner, kind=kind, limit=limit, cursor=cursor)


def _record(
    connection: Connection,
    author: Author,
    act: Literal["notice.subscribe", "notice.confirm", "notice.unsubscribe", "notice.test"],
    of: Subscription,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    record(
        connection,
        author,
        act,
        f"subscription {of.id}",
        account_id=None if of.account_id == OPERATOR else of.account_id,
        before=before,
        after=after,
    )


def _logged(of: Subscription) -> dict[str, Any]:
    # Path and query of a URL can be a secret.
    receiver = address_of(of.url) or urlsplit(of.url).hostname
    return {"receiver": receiver, "kinds": _kinds(of)}


def _kinds(of: Subscription) -> list[str] | None:
    return None if of.kinds is None else sorted(of.kinds)


def _view(of: Subscription) -> SubscriptionView:
    address = address_of(of.url)
    return {
        "object": "notice.subscription",
        "id": of.id,
        "account_id": None if of.account_id == OPERATOR else of.account_id,
        "url": of.url if address is None else None,
        "email": address,
        "kinds": _kinds(of),
        "created_at": timestamp(of.created_at),
        "confirmed": of.confirmed_at is not None,
    }


def _notice_view(told: StoredNotice, to: Sequence[NoticeDelivery]) -> NoticeView:
    views: list[NoticeDeliveryView] = []
    for each in to:
        address = address_of(each.url)
        views.append(
            {
                "subscription_id": each.subscription_id,
                "url": each.url if address is None else None,
                "email": address,
                "status": each.status,
                "next_attempt_at": timestamp(each.due_at) if each.due_at else None,
                "ended_at": timestamp(each.ended_at) if each.ended_at else None,
                "attempts": attempt_views(each.attempts),
            }
        )
    return {**notice_event(told), "deliveries": views}
