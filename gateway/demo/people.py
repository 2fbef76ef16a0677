"""Creates what operators create: accounts, members, keys, credit, budgets, limits and prices.

By the operations of the API and the command line, so everything is checked and recorded as theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection

from gateway.audit_log import Author
from gateway.catalog.schema import CatalogEntry
from gateway.demo.script import Body, DemoAccount, Script
from gateway.ledger.periods import utc_now
from gateway.ledger.transfers import add_credit
from gateway.operations import (
    accounts,
    budgets,
    credit,
    keys,
    limits,
    organisations,
    prices,
    users,
)
from gateway.operations.accounts import AccountBody, AccountChange
from gateway.operations.budgets import BudgetBody, OrganisationBudgetBody
from gateway.operations.credit import ChargebackBody, CreditBody
from gateway.operations.keys import KeyBody
from gateway.operations.limits import RateLimitBody
from gateway.operations.organisations import OrganisationBody
from gateway.operations.prices import PriceBody
from gateway.operations.users import MemberBody, UserBody

DEMO: Final = Author("tollgate demo", "cli")


@dataclass(frozen=True)
class Opened:
    """An account that was created, with its keys by name."""

    of: DemoAccount
    id: int
    key_ids: Mapping[str, int]
    secrets: Mapping[str, str] = field(repr=False)

    @property
    def usable_keys(self) -> list[int]:
        """Numbers of the keys that can order any model without a limit of their own."""
        unlike = {"models", "spend_limit", "scopes", "revoked"}
        return [self.key_ids[key["name"]] for key in self.of.keys if not unlike & set(key)]


def open_accounts(
    connection: Connection,
    script: Script,
    entries: Mapping[str, CatalogEntry],
    *,
    pepper: bytes,
    starts_at: datetime | None,
) -> dict[str, Opened]:
    """Create users, accounts, members, keys and credit. ``starts_at`` is the time of the credit;
    None is now."""
    for user in script.users:
        users.create(connection, DEMO, UserBody.model_validate(user))
    opened = {
        each.name: _open(connection, each, entries, pepper=pepper, starts_at=starts_at)
        for each in script.accounts
    }
    group = script.organisation
    organisations.create(connection, DEMO, OrganisationBody(name=group.name))
    for name in group.accounts:
        organisations.add(connection, DEMO, group.name, name)
    shared = OrganisationBudgetBody.model_validate(group.budget)
    budgets.create_for_organisation(connection, DEMO, group.name, shared)
    return opened


def set_bounds(
    connection: Connection,
    script: Script,
    opened: Mapping[str, Opened],
    entries: Mapping[str, CatalogEntry],
    now: datetime,
) -> None:
    """Create budgets, limits and prices, which would refuse or change requests of older days."""
    for each in opened.values():
        name = each.of.name
        for budget in each.of.budgets:
            key = each.key_ids[budget["key"]] if "key" in budget else None
            wanted = {**budget, "account": name, "key": key}
            budgets.create(connection, DEMO, BudgetBody.model_validate(wanted))
        for limit in each.of.limits:
            if limit.get("model") in (None, *entries):
                bound = RateLimitBody.model_validate({**limit, "account": name})
                limits.put(connection, DEMO, bound)
        for price in each.of.prices:
            _set_price(connection, {**price, "account": name}, entries)
        if each.of.chargeback is not None:
            reversed_ = ChargebackBody.model_validate(each.of.chargeback)
            credit.charge_back(connection, DEMO, name, reversed_)
    for price in script.scheduled_prices:
        change = dict(price)
        starts_at = now + timedelta(days=change.pop("in_days"))
        _set_price(connection, {**change, "from": starts_at.isoformat()}, entries)


def _open(
    connection: Connection,
    given: DemoAccount,
    entries: Collection[str],
    *,
    pepper: bytes,
    starts_at: datetime | None,
) -> Opened:
    body = AccountBody.model_validate({"name": given.name, "credit_limit": given.credit_limit})
    account_id = accounts.create(connection, DEMO, body)["id"]
    if given.zone != "UTC":
        accounts.change(connection, DEMO, given.name, AccountChange(report_tz=given.zone))
    for member in given.members:
        role = MemberBody.model_validate({"role": member["role"]})
        person = {name: member[name] for name in ("name", "email")}
        user = users.create(connection, DEMO, UserBody.model_validate(person))
        users.put_member(connection, DEMO, given.name, str(user["id"]), role)
    ids, secrets = {}, {}
    for key in given.keys:
        wanted = {name: value for name, value in key.items() if name != "revoked"}
        if "models" in wanted:
            wanted["models"] = [model for model in wanted["models"] if model in entries] or None
        name = wanted["name"]
        made = keys.create(
            connection, DEMO, given.name, KeyBody.model_validate(wanted), pepper=pepper
        )
        ids[name], secrets[name] = made["id"], made["secret"]
        if key.get("revoked"):
            keys.revoke(connection, DEMO, made["prefix"])
    for number, one in enumerate(given.credit):
        _credit(connection, given.name, account_id, number, one, starts_at)
    return Opened(given, account_id, ids, secrets)


def _credit(
    connection: Connection,
    name: str,
    account_id: int,
    number: int,
    given: Body,
    starts_at: datetime | None,
) -> None:
    entered: dict[str, Any] = {**given, "reference": f"demo:{name}:{number}"}
    days = entered.pop("expires_in_days", None)
    expires_at = None if days is None else (utc_now() + timedelta(days=days)).isoformat()
    body = CreditBody.model_validate({**entered, "expires_at": expires_at})
    if starts_at is None:
        credit.add(connection, DEMO, name, body)
        return
    moment = starts_at
    add_credit(
        connection,
        account_id,
        body.amount,
        kind=body.kind,
        key=f"{body.kind}:{body.reference}",
        actor=DEMO.name,
        reason=body.reason,
        expires_at=body.expires_at,
        clock=lambda: moment,
    )


def _set_price(connection: Connection, entered: Body, entries: Mapping[str, CatalogEntry]) -> None:
    body = PriceBody.model_validate(entered)
    entry = entries.get(body.model)
    if entry is not None:
        prices.put(connection, DEMO, body, prices.read(entry, body.price, body.minimum))
