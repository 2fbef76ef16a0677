"""Compares the ledger with an independent model, step by step, on both databases.

The model is a few dictionaries without SQL; it predicts every answer. After each step the ledger
must agree with it and reconcile. ``TOLLGATE_SOAK`` (seconds) makes
it run for that long with ever new choices: see ``make soak-ledger``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, func, select

from gateway.accounts.accounts import change_account, create_account
from gateway.accounts.budgets import (
    Budget,
    change_budget,
    create_budget,
    end_budget,
    window_start,
)
from gateway.accounts.keys import create_key
from gateway.accounts.limits import Limit, remove_limit, set_limit
from gateway.checks.moments import microseconds_of
from gateway.ledger.bounds import BudgetExceeded
from gateway.ledger.closed import RequestError
from gateway.ledger.concurrency import Defaults, TooManyConcurrent
from gateway.ledger.discounts import put_discount_in_force
from gateway.ledger.expiry import expire_lots, give_allowances
from gateway.ledger.extend import Ended, Extended, Extension, extend
from gateway.ledger.holds import (
    AccountSuspended,
    CreditInUse,
    Held,
    HoldRequest,
    IdempotencyConflict,
    InsufficientCredit,
    KeySpendLimit,
    Replayed,
    hold,
)
from gateway.ledger.periods import booking_time, month_of
from gateway.ledger.prices import put_in_force, set_price, store_price
from gateway.ledger.reconcile import reconcile
from gateway.ledger.refunds import NotRefundable, refund
from gateway.ledger.settle import Settlement, settle
from gateway.ledger.transfers import TransferConflict, add_credit, chargeback, owed
from gateway.pricing import Component, Price, charge, discounted, quote
from gateway.requests.settle import judge_end, to_settlement
from gateway.requests.streamed import NOT_STREAMED, Streamed
from gateway.sql.database import Database
from gateway.tables.core import accounts, budget_windows, holds, keys, lots, receipts, transfers
from tests.databases import Databases
from tests.ledger.books import PEPPER
from workers.contract.jobs import Cancelled, Completed, Failed, Job, RequestId, Usage, encode

START = datetime(2026, 10, 24, 20, tzinfo=UTC)
LIMITS = Usage(requests=1, input_tokens=10, output_tokens=10)
ACCOUNTS = 2
CONCURRENT = Defaults(account=6, key=4)
STATUS = {
    "completed": "succeeded",
    "failed": "failed",
    "client": "cancelled",
    "deadline": "expired",
    "lost": "failed",
}
"""Ways to end, and the status on the receipt of each."""
SOAK_S = float(os.environ.get("TOLLGATE_SOAK", "0"))


@dataclass
class Hold:
    account: int
    key: int
    amount: int
    tokens: int | None
    price: int
    windows: list[tuple[int, int]]
    service_class: str


@dataclass
class Lot:
    kind: str
    left: int
    priority: int
    expires: datetime | None
    number: int


@dataclass
class Account:
    posted: int = 0
    limit: int = 0
    status: str = "active"
    owed: int = 0
    allowance: int = 0
    lots: list[Lot] = field(default_factory=list)

    def burn(self, amount: int, *, paid_first: bool = False) -> None:
        far = datetime(9999, 1, 1, tzinfo=UTC)
        for lot in sorted(
            self.lots,
            key=lambda lot: (
                paid_first and lot.kind != "paid",
                lot.priority,
                lot.expires or far,
                lot.number,
            ),
        ):
            part = min(amount, lot.left)
            lot.left -= part
            amount -= part

    def credit(self, amount: int, lot: Lot) -> None:
        lot.left = min(amount, max(self.posted + amount, 0))
        self.posted += amount
        self.lots.append(lot)


class Books(RuleBasedStateMachine):
    """Every rule asks the model first, then the books, and compares."""

    database: Database
    runs = 0

    orders = Bundle("orders")

    @initialize()
    def open(self) -> None:
        self.now = START
        type(self).runs += 1
        self.count = type(self).runs << 40
        self.lot_count = 0
        self.model: dict[int, Account] = {}
        self.keys: dict[int, tuple[int, int | None]] = {}
        self.spent: dict[int, int] = {}
        self.holds: dict[str, Hold] = {}
        self.closed: dict[str, tuple[int, int, int, list[tuple[int, int]]]] = {}
        self.given: dict[str, int] = {}
        self.names: dict[tuple[int, str], tuple[str, bytes]] = {}
        self.booked: dict[str, tuple[str, int, int]] = {}
        self.limits: dict[tuple[int, int | None], int] = {}
        self.budgets: dict[int, Budget] = {}
        self.windows: dict[tuple[int, int], list[int]] = {}
        self.prices: dict[int, Price] = {}
        self.cache: dict[int, Price] = {}
        with self.database.transaction() as connection:
            for place in range(ACCOUNTS):
                made = create_account(connection, f"account {self.runs}.{place}")
                self.model[made.id] = Account()
                self._top_up(connection, made.id)
                for limit in (None, 3000):
                    _, key = create_key(connection, made.id, pepper=PEPPER, spend_limit_nanos=limit)
                    self.keys[key.id] = (made.id, limit)
                    self.spent[key.id] = 0
            self.name = f"model {self.runs}"
            self._price(connection, 20, 80)
            put_discount_in_force(connection, self.name, "0.5", self.now)

    def _top_up(self, connection: Connection, account: int) -> None:
        """Initial credit and keys, so that not every request is refused."""
        add_credit(
            connection, account, 12_000, kind="topup", key=f"first:{account}",
            actor="t", reason="t", clock=self.clock,
        )  # fmt: skip
        self.lot_count += 1
        self.model[account].credit(12_000, Lot("paid", 0, 100, None, self.lot_count))

    def _price(self, connection: Connection, read: int, write: int) -> None:
        price = Price((Component("input_token", read), Component("output_token", write)))
        if self.prices:
            period = set_price(
                connection, self.name, price, starts_at=self.now, actor="t", reason="t"
            )
            assert period.price_id is not None
            self.price_id = period.price_id
        else:
            self.price_id = put_in_force(connection, self.name, price, self.now)
        self.prices[self.price_id] = price
        half = discounted(price, Fraction("0.5"))
        self.batch_price_id = store_price(connection, self.name, half)
        self.prices[self.batch_price_id] = half

    @contextmanager
    def act(self) -> Iterator[Connection]:
        with self.database.transaction() as connection:
            yield connection

    def clock(self) -> datetime:
        return self.now

    def held(self, account: int) -> int:
        return sum(each.amount for each in self.holds.values() if each.account == account)

    def key_held(self, key: int) -> int:
        return sum(each.amount for each in self.holds.values() if each.key == key)

    def running(self, account: int, key: int | None = None) -> int:
        return sum(
            each.account == account and key in (None, each.key)
            for each in self.holds.values()
            if each.service_class == "standard"
        )

    def full(self, account: int, key: int) -> bool:
        """Whether the account or the key is at its limit; an account's limit also replaces the
        default of its keys."""
        of_account = self.limits.get((account, None), CONCURRENT.account)
        default = None if (account, None) in self.limits else CONCURRENT.key
        of_key = self.limits.get((account, key), default)
        return self.running(account) >= of_account or (
            of_key is not None and self.running(account, key) >= of_key
        )

    def short(
        self,
        account: int,
        key: int,
        amount: int,
        places: list[tuple[Budget, tuple[int, int]]],
        *,
        crowded: bool = False,
    ) -> type | None:
        """Return what does not cover an amount, in the order of the ledger's checks."""
        has = self.model[account]
        total = has.posted + has.limit
        if amount > total:
            return InsufficientCredit
        if amount > total - self.held(account):
            return CreditInUse
        limit = self.keys[key][1]
        if limit is not None and amount > limit - self.spent[key] - self.key_held(key):
            return KeySpendLimit
        if crowded:
            return TooManyConcurrent
        for budget, place in places:
            spent, held = self.windows.get(place, [0, 0])
            if budget.hard and amount > budget.limit_nanos - spent - held:
                return BudgetExceeded
        return None

    def places(self, account: int, key: int) -> list[tuple[Budget, tuple[int, int]]]:
        return [
            (each, (each.id, microseconds_of(window_start(each.window, each.tz, self.now))))
            for each in self.budgets.values()
            if each.account_id == account and each.key_id in (None, key)
        ]

    # --- what happens ------------------------------------------------------------------------

    @rule(hours=st.sampled_from([1, 7, 30, 24 * 9]))
    def wait(self, hours: int) -> None:
        self.now += timedelta(hours=hours)

    @rule()
    def restart(self) -> None:
        url = self.database.engine.url.render_as_string(hide_password=False)
        self.database.dispose()
        type(self).database = Database(url)
        self.cache.clear()

    @rule(read=st.integers(1, 40), write=st.integers(1, 99))
    def change_price(self, read: int, write: int) -> None:
        self.now += timedelta(seconds=1)
        with self.act() as connection:
            self._price(connection, read, write)

    @rule(
        which=st.integers(0, ACCOUNTS - 1),
        amount=st.integers(1, 9000),
        kind=st.sampled_from(["topup", "grant", "rebate", "correction"]),
        name=st.integers(0, 30),
        days=st.none() | st.integers(1, 40),
        priority=st.none() | st.integers(0, 120),
    )
    def credit(
        self, which: int, amount: int, kind: str, name: int, days: int | None, priority: int | None
    ) -> None:
        account = sorted(self.model)[which]
        key = f"{kind}:{self.name}:{name}"
        lot = "promo" if kind == "grant" else "paid"
        expires = None if days is None else self.now + timedelta(days=days)
        known = self.booked.get(key)
        with self.act() as connection:
            try:
                made = add_credit(
                    connection, account, amount, kind=kind,  # type: ignore[arg-type]
                    key=key, actor="t", reason="t",
                    priority=priority, expires_at=expires, clock=self.clock,
                )  # fmt: skip
            except TransferConflict:
                assert known is not None
                assert known != ("in", account, amount)
                return
        if known is not None:
            assert made.repeated
            assert known == ("in", account, amount)
            return
        assert not made.repeated
        self.booked[key] = ("in", account, amount)
        has = self.model[account]
        self.lot_count += 1
        rank = priority if priority is not None else {"promo": 50, "paid": 100}[lot]
        has.credit(amount, Lot(lot, 0, rank, expires, self.lot_count))
        assert made.posted_after == has.posted
        if kind == "topup":
            back = min(has.owed, max(has.posted - self.held(account), 0))
            has.owed -= back
            has.posted -= back
            has.burn(back, paid_first=True)

    @rule(which=st.integers(0, ACCOUNTS - 1), amount=st.integers(1, 5000), name=st.integers(0, 9))
    def take_back(self, which: int, amount: int, name: int) -> None:
        account = sorted(self.model)[which]
        key = f"chargeback:{self.name}:{name}"
        known = self.booked.get(key)
        with self.act() as connection:
            try:
                made = chargeback(
                    connection, account, amount, key=key, actor="t", reason="t", clock=self.clock
                )
            except TransferConflict:
                assert known is not None
                assert known != ("out", account, amount)
                return
        if known is not None:
            assert made.repeated
            return
        self.booked[key] = ("out", account, amount)
        has = self.model[account]
        covered = min(amount, max(has.posted - self.held(account), 0))
        has.posted -= covered
        has.burn(covered, paid_first=True)
        has.owed += amount - covered
        if covered < amount:
            has.status = "suspended"

    @rule(
        which=st.integers(0, ACCOUNTS - 1),
        limit=st.integers(0, 4000),
        status=st.sampled_from(["active"] * 7 + ["suspended"]),
        allowance=st.sampled_from([0, 700]),
    )
    def change(self, which: int, limit: int, status: str, allowance: int) -> None:
        account = sorted(self.model)[which]
        has = self.model[account]
        with self.act() as connection:
            try:
                change_account(
                    connection, account, credit_limit_nanos=limit,
                    status=status, allowance_nanos=allowance,  # type: ignore[arg-type]
                )  # fmt: skip
            except ValueError:
                assert limit < max(self.held(account) - has.posted, 0)
                return
        assert limit >= max(self.held(account) - has.posted, 0)
        has.limit, has.status, has.allowance = limit, status, allowance

    @rule()
    def calendar(self) -> None:
        """Give the month's allowances, and expire lots."""
        month = month_of(self.now)
        due = [
            account
            for account, has in sorted(self.model.items())
            if has.allowance and has.status == "active"
            and f"free:{account}:{month}" not in self.booked
        ]  # fmt: skip
        with self.act() as connection:
            give_allowances(connection, self.now, clock=self.clock)
            expire_lots(connection, self.now, clock=self.clock)
        year, number = divmod(self.now.year * 12 + self.now.month, 12)
        ends = datetime(year, number + 1, 1, tzinfo=UTC)
        for account in due:
            has = self.model[account]
            self.booked[f"free:{account}:{month}"] = ("in", account, has.allowance)
            self.lot_count += 1
            has.credit(has.allowance, Lot("free", 0, 10, ends, self.lot_count))
        for account, has in self.model.items():
            for lot in sorted(has.lots, key=lambda lot: lot.number):
                if lot.expires is not None and lot.expires <= self.now:
                    part = min(lot.left, max(has.posted - self.held(account), 0))
                    lot.left -= part
                    has.posted -= part

    @rule(
        which=st.integers(0, ACCOUNTS - 1),
        of_key=st.booleans(),
        limit=st.integers(0, 5000),
        window=st.sampled_from(["hour", "day", "month", "total"]),
        tz=st.sampled_from(["UTC", "Asia/Kathmandu", "Europe/Berlin"]),
        hard=st.booleans(),
    )
    @precondition(lambda self: len(self.budgets) < 4)
    def budget(
        self, which: int, of_key: bool, limit: int, window: str, tz: str, hard: bool
    ) -> None:
        account = sorted(self.model)[which]
        key = next(key for key, (owner, _) in self.keys.items() if owner == account)
        with self.act() as connection:
            made = create_budget(
                connection, account, limit, window=window, hard=hard,  # type: ignore[arg-type]
                key_id=key if of_key else None, tz=tz, now=self.now,
            )  # fmt: skip
        self.budgets[made.id] = made

    @rule(
        which=st.integers(0, ACCOUNTS - 1),
        of_key=st.booleans(),
        limit=st.none() | st.integers(1, 8),
    )
    def limit(self, which: int, of_key: bool, limit: int | None) -> None:
        account = sorted(self.model)[which]
        key = next(key for key, (owner, _) in self.keys.items() if owner == account)
        place = account, key if of_key else None
        with self.act() as connection:
            if limit is not None:
                set_limit(connection, Limit(*place, concurrent_max=limit))
                self.limits[place] = limit
            elif place in self.limits:
                remove_limit(connection, account, key_id=place[1])
                del self.limits[place]

    @rule(place=st.integers(0, 3), limit=st.integers(0, 5000), end=st.booleans())
    @precondition(lambda self: self.budgets)
    def rebudget(self, place: int, limit: int, end: bool) -> None:
        id = sorted(self.budgets)[place % len(self.budgets)]
        with self.act() as connection:
            if end:
                end_budget(connection, id)
                del self.budgets[id]
            else:
                self.budgets[id] = change_budget(connection, id, limit_nanos=limit, now=self.now)

    @rule(
        target=orders,
        size=st.integers(1, 3),
        keys=st.lists(st.integers(0, 2 * ACCOUNTS - 1), min_size=3, max_size=3),
        sliced=st.booleans(),
        of_batch=st.sampled_from([False, False, True]),
        name=st.none() | st.integers(0, 5),
        body=st.sampled_from([b"a" * 32, b"b" * 32]),
    )
    def order(
        self,
        size: int,
        keys: list[int],
        sliced: bool,
        of_batch: bool,
        name: int | None,
        body: bytes,
    ) -> object:
        batch, expected = [], []
        price_id = self.batch_price_id if of_batch else self.price_id
        price = self.prices[price_id]
        tokens = 4 if sliced else None
        limits = Usage(requests=1, input_tokens=10, output_tokens=tokens or 10)
        amount = quote(price, limits).total_nanos
        for place in range(size):
            key = sorted(self.keys)[keys[place]]
            account = self.keys[key][0]
            self.count += 1
            id = RequestId(f"req_{self.count:032x}")
            request = HoldRequest(
                request_id=id, account_id=account, key_id=key, model=self.name,
                task="text-generation", price_id=price_id, hold_nanos=amount,
                job=encode(Job(id, str(account), self.name, "text-generation", {}, LIMITS)),
                accepted_at=self.now, deadline_at=self.now + timedelta(days=9999),
                idempotency_key=None if name is None else str(name),
                body_sha256=None if name is None else body, held_tokens=tokens,
                service_class="batch" if of_batch else "standard",
            )  # fmt: skip
            batch.append(request)
            expected.append(self._predict(request))
        with self.act() as connection:
            answers = hold(connection, batch, concurrent=CONCURRENT)
        assert [type(answer) for answer in answers] == [kind for kind, _ in expected]
        for answer, (kind, id_) in zip(answers, expected, strict=True):
            if kind in (Held, Replayed):
                assert answer.request_id == id_  # type: ignore[union-attr]
        return multiple(*(request.request_id for request in batch))

    def _predict(self, request: HoldRequest) -> tuple[type, str]:
        account, key = request.account_id, request.key_id
        if self.model[account].status != "active":
            return AccountSuspended, ""
        name = (account, request.idempotency_key or "")
        if request.idempotency_key is not None and name in self.names:
            known, body = self.names[name]
            same = body == request.body_sha256
            return (Replayed, known) if same else (IdempotencyConflict, "")
        places = self.places(account, key)
        counted = request.service_class == "standard"
        crowded = counted and self.full(account, key)
        short = self.short(account, key, request.hold_nanos, places, crowded=crowded)
        if short is not None:
            return short, ""
        if request.idempotency_key is not None:
            assert request.body_sha256 is not None
            self.names[name] = (request.request_id, request.body_sha256)
        windows = [place for _, place in places]
        for place in windows:
            self.windows.setdefault(place, [0, 0])[1] += request.hold_nanos
        self.holds[request.request_id] = Hold(
            account,
            key,
            request.hold_nanos,
            request.held_tokens,
            request.price_id,
            windows,
            request.service_class,
        )
        return Held, request.request_id

    @rule(id=orders, tokens=st.integers(1, 10))
    def extend(self, id: str, tokens: int) -> None:
        known = self.holds.get(id)
        limits = Usage(requests=1, input_tokens=10, output_tokens=tokens)
        price_id = known.price if known else self.price_id
        amount = quote(self.prices[price_id], limits).total_nanos
        with self.act() as connection:
            (answer,) = extend(connection, [Extension(RequestId(id), amount, tokens)])
        if known is None:
            assert isinstance(answer, Ended)
            return
        more = max(amount - known.amount, 0)
        places = [
            (self.budgets[budget], (budget, start))
            for budget, start in known.windows
            if budget in self.budgets
        ]
        short = self.short(known.account, known.key, more, places)
        assert type(answer) is (short or Extended)
        if short is None and more:
            known.amount, known.tokens = amount, tokens
            # An ended budget no longer limits, but still counts.
            for place in known.windows:
                self.windows[place][1] += more

    @rule(
        ids=st.lists(orders, max_size=3),
        open_ones=st.lists(st.integers(0, 9), min_size=1, max_size=3),
        read=st.integers(0, 14),
        write=st.integers(0, 14),
        end=st.sampled_from(["completed", "completed", "failed", "client", "deadline", "lost"]),
        delivered=st.sampled_from(["nothing", "by the worker", "by the log"]),
    )
    def settle(
        self,
        ids: list[str],
        open_ones: list[int],
        read: int,
        write: int,
        end: str,
        delivered: str,
    ) -> None:
        """End requests in any way: delivered output is charged, and a success in full."""
        known = sorted(self.holds)
        ids = ids + [known[place % len(known)] for place in open_ones if known]
        if not ids:
            return
        usage = Usage(requests=1, input_tokens=read, output_tokens=write)
        batch = [judged(RequestId(id), usage, end=end, delivered=delivered) for id in ids]
        known_to_all = delivered == "by the log" or (delivered == "by the worker" and end != "lost")
        billable = end == "completed" or known_to_all
        expected = self._predict_settled(ids, usage, billable=billable)
        with self.act() as connection:
            answers = settle(
                connection,
                batch,
                now=booking_time(connection, self.clock),
                prices=self.cache,
                retention=timedelta(hours=1),
            )
        got = [None if answer is None else answer.closed.cost_nanos for answer in answers]
        assert got == expected
        ended = {answer.closed.status for answer in answers if answer is not None}
        # The price covers tokens only, so a charge without any is unpriced usage.
        unpriced = billable and not (read or write)
        assert ended <= {"failed" if unpriced else STATUS[end]}

    def _predict_settled(self, ids: list[str], usage: Usage, *, billable: bool) -> list[int | None]:
        # Tokens beyond a slice are held for first, request by request, if credit allows.
        for id in dict.fromkeys(ids):
            known = self.holds.get(id)
            if known is None or not billable or known.tokens is None:
                continue
            if usage.output_tokens > known.tokens:
                tokens = min(usage.output_tokens, LIMITS.output_tokens)
                limits = Usage(requests=1, input_tokens=10, output_tokens=tokens)
                amount = quote(self.prices[known.price], limits).total_nanos
                more = max(amount - known.amount, 0)
                places = [
                    (self.budgets[budget], (budget, start))
                    for budget, start in known.windows
                    if budget in self.budgets
                ]
                if self.short(known.account, known.key, more, places) is None and more:
                    known.amount, known.tokens = amount, tokens
                    for place in known.windows:
                        self.windows[place][1] += more
        costs: list[int | None] = []
        charged: dict[int, int] = {}
        for id in ids:
            known = self.holds.pop(id, None)
            if known is None:
                costs.append(None)
                continue
            cost = 0
            if billable and (usage.input_tokens or usage.output_tokens):
                most = LIMITS.output_tokens if known.tokens is None else known.tokens
                clipped = Usage(
                    requests=1,
                    input_tokens=min(usage.input_tokens, LIMITS.input_tokens),
                    output_tokens=min(usage.output_tokens, most),
                )
                cost = min(charge(self.prices[known.price], clipped).total_nanos, known.amount)
            costs.append(cost)
            charged[known.account] = charged.get(known.account, 0) + cost
            self.model[known.account].posted -= cost
            self.spent[known.key] += cost
            for place in known.windows:
                self.windows[place][0] += cost
                self.windows[place][1] -= known.amount
            self.closed[id] = (known.account, known.key, cost, known.windows)
        for account, amount in charged.items():
            self.model[account].burn(amount)
        return costs

    @rule(
        id=orders,
        any_order=st.integers(0, 9),
        amount=st.none() | st.integers(1, 900),
        name=st.integers(0, 3),
    )
    def refund(self, id: str, any_order: int, amount: int | None, name: int) -> None:
        paid = sorted(id for id, (_, _, cost, _) in self.closed.items() if cost)
        if paid and any_order:
            id = paid[any_order % len(paid)]
        key = f"refund:{self.name}:{id}:{name}"
        known = self.booked.get(key)
        with self.act() as connection:
            try:
                made = refund(
                    connection, id, amount, key=key, actor="t", reason="t", clock=self.clock
                )
            except LookupError:
                assert id not in self.closed
                return
            except TransferConflict:
                assert known is not None
                assert amount not in (None, known[2])
                return
            except NotRefundable:
                left = self.closed[id][2] - self.given.get(id, 0)
                assert known is None
                assert not 0 < (left if amount is None else amount) <= left
                return
        account, spender, cost, windows = self.closed[id]
        if known is not None:
            assert made.repeated
            return
        back = cost - self.given.get(id, 0) if amount is None else amount
        assert made.amount_nanos == back
        self.booked[key] = ("in", account, back)
        self.given[id] = self.given.get(id, 0) + back
        self.lot_count += 1
        self.model[account].credit(back, Lot("paid", 0, 100, None, self.lot_count))
        self.spent[spender] -= back
        for place in windows:
            self.windows[place][0] -= back

    # --- what must always be so ---------------------------------------------------------------

    @invariant()
    def the_books_are_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        with self.database.snapshot() as connection:
            for account, has in self.model.items():
                row = connection.execute(select(accounts).where(accounts.c.id == account)).one()
                assert (row.posted_nanos, row.held_nanos, row.open_requests, row.status) == (
                    has.posted,
                    self.held(account),
                    self.running(account),
                    has.status,
                )
                own = select(keys.c.id, keys.c.open_requests).where(keys.c.account_id == account)
                for key, counted in connection.execute(own).all():
                    assert counted == self.running(account, key)
                assert row.posted_nanos - row.held_nanos >= -row.credit_limit_nanos
                left = connection.execute(
                    select(lots.c.kind, lots.c.remaining_nanos)
                    .where(lots.c.account_id == account)
                    .order_by(lots.c.id)
                ).all()
                assert [tuple(lot) for lot in left] == [(lot.kind, lot.left) for lot in has.lots]
                assert owed(connection, account) == has.owed
            found = {
                (row.budget_id, row.starts_us): [row.spent_nanos, row.held_nanos]
                for row in connection.execute(
                    select(budget_windows).where(
                        budget_windows.c.budget_id.in_([id for id, _ in self.windows])
                    )
                )
            }
            assert found == self.windows
            mine = receipts.c.account_id.in_(list(self.model))
            count = select(func.count())
            assert connection.execute(count.select_from(receipts).where(mine)).scalar_one() == len(
                self.closed
            )
            assert connection.execute(
                count.select_from(holds).where(holds.c.account_id.in_(list(self.model)))
            ).scalar_one() == len(self.holds)

    @invariant()
    def what_is_booked_does_not_change(self) -> None:
        if not hasattr(self, "model"):
            return
        with self.database.snapshot() as connection:
            rows = connection.execute(
                select(transfers).order_by(transfers.c.id.desc()).limit(60)
            ).all()
        seen: dict[int, object] = getattr(self, "seen", {})
        now = {row.id: row for row in rows}
        assert all(now.get(id, row) == row for id, row in seen.items())
        self.seen = now

    def teardown(self) -> None:
        if hasattr(self, "model"):
            with self.database.snapshot() as connection:
                assert reconcile(connection, now=self.now) == []


