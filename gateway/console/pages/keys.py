"""API keys: list, create, rotate, change, revoke. A secret is shown once, on a page of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast, get_args
from zoneinfo import ZoneInfo

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.accounts.keys import KeyStatus, key_by_id
from gateway.accounts.roles import ROLES
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs, no_page, require_proof
from gateway.console.once import author_once, is_sent_again, new_once
from gateway.console.queries import FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.roles import Act
from gateway.console.scope import account_of, one_account
from gateway.console.views.files import TableFile
from gateway.console.views.keys import key_row
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound, TollgateError
from gateway.operations import keys
from gateway.operations.keys import KeyBody, KeyView, MemberKeyBody

STATUSES: Final[tuple[KeyStatus, ...]] = get_args(KeyStatus)
OVERLAPS: Final = (("0", "at once"), ("3600", "1 hour"), ("86400", "1 day"), ("604800", "1 week"))
LIMITS: Final = ("requests_per_minute", "tokens_per_minute", "concurrent")


FILE_COLUMNS: Final = (
    *("id", "prefix", "name", "account", "status", "scopes", "role", "models", "created_at"),
    *("expires_at", "last_used_at", "spent_nanos", "held_nanos", "limit_nanos"),
    *("requests_per_minute", "tokens_per_minute", "concurrent"),
)
LISTS: Final = (
    ListColumns(
        "keys",
        {
            "name": "Name",
            "account": "Account",
            "state": "State",
            "may": "May",
            "spent": "Spent, $",
            "held": "Held, $",
            "limit": "Limit, $",
            "used": "Last used",
            "expires": "Expires",
            "created": "Created",
        },
    ),
)


class FoundKey(NamedTuple):
    view: KeyView
    account_id: int


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
                limit=query.rows,
                cursor=query.text("cursor"),
            )
            return account, found, more

        account, found, more = await request.services.database.report(
            read, account_id=visitor.account_id
        )
        of = f" of {account.name}" if account else ""
        rows = [key_row(each) for each in found]
        return await page(
            request,
            visitor,
            "keys.html",
            lists=LISTS,
            title=f"Keys{of}",
            account=account,
            rows=rows,
            as_file=TableFile("keys", FILE_COLUMNS, rows, is_cut=more is not None),
            statuses=STATUSES,
            filters=query.values,
            narrowed=bool(query.narrowed - {"account"}),
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
        if form.text("admin"):
            await _require_administrator(request, visitor)
        try:
            author = author_once(visitor, form)
            sent = {**_terms(form, visitor.zone), "scopes": _scopes(form)}
            body: KeyBody | MemberKeyBody
            if form.text("admin"):
                body = read_body(KeyBody, _given({**sent, "role": form.text("role")}))
            else:
                body = read_body(MemberKeyBody, _given(sent))

            def make(connection: Connection) -> keys.NewKeyView | None:
                if is_sent_again(connection, author):
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
        key, form = await _find_to_change(request, visitor, key_id), await read_form(request)
        try:
            terms = _terms(form, visitor.zone)
            if form.text("expires_at") == (
                key_row(key.view).entered(visitor.zone)["expires_at"] or None
            ):
                # The form has days only: the same day keeps the moment as it is.
                del terms["expires_at"]
            body = read_body(keys.KeyChange, terms)
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
        key, form = await _find_to_change(request, visitor, key_id), await read_form(request)
        pepper = request.services.pepper
        try:
            author = author_once(visitor, form)
            body = read_body(keys.RotationBody, {"overlap_s": form.number("overlap_s") or 0})

            def make(connection: Connection) -> keys.NewKeyView | None:
                if is_sent_again(connection, author):
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
        await _find_to_change(request, visitor, key_id)
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


async def _find(request: ApiRequest, visitor: Visitor, key_id: int, act: Act) -> FoundKey:
    """Find a key with which the visitor may do an act. Raise ``NotFound``.

    Keys of administrators are managed by operators only.
    """

    def read(connection: Connection) -> FoundKey | None:
        try:
            found = key_by_id(connection, key_id)
        except LookupError:
            return None
        if not visitor.may(act, found.account_id):
            return None
        if visitor.role is None and "admin" in found.scopes:
            return None
        return FoundKey(keys.show(connection, found.id), found.account_id)

    found = await request.services.database.read(read)
    if found is None:
        raise _unknown_key()
    return found


async def _find_to_change(request: ApiRequest, visitor: Visitor, key_id: int) -> FoundKey:
    """Find a key that the visitor may change. Raise ``NotFound``, and ``ProofNeeded`` for a key of
    administrators."""
    found = await _find(request, visitor, key_id, "keys.write")
    if "admin" in found.view["scopes"]:
        await require_proof(request)
    return found


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
    return [scope for scope in ("inference", "read", "admin") if form.text(scope)]


async def _require_administrator(request: ApiRequest, visitor: Visitor) -> None:
    """Raise unless the visitor may create keys of administrators, and has proved who it is."""
    if not visitor.may("admin_keys.write"):
        raise no_page()
    await require_proof(request)


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
        once=new_once(),
        roles=ROLES if visitor.may("admin_keys.write") else (),
    )


async def _key_page(
    request: ApiRequest,
    visitor: Visitor,
    key: FoundKey,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    row = key_row(key.view)
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
        may_write=visitor.may("keys.write", key.account_id),
        models=request.services.live.names(),
        once=new_once(),
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
