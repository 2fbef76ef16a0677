"""API keys: list, create, rotate, change, revoke. A secret is shown once, on a page of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast, get_args
from zoneinfo import ZoneInfo

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.accounts.keys import KeyStatus, key_by_id
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.audit_log import CALL_PREFIX, AuditFilter, Author, list_events
from gateway.console.answers import see_other
from gateway.console.guards import needs
from gateway.console.queries import ROWS, FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.roles import Act
from gateway.console.scope import account_of, one_account
from gateway.console.views.keys import key_row
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound, TollgateError
from gateway.ids import is_id, new_id
from gateway.operations import keys
from gateway.operations.keys import KeyView

STATUSES: Final[tuple[KeyStatus, ...]] = get_args(KeyStatus)
OVERLAPS: Final = (("0", "at once"), ("3600", "1 hour"), ("86400", "1 day"), ("604800", "1 week"))
LIMITS: Final = ("requests_per_minute", "tokens_per_minute", "concurrent")


class KeyPages(Controller):
    path = "/keys"

    @get(guards=[needs("keys.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        status = cast("KeyStatus | None", query.one_of("status", STATUSES))

        def read(connection: Connection) -> tuple[Account | None, list[KeyView], str | None]:
            account = account_of(connection, visitor, query.text("account"))
            found, more = keys.list_page(
                connection,
                account=_number(account) if account else None,
                status=status,
                name=query.text("name"),
                limit=ROWS,
                cursor=query.text("cursor"),
            )
            return account, found, more

        account, found, more = await request.services.database.report(
            read, account_id=visitor.account_id
        )
        of = f" of {account.name}" if account else ""
        return await page(
            request,
            visitor,
            "keys.html",
            title=f"Keys{of}",
            account=account,
            rows=[key_row(each) for each in found],
            statuses=STATUSES,
            filters=query.values,
            narrowed=bool(set(query.values) - {"account", "cursor"}),
            may_write=visitor.may("keys.write", account.id if account else None),
            pager=query.pages(more),
        )

    @get("/new", guards=[needs("keys.write")])
    async def new(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        account = await _account(request, visitor)
        return await _form_page(request, visitor, account, {"inference": "yes", "read": "yes"})

    @post("/new", guards=[needs("keys.write")])
    async def create(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        account, form = await _account(request, visitor), await read_form(request)
        pepper = request.services.pepper
        try:
            author = _author(visitor, form)
            sent = {**_terms(form, visitor.zone), "scopes": _scopes(form)}
            body = read_body(keys.MemberKeyBody, _given(sent))

            def make(connection: Connection) -> keys.NewKeyView | None:
                if _is_sent_again(connection, author, account.id):
                    return None
                return keys.create(connection, author, _number(account), body, pepper=pepper)

            made = await request.services.database.write(make)
        except TollgateError as error:
            return await _form_page(request, visitor, account, form.values(), error)
        if made is None:
            return see_other("/console/keys")
        return await _secret_page(request, visitor, made)

    @get("/{key_id:int}", guards=[needs("keys.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, key_id: FromPath[int]
    ) -> Response[str]:
        key = await _find(request, visitor, key_id, "keys.read")
        return await _key_page(request, visitor, key)

    @post("/{key_id:int}", guards=[needs("keys.write")])
    async def change(
        self, request: ApiRequest, visitor: CurrentVisitor, key_id: FromPath[int]
    ) -> Response[Any]:
        key, form = await _find(request, visitor, key_id, "keys.write"), await read_form(request)
        try:
            body = read_body(keys.KeyChange, _terms(form, visitor.zone))
            act = functools.partial(keys.change, key=str(key_id), body=body)
            await request.services.database.write(
                lambda connection: act(connection, visitor.author())
            )
        except TollgateError as error:
            return await _key_page(request, visitor, key, form.values(), error)
        return see_other(f"/console/keys/{key_id}")

    @post("/{key_id:int}/rotate", guards=[needs("keys.write")])
    async def rotate(
        self, request: ApiRequest, visitor: CurrentVisitor, key_id: FromPath[int]
    ) -> Response[Any]:
        key, form = await _find(request, visitor, key_id, "keys.write"), await read_form(request)
        pepper = request.services.pepper
        try:
            author = _author(visitor, form)
            body = read_body(keys.RotationBody, {"overlap_s": form.number("overlap_s") or 0})

            def make(connection: Connection) -> keys.NewKeyView | None:
                if _is_sent_again(connection, author, None):
                    return None
                return keys.rotate(connection, author, str(key_id), body, pepper=pepper)

            made = await request.services.database.write(make)
        except TollgateError as error:
            return await _key_page(request, visitor, key, None, error)
        if made is None:
            return see_other(f"/console/keys/{key_id}")
        return await _secret_page(request, visitor, made)

    @post("/{key_id:int}/revoke", guards=[needs("keys.write")])
    async def revoke(
        self, request: ApiRequest, visitor: CurrentVisitor, key_id: FromPath[int]
    ) -> Redirect:
        await _find(request, visitor, key_id, "keys.write")
        await request.services.database.write(
            lambda connection: keys.revoke(connection, visitor.author(), str(key_id))
        )
        return see_other(f"/console/keys/{key_id}")


async def _account(request: ApiRequest, visitor: Visitor) -> Account:
    named = Query(request).text("account")
    found = await request.services.database.read(
        lambda connection: one_account(connection, visitor, named)
    )
    if not visitor.may("keys.write", found.id):
        raise _unknown_key()
    return found


async def _find(request: ApiRequest, visitor: Visitor, key_id: int, act: Act) -> KeyView:
    """Find a key with which the visitor may do an act. Raise ``NotFound``.

    Keys of administrators are managed by operators only.
    """

    def read(connection: Connection) -> KeyView | None:
        try:
            found = key_by_id(connection, key_id)
        except LookupError:
            return None
        if not visitor.may(act, found.account_id):
            return None
        if visitor.role is None and "admin" in found.scopes:
            return None
        return keys.show(connection, found.id)

    found = await request.services.database.read(read)
    if found is None:
        raise _unknown_key()
    return found


def _author(visitor: Visitor, form: FormValues) -> Author:
    """Return the author of the one act that a form does: its call is that of the form."""
    once = form.text("once")
    if once is None or not is_id(CALL_PREFIX, once):
        return visitor.author()
    return replace(visitor.author(), call_id=once)


def _is_sent_again(connection: Connection, author: Author, account_id: int | None) -> bool:
    """Whether a form has done its act before: reloading the page with a secret sends it again."""
    wanted = AuditFilter(call_id=author.call_id, account_id=account_id)
    return bool(list_events(connection, wanted, limit=1))


def _unknown_key() -> NotFound:
    return NotFound("not_found", "There is no such key.")


def _number(account: Account) -> str:
    return f"id:{account.id}"


def _terms(form: FormValues, zone: str) -> dict[str, Any]:
    """Return the terms of a key as its body has them; an empty field is no limit."""
    return {
        "name": form.text("name") or "",
        "models": form.words("models") or None,
        "expires_at": form.end_of_day("expires_at", ZoneInfo(zone)),
        "spend_limit": form.amount("spend_limit"),
        **{name: form.number(name) for name in LIMITS},
    }


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _scopes(form: FormValues) -> list[str]:
    return [scope for scope in ("inference", "read") if form.text(scope)]


async def _form_page(
    request: ApiRequest,
    visitor: Visitor,
    account: Account,
    values: Mapping[str, str],
    error: TollgateError | None = None,
) -> Response[str]:
    return await page(
        request,
        visitor,
        "key_new.html",
        title=f"A new key of {account.name}",
        status=error.http_status if error else 200,
        account=account,
        values=values,
        problems=problems_of(error),
        mistake=error.message if error else None,
        models=request.services.live.names(),
        once=new_id(CALL_PREFIX),
    )


async def _key_page(
    request: ApiRequest,
    visitor: Visitor,
    key: KeyView,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    row = key_row(key)
    return await page(
        request,
        visitor,
        "key.html",
        title=f"Key {row.prefix}" + (f" “{row.name}”" if row.name else ""),
        status=error.http_status if error else 200,
        row=row,
        values=values or row.entered(visitor.zone),
        problems=problems_of(error),
        mistake=error.message if error else None,
        overlaps=OVERLAPS,
        may_write=visitor.role is not None or row.account == visitor.account,
        models=request.services.live.names(),
        once=new_id(CALL_PREFIX),
    )


async def _secret_page(
    request: ApiRequest, visitor: Visitor, made: keys.NewKeyView
) -> Response[str]:
    return await page(
        request,
        visitor,
        "key_secret.html",
        title="Copy the key now: it is shown only once",
        status=201,
        secret=made["secret"],
        row=key_row(made),
        base_url=str(request.base_url).rstrip("/"),
    )


HANDLERS: Final[list[Any]] = [KeyPages]
