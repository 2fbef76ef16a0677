"""The stream of live updates: who gets what, how it coalesces, and when it ends."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from sqlalchemy import func, select, update

from gateway.api.http.request import ApiRequest
from gateway.console.live import stream, tail
from gateway.console.live.tail import tail_name
from gateway.console.live.topics import Latest, LiveSubject, Message
from gateway.console.live.updates import LiveUpdates
from gateway.errors import TooManyRequests
from gateway.ids import id_before, new_request_id
from gateway.requests.lookup import RequestFilter, RequestPage
from gateway.sql.database import Database
from gateway.tables.users import sessions
from gateway.tasks.submission import OpenRequest
from tests.console.seeding import HOSTILE, Seeded, Seeder, seed
from tests.console.serving import served_settings, serving
from tests.console.visiting import CALLERS, open_link
from tests.databases import Databases
from tests.stack import CATALOG

INSTALLATION = ("now/UTC", "hour", "queue", "workers")
PATIENCE_S = 20.0


@dataclass
class Served:
    """A running gateway with a week of traffic."""

    url: str
    database: Database
    seeded: Seeded
    gateway: serving
    catalog: Path
    clients: list[httpx.Client] = field(default_factory=list)

    def enter(self, role: str | None, account: str = "atlas") -> httpx.Client:
        """Return a client with the session of a new person with a role."""
        client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        self.clients.append(client)
        if role is not None:
            secret = open_link(self.database, role, account)["path"].partition("#")[2]
            token = re.findall(r'name="csrf" value="(\w+)"', client.get("/console/enter").text)[-1]
            answer = client.post(
                "/console/enter/link",
                data={"csrf": token, "secret": secret},
                headers={"Sec-Fetch-Site": "same-origin"},
            )
            assert answer.status_code == 303, answer.text
        return client

    @property
    def streams(self) -> int:
        return int(self.gateway.app.state.live_updates.streams)


class Events:
    """The events of a stream, one by one."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.iter_lines()
        self.retry = 0

    def next(self) -> tuple[str, dict[str, Any]]:
        name = "message"
        for line in self._lines:
            if line.startswith("retry: "):
                self.retry = int(line[7:])
            elif line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                return name, json.loads(line[6:])
        return "over", {}

    def message(self, topic: str) -> dict[str, Any]:
        """Return the next message about a topic."""
        while True:
            name, data = self.next()
            assert name in ("message", "begin"), (name, data)
            if data.get("topic") == topic:
                return data


@contextmanager
def following(client: httpx.Client, *topics: str) -> Iterator[Events]:
    with client.stream("GET", "/console/live", params={"topics": list(topics)}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Events(answer)


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Served]:
    directory: Path = tmp_path_factory.mktemp("live")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    seeded = seed(database, catalog, requests=20)
    settings = served_settings(directory, url, valkey)
    with serving(settings) as gateway:
        made = Served(f"http://127.0.0.1:{settings.port}", database, seeded, gateway, catalog)
        yield made
        for client in made.clients:
            client.close()
    database.dispose()


@pytest.mark.parametrize("role", CALLERS)
def test_topics_of_the_installation_are_for_its_roles(served: Served, role: str | None) -> None:
    client = served.enter(role)
    for topic in INSTALLATION:
        if role in ("operator", "finance", "auditor"):
            with following(client, topic) as events:
                assert events.message(topic)
                assert events.retry == 3000
        else:
            answer = client.get("/console/live", params={"topics": topic})
            assert answer.status_code == (303 if role is None else 404)


def test_topic_that_one_may_not_see_looks_like_one_that_does_not_exist(served: Served) -> None:
    viewer = served.enter("viewer")
    answers = [
        viewer.get("/console/live", params={"topics": topic})
        for topic in ("now/UTC", "nothing", "now/Nowhere/At_All", "workers/w-1", "x" * 2000)
    ]

    plain = {
        re.sub(r'nonce="[^"]*"|call_\w+|topics=[^"]*|[0-9a-f]{128}', "", each.text)
        for each in answers
    }
    assert {each.status_code for each in answers} == {404}
    assert len(plain) == 1


def test_stream_names_what_it_refuses_and_sends_the_rest(served: Served) -> None:
    with following(served.enter("auditor"), "workers", "nothing") as events:
        assert events.next() == ("begin", {"topics": ["workers"], "refused": ["nothing"]})
        assert events.message("workers")["version"]


def test_call_without_topics_is_refused(served: Served) -> None:
    answer = served.enter("operator").get("/console/live")

    assert answer.status_code == 400
    assert "topics" in answer.text


def test_figures_are_those_of_the_page(served: Served) -> None:
    client = served.enter("operator")
    with following(client, "now/UTC") as events:
        texts = events.message("now/UTC")["texts"]

    page = client.get("/console").text
    for name in ("earned", "earned_of", "held", "held_by"):
        assert f'data-text="{name}">{texts[name]}<' in page, name


