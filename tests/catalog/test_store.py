"""The live catalog: reloads, price versions, and several gateways that sell at one price."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select

from gateway.app import reload_on_hangup
from gateway.audit_log import Author
from gateway.catalog import store
from gateway.catalog.problems import CatalogError
from gateway.catalog.reloads import last_load
from gateway.catalog.store import LiveCatalog
from gateway.errors import Unavailable
from gateway.ledger.prices import in_force
from gateway.pricing import format_usd
from gateway.sql.database import Database
from gateway.tables.audit import audit_events
from gateway.tables.core import price_periods, prices

TESTER = Author("test", "system")
Connect = Callable[[str], Database]


class File:
    """A catalog file whose prices are edited."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sell(self, **amounts: str) -> None:
        entries = [
            f"  - name: {name}\n    task: text-to-image\n    engine: echo\n"
            f'    price: [{{unit: image, amount: "{amount}"}}]\n'
            for name, amount in amounts.items()
        ]
        self.path.write_text("models:\n" + "".join(entries))


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "catalog.yaml")


@contextlib.asynccontextmanager
async def kept_fresh(live: LiveCatalog) -> AsyncIterator[None]:
    task = asyncio.create_task(live.keep_fresh())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def now() -> datetime:
    return datetime.now(UTC)


def price_of(live: LiveCatalog, name: str, moment: datetime | None = None) -> str:
    _, price = live.priced(name, moment or now())
    return format_usd(price.components[0].amount_nanos)


def sold_at(live: LiveCatalog, name: str) -> str | None:
    try:
        return price_of(live, name)
    except Unavailable:
        return None


def periods(database: Database, model: str) -> list[int]:
    with database.transaction() as connection:
        return list(
            connection.execute(
                select(price_periods.c.price_id)
                .where(price_periods.c.model == model)
                .order_by(price_periods.c.effective_from)
            ).scalars()
        )


async def test_new_model_is_sold_immediately(
    file: File, database_url: str, connect: Connect
) -> None:
    file.sell(painter="0.01", sketcher="0.002")
    before = int(now().timestamp())

    live = await LiveCatalog.open(file.path, connect(database_url))

    assert live.names() == ("painter", "sketcher")
    assert price_of(live, "painter") == "0.01"
    assert price_of(live, "sketcher") == "0.002"
    assert before <= live.on_sale_since("painter") <= now().timestamp()


async def test_invalid_file_is_not_opened(file: File, sqlite_url: str, connect: Connect) -> None:
    file.sell(painter="0")

    with pytest.raises(CatalogError, match=r"models\[0\]\.price\[0\]\.amount"):
        await LiveCatalog.open(file.path, connect(sqlite_url))


async def test_a_changed_price_is_in_force_when_the_reload_returns(
    file: File, database_url: str, connect: Connect, short_notice: float
) -> None:
    file.sell(painter="0.01", sketcher="0.002")
    database = connect(database_url)
    live = await LiveCatalog.open(file.path, database)
    old_id, old = live.priced("painter", now())
    earlier = now()

    file.sell(painter="0.02", sketcher="0.002")
    async with kept_fresh(live):
        problems = await live.reload(TESTER)

    assert problems == ()
    assert price_of(live, "painter") == "0.02"
    assert live.priced("painter", earlier) == (old_id, old)
    assert live.prices[old_id] == old
    with database.snapshot() as connection:
        loads = select(audit_events.c.after).where(audit_events.c.act == "catalog.load")
        recorded = connection.execute(loads.order_by(audit_events.c.id)).scalars().all()
    change = recorded[-1]["prices"]["painter"]
    assert list(recorded[-1]["prices"]) == ["painter"]
    assert (change["before"], change["after"]) == (old_id, live.priced("painter", now())[0])
    entry = live.entry("painter")
    assert entry is not None
    assert entry.price[0].amount == 20_000_000


