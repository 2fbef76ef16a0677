"""Mistakes in the money path, and the tests that must notice each of them.

``make mutations`` puts every mistake into a copy of the tree and runs the tests named for it; one
that no test notices is an error. A test keeps the texts in step with the source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    """In ``file``, ``right`` becomes ``wrong``; ``tests`` must fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


MUTATIONS = (
    Mutation(
        "accounts are not locked",
        "gateway/ledger/balances.py",
        "    .with_for_update(of=[accounts, keys], key_share=True)\n",
        "",
        "tests/ledger/test_races.py -k fifty_racing",
    ),
    Mutation(
        "accounts are locked in no order",
        "gateway/ledger/balances.py",
        "    .order_by(_WANTED.c.account_id, _WANTED.c.key_id)\n",
        "    .order_by(__import__('sqlalchemy').func.random())\n",
        "tests/ledger/test_races.py -k deadlock",
    ),
    Mutation(
        "a settlement does not wait for the disk",
        "gateway/ledger/writer.py",
        "return not all(isinstance(entry, HoldRequest) and not entry.durable for entry in batch)",
        "return False",
        "tests/ledger/test_power.py -k sqlite",
    ),
    Mutation(
        "the hold of a stream does not wait for the disk",
        "gateway/requests/admit.py",
        "return runs_steps or named or not awaits_whole_answer",
        "return runs_steps or named",
        "tests/failures/test_power.py -k told_of",
    ),
    Mutation(
        "a hold is read but not taken",
        "gateway/ledger/settle.py",
        'delete(holds).where(any_of(holds.c.request_id, "ids")).returning(holds)',
        '__import__("sqlalchemy").select(holds).where(any_of(holds.c.request_id, "ids"))',
        "tests/ledger/test_holds.py tests/ledger/test_races.py -k 'settle or ends'",
    ),
    Mutation(
        "charges are rounded down",
        "gateway/pricing.py",
        "return -(-exact // price.denominator)",
        "return exact // price.denominator",
        "tests/test_pricing.py tests/test_pricing_properties.py",
    ),
    Mutation(
        "prices are floats",
        "gateway/pricing.py",
        "exact += quantity * rate.numerator",
        "exact += int(float(quantity) * float(rate.numerator))",
        "tests/test_pricing.py tests/test_pricing_properties.py",
    ),
    Mutation(
        "a charge is more than its hold",
        "gateway/ledger/settle.py",
        'cost_nanos = min(cost_nanos, row["hold_nanos"])',
        "cost_nanos += 1 if cost_nanos else 0",
        "tests/ledger/test_holds.py tests/ledger/test_extend.py",
    ),
    Mutation(
        "a request is charged at today's price",
        "gateway/ledger/settle.py",
        'charge_nanos(read_price(connection, row["price_id"], prices), usage)',
        "charge_nanos(read_price(connection, __import__('gateway.ledger.prices', fromlist=['x'])"
        '.in_force(connection, now)[row["model"]], prices), usage)',
        "tests/ledger/test_model.py -k sqlite",
    ),
    Mutation(
        "an outcome is acknowledged before it is booked",
        "gateway/requests/settle.py",
        '        reach("before_settle")\n',
        '        await self._outcomes.acknowledge(deliveries)\n        reach("before_settle")\n',
        "tests/failures/test_crashes.py -k before_settle",
    ),
    Mutation(
        "a refund does not lock its account",
        "gateway/ledger/refunds.py",
        "account = lock_accounts(connection, [account_id])[account_id]",
        "from gateway.tables.core import accounts as table; account = connection.execute("
        "select(table).where(table.c.id == account_id)).mappings().one()",
        "tests/ledger/test_races.py -k given_back_once",
    ),
    Mutation(
        "a unit is left out of the rollup",
        "gateway/billing/usage/minutes.py",
        "        *(receipts.c[name] for name in QUANTITIES),\n        func.coalesce(",
        "        *(none.label(name) if name == 'output_tokens' else receipts.c[name]"
        " for name in QUANTITIES),\n        func.coalesce(",
        "tests/billing/test_usage.py",
    ),
    Mutation(
        "charges consume no lots",
        "gateway/ledger/settle.py",
        "    consume(connection, charged)\n",
        "",
        "tests/ledger/test_credit.py",
    ),
    Mutation(
        "budgets do not count what is held",
        "gateway/ledger/holds.py",
        "        bounds.write(connection)\n",
        "",
        "tests/ledger/test_budgets.py",
    ),
    Mutation(
        "the organisations of a batch are not locked",
        "gateway/accounts/locks.py",
        "    .with_for_update(of=organisations, key_share=True)\n)",
        ")",
        "tests/ledger/test_organisations.py -k racing",
    ),
    Mutation(
        "open requests of an account are not counted",
        "gateway/ledger/balances.py",
        'accounts.c.open_requests + bindparam("opened")',
        'accounts.c.open_requests + 0 * bindparam("opened")',
        "tests/ledger/test_concurrency.py",
    ),
    Mutation(
        "a request that ends is still counted as open",
        "gateway/ledger/settle.py",
        'opened=-int(row["service_class"] == COUNTED)',
        "opened=0",
        "tests/ledger/test_concurrency.py",
    ),
    Mutation(
        "a request that failed is free although a part was delivered",
        "gateway/requests/settle.py",
        "billable=bool(streamed.usage.requests),",
        "billable=False,",
        "tests/ledger/test_model.py -k sqlite",
    ),
    Mutation(
        "an extension adds up when it is repeated",
        "gateway/ledger/extend.py",
        'max(extension.hold_nanos - row["hold_nanos"], 0)',
        "extension.hold_nanos",
        "tests/ledger/test_extend.py",
    ),
    Mutation(
        "nobody who books holds the month",
        "gateway/ledger/periods.py",
        '        elif found[0]["state"] != "open":\n',
        '        elif found[0]["state"] == "never":\n',
        "tests/billing/test_close.py -k 'takes_nothing_more or while_it_is_closed'",
    ),
    Mutation(
        "a payment's event is booked as often as it comes",
        "gateway/payments/payments.py",
        "    if noted.first() is None:\n",
        "    if False:\n",
        "tests/payments/test_payments.py -k often",
    ),
    Mutation(
        "the price of a batch is rounded",
        "gateway/pricing.py",
        "                amount_nanos=amount.numerator,\n"
        "                per=component.per * amount.denominator,\n",
        "                amount_nanos=max(int(amount), 1),\n                per=component.per,\n",
        "tests/test_pricing_properties.py -k discounted",
    ),
    Mutation(
        "lines of a batch have no names",
        "gateway/batches/names.py",
        "idempotency=Idempotency.of(name, endpoint.path, line.body),",
        "idempotency=None,",
        "tests/failures/test_batches.py -k again_and_again",
    ),
    Mutation(
        "whoever goes on with a batch does not ask what was placed",
        "gateway/batches/run.py",
        "return last_attempts(batch.id, names)",
        "return {}",
        "tests/failures/test_batches.py -k revoked",
    ),
    Mutation(
        "a batch is held for at the whole price",
        "gateway/requests/quotes.py",
        "self._live.priced(entry.name, now, account_id, submission.service_class)",
        "self._live.priced(entry.name, now, account_id)",
        "tests/gateway/test_batches.py -k half_the_price",
    ),
)