def test_ended_session_ends_its_stream_within_seconds(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "CHECK_S", 0.2)
    client = served.enter("operator")
    with following(client, "workers") as events:
        events.message("workers")

        with served.database.transaction() as connection:
            connection.execute(update(sessions).values(revoked_at=datetime.now(UTC)))

        assert events.next() == ("end", {})
        assert events.next() == ("over", {})
    assert client.get("/console/live", params={"topics": "workers"}).status_code == 303


def test_sessions_of_several_streams_are_checked_in_one_transaction(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "CHECK_S", 0.2)
    checks = served.gateway.app.state.session_checks
    answer, sizes = checks._answer, []

    async def counted(requests: Sequence[ApiRequest]) -> Sequence[object]:
        sizes.append(len(requests))
        return await answer(requests)

    monkeypatch.setattr(checks, "_answer", counted)
    ended, other = served.enter("operator"), served.enter("auditor")
    with following(ended, "workers") as events, following(other, "workers") as others:
        events.message("workers")
        others.message("workers")
        _wait_until(lambda: 2 in sizes)

        with served.database.transaction() as connection:
            first = select(func.max(sessions.c.id) - 1).scalar_subquery()
            revoked = update(sessions).where(sessions.c.id == first)
            connection.execute(revoked.values(revoked_at=datetime.now(UTC)))

        assert events.next() == ("end", {})
        # The other session's stream goes on.
        count = len(sizes)
        _wait_until(lambda: len(sizes) > count + 2)
        assert served.streams == 1


def test_stream_does_not_keep_a_session_alive(served: Served) -> None:
    client = served.enter("operator")
    late = datetime.now(UTC) - timedelta(minutes=20)
    with served.database.transaction() as connection:
        connection.execute(update(sessions).values(seen_at=late))

    with following(client, "workers") as events:
        events.message("workers")
    client.get("/console/requests", headers={"Tollgate-Follows": "1"})
    with served.database.snapshot() as connection:
        assert {row.seen_at for row in connection.execute(sessions.select())} == {late}

    client.get("/console/requests")
    with served.database.snapshot() as connection:
        assert max(row.seen_at for row in connection.execute(sessions.select())) > late


