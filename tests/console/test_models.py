"""Models: prices for an order of any size, comparisons, the calculator, history, and the picker."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from html import unescape
from pathlib import Path

import pytest

from gateway.catalog.picking.typical import typical_nanos, typical_usage
from gateway.catalog.schema import CatalogEntry
from gateway.checks.moments import read_moment
from gateway.console.views.formats import DASH, GROUP_SPACE, usd
from gateway.ledger.prices import price_periods_of, put_in_force, read_price, set_price
from gateway.pricing import Component, Price, charge, discounted, format_usd, quote
from tests.console.reading import number, rows_of
from tests.console.seeding import seeded_database
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.servers import queue_server
from tests.stack import wait_for
from workers.contract.jobs import Usage


@pytest.fixture(scope="module")
def own(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Installation]:
    directory = tmp_path_factory.mktemp("models")
    url = Databases("sqlite", directory, postgres).make()
    with installed(directory / "home", url, valkey) as made:
        yield made


@pytest.fixture(scope="module")
def owner(own: Installation) -> Browser:
    return own.visitor("owner")


def entry_of(own: Installation, name: str) -> CatalogEntry:
    entry = own.client.app.state.services.live.entry(name)
    assert isinstance(entry, CatalogEntry)
    return entry


def test_call_is_offered_in_each_language(owner: Browser) -> None:
    page = owner.get("/console/models/echo").text
    copies = [unescape(each) for each in re.findall(r'data-copy="([^"]*)"', page)]

    for language, word in (("curl", "curl "), ("Python", "httpx"), ("JavaScript", "fetch(")):
        assert f"<summary>{language}</summary>" in page
        (copied,) = [each for each in copies if word in each]
        assert '"echo"' in copied or "'echo'" in copied
        assert "/v1/chat/completions" in copied
        assert "TOLLGATE_API_KEY" in copied


def test_list_has_the_speed_of_the_newest_requests(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> None:
    directory = tmp_path_factory.mktemp("speeds")
    url, _ = seeded_database(directory, postgres, requests=200)
    with installed(directory / "home", url, valkey) as made:
        operator = made.visitor("operator")
        file = operator.get("/console/models?as=csv").text
        page = text_of(operator.get("/console/models").text)
        failures = operator.get("/console/failures?model=echo").text

    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(file))}
    measured = [row for row in rows.values() if row["success"]]
    assert measured
    for row in measured:
        assert 0 < float(row["median_s"]) <= float(row["p95_s"])
        assert 0 < float(row["success"]) <= 1
    assert "Context" in page
    assert set(re.findall(r'data-label="Model">([^<]+)<', failures)) <= {"echo"}


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", "", re.sub(r"</(t[dh]|p)>", " ", html))).split())


def models_of(html: str) -> list[str]:
    return re.findall(r'class="open" href="/console/models/([^"]+)"', html)


def test_prices_are_for_the_order_that_is_chosen(own: Installation, owner: Browser) -> None:
    usual = format_usd(typical_nanos(entry_of(own, "echo"), lambda _: None) or 0)
    assert f" {usual} " in text_of(owner.get("/console/models?q=&task=text-generation").text)

    page = owner.get("/console/models?input_tokens=2,000&output_tokens=100").text

    wanted = quote(
        entry_of(own, "echo").selling_price,
        Usage(requests=1, input_tokens=2000, output_tokens=100),
    )
    assert format_usd(wanted.total_nanos) == "0.000048"
    assert " 0.000048 2000 input tokens, 100 output tokens" in text_of(page)
    assert owner.get("/console/models?images=many").status_code == 400


def test_list_has_licences_and_prices_in_a_batch(own: Installation) -> None:
    operator, catalog = own.visitor("operator"), own.settings.catalog
    assert catalog is not None
    before = catalog.read_text()
    catalog.write_text(before.replace("batch: false", "batch: false\n    license: apache-2.0"))
    assert operator.post("/console/catalog/reload").status_code == 303

    file = operator.get("/console/models?as=csv&output_tokens=100&input_tokens=2000").text
    page = text_of(operator.get("/console/models?output_tokens=100&input_tokens=2000").text)
    catalog.write_text(before)
    assert operator.post("/console/catalog/reload").status_code == 303

    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(file))}
    half = quote(
        discounted(entry_of(own, "echo").selling_price, Fraction(1, 2)),
        Usage(requests=1, input_tokens=2000, output_tokens=100),
    ).total_nanos
    assert rows["echo"]["batch"] == format_usd(half)
    assert (rows["brief"]["batch"], rows["brief"]["license"]) == ("", "apache-2.0")
    assert f" 0.000048 2000 input tokens, 100 output tokens {format_usd(half)} " in page
    assert " apache-2.0 " in page


def test_availability_is_unknown_since_the_queue_server_was_last_read(
    tmp_path: Path, postgres: str
) -> None:
    url = Databases("sqlite", tmp_path, postgres).make()
    with ExitStack() as queue:
        address = queue.enter_context(queue_server("valkey"))
        with installed(tmp_path / "home", url, address) as made:
            owner, health = made.visitor("owner"), made.client.app.state.services.requests.health
            wait_for(lambda: health.healthy, "the queue server to be read")
            assert "unknown" not in owner.get("/console/models").text
            queue.close()
            wait_for(lambda: not health.healthy, "the queue server to be missed")

            page = owner.get("/console/models").text
            filtered = text_of(owner.get("/console/models?available=yes").text)
            file = owner.get("/console/models?available=yes&as=csv").text

    rows = list(csv.DictReader(io.StringIO(file)))
    assert [(row["available"], row["reason"]) for row in rows] == [("", "")] * 4
    assert "4 models; which are available is unknown" in filtered
    assert ", so the list has those that are not available, too." in filtered
    assert "those that are not available" not in text_of(page)
    known = re.search(r'availability unknown since <time datetime="([^"]+)"', page)
    assert known
    assert timedelta(0) < datetime.now(UTC) - read_moment(known[1]) < timedelta(minutes=1)
    assert "4 models; which are available is unknown" in text_of(page)


def test_availability_is_unknown_since_a_start_without_a_queue_server(
    tmp_path: Path, postgres: str
) -> None:
    url = Databases("sqlite", tmp_path, postgres).make()
    with installed(tmp_path / "home", url, "unix:///nonexistent") as made:
        owner = made.visitor("owner")
        pages = {
            path: text_of(owner.get(f"/console/{path}").text)
            for path in (
                "models",
                "models/echo",
                "compare?model=echo&model=brief",
                "pick?q=echo&available=yes",
            )
        }

    for path, page in pages.items():
        assert "availability unknown since this gateway started" in page, path
        # Beside the band, at each model.
        assert page.count("unknown") > 1, path
        assert "Not available now" not in page
        assert "Runs here today" not in page
    assert "Best fit" in pages["pick?q=echo&available=yes"]


def test_models_are_filtered(owner: Browser) -> None:
    def found(query: str) -> list[str]:
        return sorted(models_of(owner.get(f"/console/models?{query}").text))

    assert found("makes=video") == ["Veo3"]
    assert found("route=upstream") == ["Veo3"]
    assert found("route=echo") == ["brief", "echo", "slow"]
    assert found("most=0.01") == ["brief", "echo", "slow"]
    assert found("language=tlh") == []
    assert "No model fits these filters" in owner.get("/console/models?language=tlh").text
    assert models_of(owner.get("/console/models?sort=-typical&output_tokens=9").text)[0] == "Veo3"


def test_up_to_four_models_are_compared(owner: Browser) -> None:
    page = owner.get("/console/compare?model=echo&model=slow&model=nothing&model=Veo3").text

    heads = re.findall(r'<th scope="col"><a href="/console/models/([^"]+)"', page)
    assert heads == ["echo", "slow", "Veo3"]
    assert f"Promise {DASH} ttft 10000 ms, tpot 1 ms {DASH}" in text_of(page)
    five = "&".join(f"model={name}" for name in ("echo", "slow", "brief", "Veo3", "ECHO"))
    assert "left out" not in owner.get(f"/console/compare?{five}").text
    assert "Tick up to four" in owner.get("/console/compare").text


def test_calculator_prices_what_was_entered(own: Installation, owner: Browser) -> None:
    path = "/console/models/echo?n_input_token=12,345&n_output_token=678"
    quoted = owner.get(path).text.partition('id="quote"')[2].partition("</table>")[0]

    wanted = charge(
        entry_of(own, "echo").selling_price,
        Usage(requests=1, input_tokens=12_345, output_tokens=678),
    )
    shown = text_of(quoted)
    for line in wanted.lines:
        assert f"{line.quantity} {format_usd(line.amount_nanos)}" in shown
    assert f"Together, exact {format_usd(wanted.total_nanos)}" in shown
    wrong = owner.get("/console/models/echo?n_output_token=minus")
    assert wrong.status_code == 200
    assert "send a whole number from 0" in unescape(wrong.text)


def test_history_has_the_price_of_a_usual_order_at_each_version(own: Installation) -> None:
    dearer = Price((Component("input_token", 30, 1), Component("output_token", 90, 1)))
    starts_at = datetime.now(UTC) + timedelta(hours=3)
    with own.database.transaction() as connection:
        set_price(
            connection, "echo", dearer, starts_at=starts_at, actor="ann", reason="contract 17"
        )
        set_price(
            connection, "echo", dearer, account_id=own.other.id, starts_at=starts_at, actor="ann",
            reason="theirs",
        )  # fmt: skip
        periods = price_periods_of(connection, model="echo")
        prices = {
            each.effective_from: read_price(connection, each.price_id, {})
            for each in periods
            if each.account_id == 0 and each.price_id is not None
        }

    page = own.visitor("operator").get("/console/models/echo").text
    figure = page.partition('id="history"')[2].partition("</figure>")[0]
    rows = re.findall(r'data-x="([^"]+)".*?data-label="Usual order, \$">(.*?)</td>', figure)

    entry = entry_of(own, "echo")
    expected = {
        at: format_usd(typical_nanos(entry.at(price), lambda _: None) or 0)
        for at, price in prices.items()
    }
    assert {datetime.fromisoformat(at): text_of(cell) for at, cell in rows} == expected
    assert len(expected) == 2
    assert "data-steps" in figure
    assert "contract 17" in figure
    assert "ann" in figure
    seen = own.visitor("owner").get("/console/models/echo").text
    assert "contract 17" in seen
    assert "theirs" not in seen


def test_model_that_is_no_longer_sold_keeps_its_history(own: Installation, owner: Browser) -> None:
    price = Price((Component("output_token", 80_000, per=1_000_000),))
    with own.database.transaction() as connection:
        put_in_force(connection, "bygone", price, datetime.now(UTC) - timedelta(days=9))

    page = owner.get("/console/models/bygone")

    assert page.status_code == 200
    assert "No longer sold" in page.text
    assert "$0.00008 / 1 000 000 output tokens" in page.text.replace(GROUP_SPACE, " ")
    assert "Set a price" not in own.visitor("operator").get("/console/models/bygone").text
    assert owner.get("/console/models/never").status_code == 404


def test_use_of_a_model_is_that_of_the_account(owner: Browser) -> None:
    page = text_of(owner.get("/console/models/echo").text)

    assert "Not at all by acme." in page
    assert "No worker has announced it" in page


def test_picker_answers_what_quotes_say(own: Installation, owner: Browser) -> None:
    page = owner.get("/console/pick?task=text-generation&budget=0.05&results=250").text

    rows = {row.cells[0]: row.labelled for row in rows_of(page)}
    assert rows.keys() == {"echo", "slow", "brief"}
    for name, labelled in rows.items():
        entry = entry_of(own, name)
        bill = quote(entry.selling_price, typical_usage(entry, "text-generation"))
        for label, times in (("One result, $", 1), ("250 results, $", 250)):
            assert number(labelled[label]) == Decimal(format_usd(bill.total_nanos * times))
    assert "250 of these" in page
    assert 'href="/console/playground?model=' in page


def test_picker_prices_results_of_another_size(own: Installation, owner: Browser) -> None:
    page = owner.get("/console/pick?task=text-generation&output_tokens=20&results=10").text

    sized = {"output_tokens": 20}
    for name in ("echo", "slow"):
        nanos = typical_nanos(entry_of(own, name), lambda _: None, None, sized)
        assert nanos is not None
        prices = [row.labelled for row in rows_of(page) if row.cells[0] == name]
        assert [number(each["One result, $"]) for each in prices] == [Decimal(format_usd(nanos))]
        assert [number(each["10 results, $"]) for each in prices] == [
            Decimal(format_usd(nanos * 10))
        ]
    refused = owner.get("/console/pick?task=text-generation&output_tokens=none")
    assert refused.status_code == 400


def test_picker_names_the_nearest_above_the_budget(own: Installation, owner: Browser) -> None:
    page = unescape(owner.get("/console/pick?task=text-to-video&budget=0.1").text)

    nearest = usd(typical_nanos(entry_of(own, "Veo3"), lambda _: None) or 0)
    assert f"Nothing costs at most $0.1 a result; the nearest is Veo3 at {nearest}." in page


def test_what_does_not_meet_a_condition_is_listed_with_why(owner: Browser) -> None:
    def left_out(query: str) -> dict[str, str]:
        page = unescape(owner.get(f"/console/pick?{query}").text)
        section = page.partition('id="left-out"')[2]
        return dict(re.findall(r'models/(\w+)">.*?<td class="whole">([^<]*)</td>', section))

    task = "task=text-generation"
    assert left_out(task) == {}
    assert set(left_out(f"{task}&available=yes").values()) == {"not available now"}
    assert set(left_out(f"{task}&seconds=5").values()) == {"its speed was not measured"}
    assert left_out("task=text-to-video&budget=0.1") == {"Veo3": "$0.3 above the budget"}
    shown = owner.get(f"/console/pick?{task}&available=yes").text
    assert "No model meets all conditions" in shown
