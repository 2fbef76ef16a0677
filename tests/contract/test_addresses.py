"""URLs from clients never lead to private addresses."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from workers.contract.addresses import PrivateAddress, is_public, pin
from workers.contract.resolver import HostResolver


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "192.168.1.1",
        "172.16.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1%eth0",
        "fc00::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
    ],
)
def test_private_addresses_are_detected_in_every_notation(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.215.14", "2606:2800:21f:cb07::1", "64:ff9b::5db8:d70e"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_public(address)


async def test_name_that_resolves_to_a_private_address_is_refused() -> None:
    with pytest.raises(PrivateAddress):
        await pin("https://localhost:8443/x", private_allowed=False)


async def test_connection_is_pinned_to_the_address_and_keeps_the_host_name() -> None:
    pinned = await pin("http://localhost:8080/a?b=c", private_allowed=True)

    assert pinned.url in ("http://127.0.0.1:8080/a?b=c", "http://[::1]:8080/a?b=c")
    assert pinned.headers == {"Host": "localhost:8080"}
    assert pinned.extensions == {"sni_hostname": "localhost"}


async def test_international_name_is_called_in_its_idna_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(host: str, port: int, *_: object, **__: object) -> list[Any]:
        assert host == "xn--mnchen-3ya.de"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    pinned = await pin("https://münchen.de:8443/hö?x=ü", private_allowed=False)

    assert pinned.url == "https://93.184.215.14:8443/h%C3%B6?x=%C3%BC"
    assert pinned.headers == {"Host": "xn--mnchen-3ya.de:8443"}
    assert pinned.extensions == {"sni_hostname": "xn--mnchen-3ya.de"}


@pytest.mark.parametrize("url", ["https://8.8.8.8/\u0001", "https://☃.net/", "hook", "https://"])
async def test_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(OSError, match="URL"):
        await pin(url, private_allowed=True)


@pytest.mark.parametrize(
    "address",
    [
        "192.0.0.192",
        "64:ff9b:1::1",
        "64:ff9b:1:a00:1::",
        "::ffff:0:a00:1",
        "::10.0.0.1",
        "fec0::1",
        "192.88.99.1",
        "3fff::1",
        "5f00::1",
    ],
)
def test_special_networks_are_refused_whatever_python_knows(address: str) -> None:
    assert not is_public(address)


@pytest.fixture
def silent_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Replace the system's resolver by one whose name server never answers."""
    answered = threading.Event()
    real = socket.getaddrinfo

    def wait(host: str, *rest: object, **more: object) -> object:
        if host.endswith(".silent.test"):
            answered.wait(60)
            raise socket.gaierror("timed out")
        return real(host, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    yield answered
    answered.set()


async def test_names_that_never_resolve_do_not_block_other_threads(
    silent_name_server: threading.Event,
) -> None:
    resolver = HostResolver(timeout_s=0.2)
    waiting = [
        asyncio.create_task(resolver.resolve(f"{n}.silent.test", 443, owner="a")) for n in range(40)
    ]
    await asyncio.sleep(0)

    assert await asyncio.to_thread(lambda: "the default executor is free") is not None
    assert await resolver.resolve("localhost", 443, owner="b")
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, OSError) for outcome in outcomes)


async def test_lookups_of_one_account_count_until_their_threads_have_ended(
    silent_name_server: threading.Event,
) -> None:
    resolver = HostResolver(owner_max=2, timeout_s=0.05)
    before = set(threading.enumerate())

    for n in range(10):
        with pytest.raises(OSError):
            await resolver.resolve(f"{n}.silent.test", 443, owner="a")

    assert len(set(threading.enumerate()) - before) == 2
    assert await resolver.resolve("localhost", 443, owner="b")


async def test_equal_lookups_share_a_thread(silent_name_server: threading.Event) -> None:
    resolver = HostResolver(owner_max=1, timeout_s=0.2)
    before = set(threading.enumerate())

    both = await asyncio.gather(
        *(resolver.resolve("one.silent.test", 443, owner="a") for _ in range(2)),
        return_exceptions=True,
    )

    assert len(set(threading.enumerate()) - before) == 1
    assert ["no answer from a name server" in str(outcome) for outcome in both] == [True, True]
