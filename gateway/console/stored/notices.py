"""Notices: where they go, what was sent and with which answer; subscribe, confirm, test, remove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names, find_account
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.audit_log import Author
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs, require_proof
from gateway.console.once import author_once, is_sent_again, new_once
from gateway.console.queries import ROWS, FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.scope import account_of
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound, TollgateError
from gateway.notices.kinds import CONFIRMATION, KINDS, OPERATOR, TEST, kinds_of
from gateway.notices.mail import mailer_of
from gateway.notices.store import NoticeDelivery, StoredNotice, deliveries_of, list_notices
from gateway.notices.subscriptions import (
    MAILTO,
    SUBSCRIPTIONS_MAX,
    Subscription,
    address_of,
    find_subscription,
    list_subscriptions,
)
from gateway.operations import notices
from gateway.operations.notices import ConfirmationBody, OwnSubscriptionBody, SubscriptionBody

LISTED_MAX: Final = 200
"""Subscriptions that the page of all accounts shows."""
LISTS: Final = (
    ListColumns(
        "subscriptions",
        {
            "of": "Of",
            "kinds": "Kinds",
            "state": "State",
            "since": "Since",
        },
    ),
    ListColumns(
        "notices",
        {
            "to": "To",
            "kind": "Kind",
            "told": "Told",
            "deliveries": "Deliveries",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class _Found:
    account: Account | None
    subscriptions: Sequence[Subscription]
    notices: Sequence[StoredNotice]
    deliveries: Mapping[str, Sequence[NoticeDelivery]]
    names: Mapping[int, str]


class NoticePages(Controller):
    path = "/notices"

    @get(guards=[needs("notices.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _notices_page(request, visitor)

    @post(guards=[needs("notices.write")])
    async def subscribe(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        """Send notices somewhere: of the account looked at, or else those of the operator."""
        form, named = await read_form(request), Query(request).text("account")
        services, author = request.services, author_once(visitor, form)
        account = await services.database.read(
            lambda connection: account_of(connection, visitor, named)
        )
        owner_id = account.id if account else OPERATOR
        _check(visitor, owner_id)
        if account is None:
            # The secret that signs webhooks to the operator is shown with the new subscription.
            await require_proof(request)
        try:

            def make(connection: Connection) -> str | None:
                if is_sent_again(connection, author):
                    return None
                sent = _sent(form)
                if visitor.role is None:
                    own = read_body(OwnSubscriptionBody, sent)
                    notices.add_own(connection, author, owner_id, own, settings=services.settings)
                    return None
                of = {} if account is None else {"account": f"id:{account.id}"}
                body = read_body(SubscriptionBody, {**sent, **of})
                made = notices.add(
                    connection, author, body, settings=services.settings, pepper=services.pepper
                )
                return made["secret"]

            secret = await services.database.write(make)
        except TollgateError as error:
            return await _notices_page(request, visitor, form, error)
        if secret is None:
            return see_other(_back(owner_id))
        return await page(
            request,
            visitor,
            "stored/notice_secret.html",
            title="The secret that signs the notices of the operator",
            status=201,
            secret=secret,
        )

    @post("/{subscription_id:int}/confirm", guards=[needs("notices.write")])
    async def confirm(
        self, request: ApiRequest, visitor: CurrentVisitor, subscription_id: FromPath[int]
    ) -> Response[Any]:
        form, pepper = await read_form(request), request.services.pepper
        try:
            body = read_body(ConfirmationBody, {"token": form.text("token") or ""})

            def agree(connection: Connection) -> int:
                found = _find(connection, visitor, subscription_id)
                notices.confirm_own(
                    connection,
                    visitor.author(),
                    found.account_id,
                    found.id,
                    body,
                    pepper=pepper,
                )
                return found.account_id

            owner_id = await request.services.database.write(agree)
        except NotFound:
            raise
        except TollgateError as error:
            return await _notices_page(request, visitor, form, error)
        return see_other(_back(owner_id))

    @post("/{subscription_id:int}/test", guards=[needs("notices.write")])
    async def test(
        self, request: ApiRequest, visitor: CurrentVisitor, subscription_id: FromPath[int]
    ) -> Response[Any]:
        try:
            owner_id = await _write(request, visitor, subscription_id, notices.send_test)
        except NotFound:
            raise
        except TollgateError as error:
            return await _notices_page(request, visitor, None, error)
        return see_other(_back(owner_id, "sent"))

    @get("/{subscription_id:int}/remove", guards=[needs("notices.write")])
    async def removal(
        self, request: ApiRequest, visitor: CurrentVisitor, subscription_id: FromPath[int]
    ) -> Response[str]:
        def read(connection: Connection) -> tuple[Subscription, str | None, int]:
            found = _find(connection, visitor, subscription_id)
            whose = None
            if found.account_id != OPERATOR:
                whose = find_account(connection, found.account_id).name
            others = list_subscriptions(
                connection, account_id=found.account_id, limit=SUBSCRIPTIONS_MAX + 1, after=0
            )
            return found, whose, len(others) - 1

        found, whose, others = await request.services.database.read(read)
        return await page(
            request,
            visitor,
            "stored/notice_remove.html",
            title="Stop sending notices there",
            subscription=found,
            address=address_of(found.url) or found.url,
            whose=whose,
            others=others,
            back=_back(found.account_id),
        )

    @post("/{subscription_id:int}/remove", guards=[needs("notices.write")])
    async def remove(
        self, request: ApiRequest, visitor: CurrentVisitor, subscription_id: FromPath[int]
    ) -> Redirect:
        form = await read_form(request)
        owner_id = await _write(
            request, visitor, subscription_id, notices.remove, form.text("reason") or ""
        )
        return see_other(_back(owner_id))


async def _write(
    request: ApiRequest, visitor: Visitor, subscription_id: int, act: Any, reason: str = ""
) -> int:
    """Do an act on a subscription that the visitor may change; return whose it is."""
    author: Author = visitor.author(reason)

    def run(connection: Connection) -> int:
        found = _find(connection, visitor, subscription_id)
        act(connection, author, found.id)
        return found.account_id

    return await request.services.database.write(run)


def _find(connection: Connection, visitor: Visitor, subscription_id: int) -> Subscription:
    """Find a subscription that the visitor may change. Raise ``NotFound``."""
    try:
        found = find_subscription(connection, subscription_id)
    except LookupError:
        raise _unknown() from None
    _check(visitor, found.account_id)
    return found


def _check(visitor: Visitor, owner_id: int) -> None:
    if not visitor.may("notices.write", owner_id):
        raise _unknown()


def _unknown() -> NotFound:
    return NotFound("not_found", "There is no such subscription.")


def _sent(form: FormValues) -> dict[str, Any]:
    """Return what was entered as the API has it: one field is a URL or an address of mail."""
    to = form.text("to") or ""
    address = to.removeprefix(MAILTO)
    where = {"email": address} if "@" in address and "://" not in address else {"url": to}
    kinds = form.every("kind")
    return {**where, **({"kinds": kinds} if kinds else {})}


def _back(owner_id: int, part: str = "") -> str:
    of = "all" if owner_id == OPERATOR else f"id:{owner_id}"
    return f"/console/notices?account={of}" + (f"#{part}" if part else "")


async def _notices_page(
    request: ApiRequest,
    visitor: Visitor,
    form: FormValues | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    query = Query(request)
    kind = query.one_of("kind", (*KINDS, TEST, CONFIRMATION))

    def read(connection: Connection) -> _Found:
        account = account_of(connection, visitor, query.text("account"))
        owner_id = account.id if account else None
        found = list_subscriptions(connection, account_id=owner_id, limit=LISTED_MAX, after=0)
        told = list_notices(
            connection,
            account_id=owner_id,
            kind=kind,
            limit=ROWS + 1,
            before=query.text("cursor"),
        )
        ids = {each.account_id for each in found} | {each.account_id for each in told}
        deliveries = deliveries_of(connection, [each.id for each in told])
        return _Found(account, found, told, deliveries, account_names(connection, ids - {OPERATOR}))

    found = await request.services.database.report(read, account_id=visitor.account_id)
    account, shown = found.account, found.notices[:ROWS]
    owner_id = account.id if account else OPERATOR
    problems = dict(problems_of(error))
    for name in ("url", "email"):
        if name in problems:
            problems["to"] = problems.pop(name)
    return await page(
        request,
        visitor,
        "stored/notices.html",
        lists=LISTS,
        title=_title(found),
        status=error.http_status if error else 200,
        account=account,
        subscriptions=found.subscriptions,
        rows=shown,
        deliveries_of=found.deliveries,
        names=found.names,
        operator=OPERATOR,
        address_of=address_of,
        kinds=kinds_of(owner_id),
        all_kinds=(*(kinds_of(owner_id) if account else KINDS), TEST, CONFIRMATION),
        filters=query.values,
        narrowed="kind" in query.values,
        has_mail=mailer_of(request.services.settings) is not None,
        is_asked_first=visitor.role is None,
        writes={
            each.id: visitor.may("notices.write", each.account_id) for each in found.subscriptions
        },
        may_write=visitor.may("notices.write", owner_id),
        maximum=SUBSCRIPTIONS_MAX,
        once=new_once(),
        values=form.values() if form else {},
        chosen=form.every("kind") if form else [],
        problems=problems,
        mistake=error.message if error and not problems.keys() & {"to", "token"} else None,
        pager=query.pages(shown[-1].id if len(found.notices) > ROWS else None),
    )


def _title(found: _Found) -> str:
    of = f" of {found.account.name}" if found.account else ""
    if found.account is not None and not found.subscriptions:
        return f"Notices{of} go nowhere"
    failing = {
        each.subscription_id
        for deliveries in found.deliveries.values()
        for each in deliveries
        if each.status in ("failed", "gone")
    }
    if failing:
        return f"Some of the latest notices{of} could not be delivered"
    return f"Notices{of}"


HANDLERS: Final[list[Any]] = [NoticePages]
