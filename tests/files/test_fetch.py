"""Errors for URLs that cannot be fetched."""

from __future__ import annotations

import base64
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from gateway.errors import InvalidRequest, TooLarge
from gateway.files.fetch import Fetcher
from gateway.files.sources import InlineSource, RemoteSource, Source
from gateway.files.store import Files
from gateway.ids import new_request_id
from gateway.sql.database import Database
from workers.contract.blobs import Blobs
from workers.contract.jobs import RequestId

OPEN, CLOSED = "open", "closed"
Open = Callable[[bool], Fetcher]


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    """A port of this machine that accepts connections, and one that refuses them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            closed = int(other.getsockname()[1])
        yield {OPEN: int(listening.getsockname()[1]), CLOSED: closed}


@pytest.fixture
async def fetcher(database: Database, tmp_path: Path) -> AsyncIterator[Open]:
    opened: list[Fetcher] = []
    blobs = Blobs(f"file://{tmp_path / 'blobs'}")

    def open_fetcher(private_allowed: bool) -> Fetcher:
        files = Files(database, blobs)
        opened.append(
            Fetcher(blobs, files, bytes_max=1000, timeout_s=10, private_allowed=private_allowed)
        )
        return opened[-1]

    yield open_fetcher
    for each in opened:
        await each.close()
    await database.close()


async def refusal(fetcher: Fetcher, url: str) -> tuple[str, str, int]:
    with pytest.raises(InvalidRequest) as refused:
        await fetcher.fetch(
            1, RequestId(new_request_id()), [Source("image", RemoteSource(url), "input.image")]
        )
    return refused.value.code, refused.value.message, refused.value.status


async def test_error_does_not_tell_a_private_address_from_a_port_that_does_not_answer(
    fetcher: Open, ports: dict[str, int]
) -> None:
    outside, operators = fetcher(False), fetcher(True)

    private = await refusal(outside, f"https://localhost:{ports[OPEN]}/a.png")
    private_and_closed = await refusal(outside, f"https://localhost:{ports[CLOSED]}/a.png")
    unknown = await refusal(outside, "https://nowhere.invalid/a.png")
    closed = await refusal(operators, f"https://localhost:{ports[CLOSED]}/a.png")

    assert private == private_and_closed == unknown == closed
    assert private[0] == "source_unreachable"


@pytest.mark.parametrize(
    ("bytes_max", "together", "message"),
    [
        (500, 1500, "more than 500 bytes, its share of the 1500 for all images together."),
        (500, 500, "more than 500 bytes."),
        (2000, 6000, "more than 1000 bytes."),
        (None, None, "more than 1000 bytes."),
    ],
    ids=["a share", "the only picture", "the installation's limit", "no share"],
)
async def test_attachment_over_its_share_is_told_what_it_shares(
    bytes_max: int | None, together: int | None, message: str, fetcher: Open
) -> None:
    uri = f"data:image/png;base64,{base64.b64encode(bytes(3000)).decode()}"
    source = Source("image", InlineSource(uri), "input.image", bytes_max, together)

    with pytest.raises(TooLarge) as refused:
        await fetcher(False).fetch(1, RequestId(new_request_id()), [source])

    assert refused.value.message == f"input.image has {message}"