async def test_a_reload_without_a_change_makes_no_new_price(
    file: File, database_url: str, connect: Connect, short_notice: float
) -> None:
    file.sell(painter="0.01")
    database = connect(database_url)
    live = await LiveCatalog.open(file.path, database)

    file.sell(painter="0.0100")
    await live.reload(TESTER)

    assert len(periods(database, "painter")) == 1


async def test_an_old_price_that_comes_back_is_the_same_price_in_a_new_period(
    file: File, database_url: str, connect: Connect, short_notice: float
) -> None:
    database = connect(database_url)
    for amount in ("0.01", "0.02", "0.01"):
        file.sell(painter=amount)
        live = await LiveCatalog.open(file.path, database)

    first, second, third = periods(database, "painter")
    with database.transaction() as connection:
        rows = connection.execute(select(prices.c.id)).scalars().all()

    assert price_of(live, "painter") == "0.01"
    assert first == third != second
    # In batches they cost half: 0.005, and 0.01, which is a row already.
    assert {first, second} < set(rows)
    assert len(rows) == 3


async def test_broken_file_changes_nothing_and_is_reported(
    file: File, sqlite_url: str, connect: Connect
) -> None:
    file.sell(painter="0.01")
    database = connect(sqlite_url)
    live = await LiveCatalog.open(file.path, database)

    file.sell(painter="0.5", sketcher="cheap")
    problems = await live.reload(TESTER)
    with database.snapshot() as connection:
        refused = last_load(connection)
    file.path.unlink()
    missing = await live.reload(TESTER)

    assert [problem.path for problem in problems] == ["models[1].price[0].amount"]
    assert refused is not None
    assert (refused.act, refused.actor) == ("catalog.refuse", TESTER.name)
    assert refused.after == {"problems": 1, "first": str(problems[0])}
    assert [problem.message for problem in missing] == ["cannot be read: No such file or directory"]
    assert live.names() == ("painter",)
    assert price_of(live, "painter") == "0.01"


