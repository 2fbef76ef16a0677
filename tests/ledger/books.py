"""Creates accounts, keys, prices and hold requests for tests of the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select

from gateway.accounts.accounts import Account, create_account, find_account
from gateway.accounts.keys import KeyInfo, create_key
from gateway.ids import new_request_id
from gateway.ledger.concurrency import UNBOUNDED
from gateway.ledger.holds import HoldRequest
from gateway.ledger.periods import booking_time
from gateway.ledger.prices import PriceCache, put_in_force
from gateway.ledger.settle import Closing, Settlement, settle
from gateway.ledger.transfers import add_credit
from gateway.ledger.writer import LedgerWriter
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from gateway.tables.core import holds
from workers.contract.jobs import Job, RequestId, Usage, encode

PEPPER = b"a pepper for tests"
PRICE = Price((Component("input_token", 20), Component("output_token", 80)))
LIMITS = Usage(requests=1, input_tokens=10, output_tokens=10)
HOLD = 1000
"""Cost of LIMITS at PRICE."""
RETENTION = timedelta(hours=1)


@dataclass(frozen=True)
class Books:
    """A database with one account that has a key and some credit, and a price in force."""

    database: Database
    account: Account
    key: KeyInfo
    secret: str
    price_id: int
    prices: PriceCache

    def order(self, **changes: object) -> HoldRequest:
        now = datetime.now(UTC)
        request_id = new_request_id()
        values: dict[str, object] = {
            "request_id": request_id,
            "account_id": self.account.id,
            "key_id": self.key.id,
            "model": "m",
            "task": "text-generation",
            "price_id": self.price_id,
            "hold_nanos": HOLD,
            "job": encode(
                Job(request_id, str(self.account.id), "m", "text-generation", {}, LIMITS)
            ),
            "accepted_at": now,
            "deadline_at": now + timedelta(minutes=1),
        }
        return HoldRequest(**(values | changes))  # type: ignore[arg-type]  # a test's own names

    def writer(self) -> LedgerWriter:
        return LedgerWriter(
            self.database, prices=self.prices, retention=RETENTION, concurrent=UNBOUNDED
        )

    def settle(self, *settlements: Settlement) -> list[Closing | None]:
        with self.database.transaction() as connection:
            return settle(
                connection,
                settlements,
                now=booking_time(connection),
                prices=self.prices,
                retention=RETENTION,
            )

    def balance(self) -> Account:
        with self.database.transaction() as connection:
            return find_account(connection, self.account.id)

    def open_holds(self) -> int:
        with self.database.transaction() as connection:
            return connection.execute(select(func.count()).select_from(holds)).scalar_one()


def open_books(database: Database, *, credit: int, spend_limit: int | None = None) -> Books:
    with database.transaction() as connection:
        account = create_account(connection, f"account {new_request_id()}")
        secret, key = create_key(
            connection, account.id, pepper=PEPPER, spend_limit_nanos=spend_limit
        )
        if credit:
            add_credit(
                connection,
                account.id,
                credit,
                kind="topup",
                key=f"topup:{account.id}",
                actor="test",
                reason="test",
            )
        price_id = put_in_force(connection, "m", PRICE, datetime(2020, 1, 1, tzinfo=UTC))
    return Books(database, account, key, secret, price_id, {})


def done(request_id: RequestId, *, input_tokens: int = 5, output_tokens: int = 5) -> Settlement:
    usage = Usage(requests=1, input_tokens=input_tokens, output_tokens=output_tokens, gpu_us=7)
    return Settlement(request_id, "succeeded", "completed", billable=True, usage=usage)
