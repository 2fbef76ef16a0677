"""Groups of accounts whose stored amounts are compared on one snapshot.

The budgets of an organisation count the requests of all accounts that were ever its members, so
these are one group, with all organisations of which they were members.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from sqlalchemy import Connection, select

from gateway.ledger.proof.carry import Carry
from gateway.ledger.proof.snapshots import Snapshots
from gateway.tables.archives import archived_charges
from gateway.tables.core import accounts
from gateway.tables.organisations import organisation_accounts

GROUP: Final = 50
"""Accounts of a group without an organisation."""

REMOVED: Final = ("removing", "removed", "restoring")
"""States of archives in which receipts of the month can be in files only."""


def account_groups(snapshots: Snapshots) -> Iterator[Sequence[int]]:
    """Yield the numbers of all customer accounts in groups."""
    with snapshots.open() as connection:
        joined = _organised(connection)
    yield from {id(group): group for group in joined.values()}.values()
    number = accounts.c.id
    query = select(number).where(accounts.c.kind == "customer").order_by(number).limit(GROUP)
    after = 0
    while True:
        with snapshots.open() as connection:
            ids = connection.execute(query.where(number > after)).scalars().all()
        if not ids:
            return
        if alone := [each for each in ids if each not in joined]:
            yield alone
        after = ids[-1]


def group_of(connection: Connection, account_id: int) -> Sequence[int]:
    """Return the group of an account, or the account alone."""
    return _organised(connection).get(account_id, [account_id])


def carried_alike(
    connection: Connection, ids: Sequence[int], carries: Mapping[int, Carry]
) -> Mapping[int, Carry]:
    """Return the carried sums from which a group can be proven together, or none.

    What was archived of an organisation's budget is not known by account. So either all accounts
    that have requests in an archived month have carried it, or none has.
    """
    latest = max((carry.month for carry in carries.values()), default="")
    behind = [each for each in ids if each not in carries or carries[each].month < latest]
    if not behind or _organised(connection).keys().isdisjoint(ids):
        return carries
    archived = select(archived_charges.c.account_id, archived_charges.c.month).where(
        archived_charges.c.account_id.in_(behind), archived_charges.c.month <= latest
    )
    for account_id, month in connection.execute(archived.distinct()):
        if account_id not in carries or carries[account_id].month < month:
            return {}
    return carries


def _organised(connection: Connection) -> dict[int, list[int]]:
    """Return account → its group, of the accounts that were ever in an organisation."""
    members: defaultdict[int, set[int]] = defaultdict(set)
    stays = organisation_accounts.c
    query = select(stays.organisation_id, stays.account_id).distinct()
    for organisation_id, account_id in connection.execute(query):
        members[organisation_id].add(account_id)
    found: dict[int, list[int]] = {}
    for ids in members.values():
        joined = {*ids, *(other for each in ids if each in found for other in found[each])}
        group = sorted(joined)
        found.update(dict.fromkeys(group, group))
    return found