def apply(mutation: Mutation, tree: Path) -> None:
    """Make the mistake in a copy of the tree. Raise ``ValueError`` if its place is gone."""
    path = tree / mutation.file
    source = path.read_text()
    if source.count(mutation.right) != 1:
        raise ValueError(f"{mutation.file} has not just once: {mutation.right!r}")
    path.write_text(source.replace(mutation.right, mutation.wrong))


def survives(mutation: Mutation) -> bool:
    """Say whether the tests named for a mistake all pass with it."""
    with tempfile.TemporaryDirectory(prefix="tg-mutation-") as directory:
        tree = Path(directory) / "tree"
        ignored = shutil.ignore_patterns(".*", "*.pyc", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, tree, ignore=ignored)
        apply(mutation, tree)
        command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {mutation.tests}"
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        run = subprocess.run(
            command, shell=True, cwd=tree, env=environment, capture_output=True, check=False
        )
        if run.returncode not in (0, 1):
            raise RuntimeError(f"{mutation.name}: {run.stdout.decode()[-2000:]}")
        return run.returncode == 0


def main() -> int:
    chosen = [each for each in MUTATIONS if not sys.argv[1:] or sys.argv[1] in each.name]
    left = []
    for mutation in chosen:
        survived = survives(mutation)
        print(f"{'SURVIVED' if survived else 'caught  '}  {mutation.name}", flush=True)
        if survived:
            left.append(mutation)
    print(f"{len(chosen) - len(left)} of {len(chosen)} caught")
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