async def test_a_hangup_signal_reloads_and_a_broken_file_is_logged(
    file: File,
    sqlite_url: str,
    connect: Connect,
    short_notice: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file.sell(painter="0.01")
    live = await LiveCatalog.open(file.path, connect(sqlite_url))

    with reload_on_hangup(live):
        file.sell(painter="nothing")
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(20):
            while "catalog not reloaded" not in caplog.text:  # noqa: ASYNC110  # there is no event to await
                await asyncio.sleep(0.01)
        assert price_of(live, "painter") == "0.01"

        file.sell(painter="0.02")
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(20):
            while price_of(live, "painter") != "0.02":  # noqa: ASYNC110  # there is no event to await
                await asyncio.sleep(0.01)

    assert (
        f"{file.path}:5:27: models[0].price[0].amount of painter: 'nothing' is not a valid"
        in caplog.text
    )


async def test_a_model_that_is_taken_off_sale_can_still_be_settled(
    file: File, sqlite_url: str, connect: Connect
) -> None:
    file.sell(painter="0.01", sketcher="0.002")
    live = await LiveCatalog.open(file.path, connect(sqlite_url))
    price_id, price = live.priced("painter", now())

    file.sell(sketcher="0.002")
    await live.reload(TESTER)
    restarted = await LiveCatalog.open(file.path, connect(sqlite_url))

    assert live.entry("painter") is None
    assert [entry.name for entry in live.entries()] == ["sketcher"]
    for each in (live, restarted):
        assert set(each.names_ever) == {"painter", "sketcher"}
        assert each.prices[price_id] == price


async def test_gateways_that_start_together_agree_on_every_price(
    file: File, database_url: str, connect: Connect
) -> None:
    file.sell(**{f"model-{number}": f"0.{number:03d}" for number in range(1, 31)})

    gateways = await asyncio.gather(
        *(LiveCatalog.open(file.path, connect(database_url)) for _ in range(3)),
    )

    moment = now()
    for name in gateways[0].names():
        assert len({gateway.priced(name, moment)[0] for gateway in gateways}) == 1


async def test_a_price_that_another_gateway_changed_is_charged_and_shown(
    file: File, postgresql_url: str, connect: Connect, short_notice: float
) -> None:
    file.sell(painter="0.01")
    here = await LiveCatalog.open(file.path, connect(postgresql_url))
    there = await LiveCatalog.open(file.path, connect(postgresql_url))

    async with kept_fresh(there):
        file.sell(painter="0.02")
        await here.reload(TESTER)

        async with asyncio.timeout(20):
            while sold_at(there, "painter") != "0.02":  # noqa: ASYNC110  # there is no event to await
                await asyncio.sleep(0.01)
        assert [entry.price[0].amount for entry in there.entries()] == [20_000_000]


async def test_gateway_that_cannot_read_prices_stops_accepting_requests(
    file: File, postgresql_url: str, connect: Connect, short_notice: float
) -> None:
    file.sell(painter="0.01")
    live = await LiveCatalog.open(file.path, connect(postgresql_url))

    await asyncio.sleep(short_notice * 1.1)
    with pytest.raises(Unavailable) as refused:
        live.priced("painter", now())
    await live.refresh()

    assert refused.value.code == "prices_unknown"
    assert price_of(live, "painter") == "0.01"


async def test_single_gateway_accepts_requests_without_reading_prices_again(
    file: File, sqlite_url: str, connect: Connect, short_notice: float
) -> None:
    file.sell(painter="0.01")
    live = await LiveCatalog.open(file.path, connect(sqlite_url))

    await asyncio.sleep(short_notice * 1.1)

    assert price_of(live, "painter") == "0.01"


async def test_a_model_that_was_never_on_sale_has_no_price(
    file: File, sqlite_url: str, connect: Connect
) -> None:
    file.sell(painter="0.01")
    live = await LiveCatalog.open(file.path, connect(sqlite_url))

    with pytest.raises(Unavailable) as refused:
        live.priced("sculptor", now())

    assert refused.value.code == "no_price"


@pytest.mark.parametrize(("backend", "count"), [("sqlite", 1), ("sqlite", 2), ("postgresql", 3)])
async def test_the_price_of_every_request_was_in_force_when_it_was_accepted(
    file: File,
    request: pytest.FixtureRequest,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    count: int,
) -> None:
    url: str = request.getfixturevalue(f"{backend}_url")
    monkeypatch.setattr(store, "REFRESH_S", 0.02)
    monkeypatch.setattr(store, "NOTICE_S", 1.0)
    file.sell(painter="0.01")
    gateways = [
        await LiveCatalog.open(file.path, connect(url), shared=count > 1) for _ in range(count)
    ]
    accepted: list[tuple[datetime, int]] = []
    stop = asyncio.Event()

    async def sell(live: LiveCatalog) -> None:
        while not stop.is_set():
            moment = now()
            # On a busy machine a gateway may lose touch for a moment, and then sells nothing.
            with contextlib.suppress(Unavailable):
                accepted.append((moment, live.priced("painter", moment)[0]))
            await asyncio.sleep(0.001)

    async with contextlib.AsyncExitStack() as stack:
        for live in gateways:
            await stack.enter_async_context(kept_fresh(live))
        sellers = [asyncio.create_task(sell(live)) for live in gateways]
        for amount in ("0.02", "0.03"):
            file.sell(painter=amount)
            # All concurrently, as when the file is replaced and each gets its SIGHUP.
            await asyncio.gather(*(live.reload(TESTER) for live in gateways))
        stop.set()
        await asyncio.gather(*sellers)

    with connect(url).transaction() as connection:
        for moment, price_id in accepted[::7]:
            assert in_force(connection, moment)["painter"] == price_id
    assert len({price_id for _, price_id in accepted}) == 3