def judged(request_id: RequestId, usage: Usage, *, end: str, delivered: str) -> Settlement:
    """Decide as the settler does, from the usage that the worker reports or, if it crashed, from
    the event log."""
    log = Streamed(usage) if delivered == "by the log" else NOT_STREAMED
    sent = delivered == "by the worker"
    if end == "completed":
        return to_settlement(request_id, Completed(usage), log)
    if end == "failed":
        return to_settlement(
            request_id, Failed("engine_error", "x", usage=usage, delivered=sent), log
        )
    if end == "lost":
        return judge_end(request_id, "failed", "worker_lost", RequestError("worker_lost", "x"), log)
    reason: Literal["client", "deadline"] = "client" if end == "client" else "deadline"
    return to_settlement(request_id, Cancelled(reason, delivered=sent, usage=usage), log)


@pytest.mark.timeout(SOAK_S * 2 + 900)
@pytest.mark.parametrize("examples", [12, pytest.param(100, marks=pytest.mark.long)])
def test_ledger_behaves_like_the_model(examples: int, databases: Databases) -> None:
    class Run(Books):
        database = Database(databases.make())

    steps = settings(
        max_examples=examples,
        # Twice as many on SQLite, which is faster.
        stateful_step_count=100 if databases.kind == "sqlite" else 50,
        deadline=None,
        derandomize=not SOAK_S,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    ends = time.monotonic() + SOAK_S
    while True:
        run_state_machine_as_test(Run, settings=steps)
        if time.monotonic() >= ends:
            break
    Run.database.dispose()