def test_stream_ends_after_its_time_and_leaves_nothing_behind(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LENGTH_S", 0.5)
    with following(served.enter("operator"), "workers") as events:
        events.message("workers")
        assert served.streams == 1
        assert events.next()[0] == "over"
    _wait_until(lambda: served.streams == 0)
    assert served.gateway.app.state.live_updates.sampled == 0


def test_stream_beyond_the_limit_is_refused_until_one_ends(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.gateway.app.state.live_updates, "_streams_max", 1)
    client, other = served.enter("operator"), served.enter("operator")
    with following(client, "workers") as events:
        events.message("workers")
        answer = other.get("/console/live", params={"topics": "workers"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "60"
    _wait_until(lambda: served.streams == 0)
    with following(other, "workers") as events:
        events.message("workers")


def test_request_and_tail_are_for_their_account_and_the_installation(served: Served) -> None:
    own = served.seeded.requests["atlas"][-1]
    atlas, zenith = served.seeded.accounts["atlas"].id, served.seeded.accounts["zenith"].id
    for role, sees_all in (("auditor", True), ("viewer", False)):
        client = served.enter(role)
        for topic in (f"request/{own}", tail_of(atlas)):
            with following(client, topic) as events:
                assert events.next()[1]["topics"] == [topic]
        for topic in (
            f"request/{served.seeded.requests['zenith'][0]}", tail_of(zenith), tail_of(None),
        ):  # fmt: skip
            answer = client.stream("GET", "/console/live", params={"topics": topic})
            with answer as found:
                assert found.status_code == (200 if sees_all else 404), topic
    missing = f"req_{'0' * 32}"
    for topic in (f"request/{missing}", "request/x", "tail/x", "tail/e30", "tail"):
        assert client.get("/console/live", params={"topics": topic}).status_code == 404


def test_open_request_is_followed_to_its_end(served: Served) -> None:
    with seeding(served) as seeder:
        account, key = served.seeded.accounts["atlas"], served.seeded.keys["web"]
        entry = seeder.entry("text-generation")
        request_id = seeder.request(account, key, datetime.now(UTC), entry=entry, open=True)
    topic = f"request/{request_id}"
    with following(served.enter("viewer"), topic) as events:
        message = events.message(topic)
        assert message["version"] == "open"
        assert message["texts"]["title"].startswith(f"Queued: {entry.name} holds $")
        assert message["texts"]["started"] == "not yet"

        with seeding(served) as seeder:
            seeder.end(request_id)

        while (message := events.message(topic))["version"] == "open":
            pass


def test_tail_sends_each_row_once_and_pauses_when_more_come_than_it_reads(served: Served) -> None:
    account, key = served.seeded.accounts["atlas"], served.seeded.keys["web"]
    topic = tail_of(account.id)
    with following(served.enter("owner"), topic) as events:
        events.next()
        with seeding(served) as seeder:
            seeder.requests(account, key, 2)
        rows = dict(events.message(topic)["rows"])
        while len(rows) < 2:
            rows |= dict(events.message(topic)["rows"])
        assert all(f'<tr id="{id}">' in html for id, html in rows.items())
        assert HOSTILE not in "".join(rows.values())

        with seeding(served) as seeder:
            seeder.requests(account, key, 120)
        message = events.message(topic)
        assert len(message["rows"]) == 50
        assert not rows.keys() & dict(message["rows"]).keys()
        assert re.fullmatch(r"\d\d:\d\d:\d\d", message["paused"])
        assert events.message(topic)["total"] == 122


@contextmanager
def seeding(served: Served) -> Iterator[Seeder]:
    with served.database.transaction() as connection:
        yield Seeder(connection, served.catalog, seed=datetime.now(UTC).microsecond)


def tail_of(account_id: int | None) -> str:
    since = id_before(datetime.now(UTC))
    return tail_name(RequestFilter(account_id), zone="UTC", hidden=(), since=since)


def _wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- Viewers and samplers, without HTTP -----------------------------------------------------------


class Counted:
    """A subject whose state is a number."""

    def __init__(self) -> None:
        self.value = 0
        self.samples = 0
        self.fails = False

    async def read(self) -> Message:
        self.samples += 1
        if self.fails:
            raise OSError("away")
        return {"texts": {"value": str(self.value)}}

    def subject(self) -> LiveSubject:
        return LiveSubject(
            "counted", "installation.read", None, lambda: Latest(self.read, interval_s=0.01)
        )


async def _until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - counts of a sampler have no event
            await asyncio.sleep(0.005)


async def test_subject_is_sampled_once_for_all_viewers_and_only_while_they_watch() -> None:
    counted, updates = Counted(), LiveUpdates()
    viewers = [updates.join({"a": counted.subject()}) for _ in range(20)]
    await _until(lambda: counted.samples >= 2)

    assert updates.sampled == 1
    for viewer in viewers:
        assert viewer.take() == [("a", {"texts": {"value": "0"}})]
        assert viewer.take() == []
        updates.leave(viewer)
    assert updates.sampled == updates.streams == 0
    await asyncio.sleep(0)
    samples = counted.samples
    await asyncio.sleep(0.05)
    assert counted.samples == samples


async def test_newer_message_replaces_the_one_that_was_not_sent() -> None:
    counted, updates = Counted(), LiveUpdates()
    viewer = updates.join({"a": counted.subject()})
    for value in range(5):
        counted.value = value
        samples = counted.samples
        await _until(lambda samples=samples: counted.samples >= samples + 2)

    assert viewer.take() == [("a", {"texts": {"value": "4"}})]
    late = updates.join({"b": counted.subject()})
    assert late.take() == [("b", {"texts": {"value": "4"}})]
    updates.leave(viewer)
    updates.leave(late)


async def test_rows_are_sent_once_they_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    now, entered, finish = datetime.now(UTC), threading.Event(), threading.Event()
    one = OpenRequest(new_request_id(), 7, "echo", "text-generation", "running", 1, now, now)
    page = RequestPage([one], None)
    lookup = SimpleNamespace(list=AsyncMock(side_effect=[RequestPage([], None), page]))
    database = SimpleNamespace(read=AsyncMock(return_value=({7: "atlas"}, {})))
    services: Any = SimpleNamespace(requests=SimpleNamespace(lookup=lookup), database=database)
    followed = tail.Tail(services, RequestFilter(None))
    reader = followed.reader_of(tail._Look("latest", "UTC", ()), "")
    await followed.sample()
    assert reader() is None
    render = tail.Tail._render

    def slow(*given: Any) -> None:
        entered.set()
        assert finish.wait(PATIENCE_S)
        render(*given)

    monkeypatch.setattr(tail.Tail, "_render", slow)
    sampling = asyncio.create_task(followed.sample())
    assert await asyncio.to_thread(entered.wait, PATIENCE_S)
    # Another subject of the page has news meanwhile, so all are read.
    assert reader() is None
    finish.set()
    await sampling
    message = reader()
    assert message is not None
    assert [id for id, _ in message["rows"]] == [one.request_id]


async def test_viewers_are_told_while_nothing_can_be_sampled() -> None:
    counted, updates = Counted(), LiveUpdates()
    viewer = updates.join({"a": counted.subject()})
    await _until(lambda: counted.samples >= 1)
    viewer.take()

    counted.fails = True
    samples = counted.samples
    await _until(lambda: counted.samples >= samples + 2)
    [(_, message)] = viewer.take()
    assert re.fullmatch(r"\d\d:\d\d:\d\d UTC", message["stale"])

    counted.fails = False
    samples = counted.samples
    await _until(lambda: counted.samples >= samples + 2)
    assert viewer.take() == [("a", {"stale": None})]
    updates.leave(viewer)


async def test_closing_ends_all_streams_and_admits_none() -> None:
    updates = LiveUpdates(streams_max=1)
    viewer = updates.join({"a": Counted().subject()})
    with pytest.raises(TooManyRequests):
        updates.check_room()

    updates.close()

    assert viewer.ended
    assert updates.join({}).ended
    updates.leave(viewer)
