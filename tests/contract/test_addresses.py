"""No address that a client names leads into a network of ours."""

from __future__ import annotations

import pytest

from workers.contract.addresses import PrivateAddress, is_public, pin


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
def test_what_is_not_public_is_known_in_every_spelling(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.215.14", "2606:2800:21f:cb07::1", "64:ff9b::5db8:d70e"]
)
def test_what_is_public_may_be_called(address: str) -> None:
    assert is_public(address)


async def test_a_name_that_leads_inside_is_refused_when_it_is_resolved() -> None:
    with pytest.raises(PrivateAddress):
        await pin("https://localhost:8443/x", private_allowed=False)


async def test_the_connection_goes_to_the_address_and_speaks_to_the_name() -> None:
    pinned = await pin("http://localhost:8080/a?b=c", private_allowed=True)

    assert pinned.url in ("http://127.0.0.1:8080/a?b=c", "http://[::1]:8080/a?b=c")
    assert pinned.headers == {"Host": "localhost:8080"}
    assert pinned.extensions == {"sni_hostname": "localhost"}
