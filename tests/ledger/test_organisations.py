"""Budgets of organisations: exact over all of their accounts, also in races."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import pytest
from sqlalchemy import Connection, func, select

from gateway.accounts.allotments import Overallotted
from gateway.accounts.budgets import (
    Budget,
    budget_states,
    change_budget,
    create_budget,
    create_organisation_budget,
    end_budget,
)
from gateway.accounts.organisations import (
    AlreadyMember,
    OrganisationExists,
    accounts_at,
    add_account,
    create_organisation,
    find_organisation,
    remove_account,
    rename_organisation,
)
from gateway.billing.corrections import Correction, post
from gateway.ledger.bounds import BudgetExceeded
from gateway.ledger.extend import Extended, Extension, extend
from gateway.ledger.holds import Held, HoldRequest, hold
from gateway.ledger.reconcile import reconcile
from gateway.ledger.refunds import refund
from gateway.sql.database import Database
from gateway.tables.core import budget_windows
from tests.ledger.books import HOLD, Books, done, open_books


def group(database: Database, *members: Books, name: str = "group") -> int:
    with database.transaction() as connection:
        made = create_organisation(connection, name)
        for each in members:
            add_account(connection, made.id, each.account.id)
    return made.id


def pair(database: Database) -> tuple[int, Books, Books]:
    one, other = (open_books(database, credit=100 * HOLD) for _ in range(2))
    return group(database, one, other), one, other


def limited(database: Database, organisation_id: int, limit_nanos: int) -> Budget:
    with database.transaction() as connection:
        return create_organisation_budget(
            connection, organisation_id, limit_nanos, window="total", name="whole"
        )


def held(database: Database, *orders: HoldRequest) -> list[bool]:
    with database.transaction() as connection:
        return [isinstance(answer, Held) for answer in hold(connection, orders)]


def used(database: Database, budget: Budget) -> tuple[int, int]:
    with database.transaction() as connection:
        (state,) = budget_states(connection, [budget], datetime.now(UTC))
    return state.spent_nanos, state.held_nanos


def agree(database: Database) -> bool:
    with database.transaction() as connection:
        return reconcile(connection, now=datetime.now(UTC)) == []


def test_budget_counts_the_requests_of_all_accounts_and_names_itself(database: Database) -> None:
    group_id, one, other = pair(database)
    stranger = open_books(database, credit=100 * HOLD)
    budget = limited(database, group_id, 3 * HOLD)

    with database.transaction() as connection:
        answers = hold(
            connection,
            [one.order(), other.order(), one.order(), other.order(), stranger.order()],
        )

    assert [type(each) for each in answers] == [Held, Held, Held, BudgetExceeded, Held]
    refused = answers[3]
    assert isinstance(refused, BudgetExceeded)
    assert (refused.budget, refused.budget.organisation) == (budget, "group")
    assert used(database, budget) == (0, 3 * HOLD)
    assert agree(database)


def test_account_that_leaves_counts_until_its_requests_end(database: Database) -> None:
    group_id, one, other = pair(database)
    budget = limited(database, group_id, 2 * HOLD)
    running = one.order(held_tokens=5)
    assert held(database, running) == [True]

    with database.transaction() as connection:
        remove_account(connection, group_id, one.account.id)
        # Elsewhere, it counts in budgets of that organisation as well.
        made = create_organisation(connection, "another")
        add_account(connection, made.id, one.account.id)
        create_organisation_budget(connection, made.id, 50 * HOLD, window="total")

    assert held(database, one.order(), other.order(), other.order()) == [True, True, False]
    longer = Extension(running.request_id, running.hold_nanos + 1, 6)
    with database.transaction() as connection:
        assert isinstance(extend(connection, [longer])[0], BudgetExceeded), "no room is left"
        change_budget(connection, budget.id, limit_nanos=3 * HOLD)
        assert extend(connection, [longer]) == [Extended()]
    assert used(database, budget) == (0, 2 * HOLD + 1)
    one.settle(done(running.request_id))
    assert used(database, budget) == (500, HOLD)
    with database.transaction() as connection:
        refund(connection, running.request_id, 100, key="r", actor="test", reason="test")
        fix = Correction(running.request_id, one.account.id, 400, 300)
        assert post(connection, [fix], reference="c", actor="test", reason="test") == 100
    assert used(database, budget) == (300, HOLD)
    assert agree(database)


def test_ended_budget_limits_nothing_and_still_counts_its_requests(database: Database) -> None:
    group_id, one, other = pair(database)
    budget = limited(database, group_id, HOLD)
    order = one.order()
    assert held(database, order, other.order()) == [True, False]

    with database.transaction() as connection:
        end_budget(connection, budget.id)

    assert held(database, other.order()) == [True]
    one.settle(done(order.request_id))
    assert used(database, budget) == (500, 0)
    assert agree(database)


def test_account_belongs_to_one_organisation_at_a_time(database: Database) -> None:
    group_id, one, other = pair(database)
    second = group(database, name="second")

    with database.transaction() as connection:
        with pytest.raises(AlreadyMember, match="belongs to 'group'"):
            add_account(connection, second, one.account.id)
        before = datetime.now(UTC)
        remove_account(connection, group_id, one.account.id)
        add_account(connection, second, one.account.id)
        with pytest.raises(LookupError, match="not a member"):
            remove_account(connection, group_id, one.account.id)

        assert accounts_at(connection, group_id) == [other.account.id]
        assert accounts_at(connection, group_id, before) == [one.account.id, other.account.id]
        assert accounts_at(connection, second) == [one.account.id]
        assert accounts_at(connection, second, before) == []


def test_organisations_have_names_that_are_taken_once_and_are_no_numbers(
    database: Database,
) -> None:
    group_id = group(database)

    with database.transaction() as connection:
        with pytest.raises(OrganisationExists):
            create_organisation(connection, "group")
        with pytest.raises(ValueError, match="organisations are found by number"):
            create_organisation(connection, "17")
        assert rename_organisation(connection, group_id, "group").name == "group"
        assert rename_organisation(connection, group_id, "renamed").name == "renamed"
        assert find_organisation(connection, str(group_id)).name == "renamed"
        with pytest.raises(LookupError, match="unknown organisation"):
            find_organisation(connection, "group")


def test_budgets_of_accounts_sum_to_no_more_than_that_of_the_organisation(
    database: Database,
) -> None:
    group_id, one, other = pair(database)
    outside = open_books(database, credit=0)
    budget = limited(database, group_id, 10)

    def allot(connection: Connection, books: Books, nanos: int) -> Budget:
        return create_budget(connection, books.account.id, nanos, window="total")

    with database.transaction() as connection:
        first = allot(connection, one, 6)
        second = allot(connection, other, 4)
        # Neither another window or model, nor a key's or a soft budget takes anything up.
        create_budget(connection, one.account.id, 99, window="day")
        create_budget(connection, one.account.id, 99, window="total", model="m")
        create_budget(connection, one.account.id, 99, window="total", key_id=one.key.id)
        soft = create_budget(connection, one.account.id, 99, window="total", hard=False)
        allot(connection, outside, 99)

    def refused(change: object) -> bool:
        with pytest.raises(Overallotted, match="of its budget"), database.transaction() as to:
            change(to)  # type: ignore[operator]  # a lambda
        return True

    assert refused(lambda to: allot(to, one, 1))
    assert refused(lambda to: change_budget(to, first.id, limit_nanos=7))
    assert refused(lambda to: change_budget(to, soft.id, hard=True))
    assert refused(lambda to: change_budget(to, budget.id, limit_nanos=9))
    assert refused(lambda to: create_organisation_budget(to, group_id, 9, window="total"))
    assert refused(lambda to: add_account(to, group_id, outside.account.id))
    with database.transaction() as connection:
        change_budget(connection, budget.id, overallot=True)
        allot(connection, one, 1)
        add_account(connection, group_id, outside.account.id)
    assert refused(lambda to: change_budget(to, budget.id, overallot=False))
    with database.transaction() as connection:
        end_budget(connection, second.id)
        with pytest.raises(ValueError, match="not allotted"):
            change_budget(connection, first.id, overallot=True)


def test_racing_accounts_never_exceed_the_budget_of_their_organisations(
    database: Database,
) -> None:
    """Each batch has accounts of two organisations, in turns, and settles what it held."""
    members = [open_books(database, credit=1000 * HOLD) for _ in range(6)]
    budgets = [
        limited(database, group(database, *members[start::2], name=f"group {start}"), 10 * HOLD + 1)
        for start in range(2)
    ]
    barrier = threading.Barrier(len(members))
    errors: list[BaseException] = []
    admitted = [0, 0]

    def run(place: int) -> None:
        own, next_one = members[place], members[(place + 1) % len(members)]
        barrier.wait()
        try:
            for round in range(8):
                orders = [(place % 2, own.order()), ((place + 1) % 2, next_one.order())]
                orders = orders[:: 1 if round % 2 else -1]
                answers = held(database, *(order for _, order in orders))
                taken = [each for each, yes in zip(orders, answers, strict=True) if yes]
                for group_place, _ in taken:
                    admitted[group_place] += 1
                if round < 4:
                    own.settle(*(done(each.request_id, input_tokens=0) for _, each in taken))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert all(
        spent + held <= 10 * HOLD + 1 for spent, held in (used(database, b) for b in budgets)
    )
    assert all(number >= 10 for number in admitted), "as many as fit"
    assert agree(database)
    with database.transaction() as connection:
        total = select(func.count()).select_from(budget_windows)
        assert connection.execute(total).scalar_one() == 2
