"""What the palette finds, for whom, and the keys of the navigation."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from gateway.console.navigation import PLACES
from tests.console.seeding import HOSTILE, Seeded, seed
from tests.console.visiting import Installation


@pytest.fixture(scope="module")
def seeded(installation: Installation) -> Seeded:
    return seed(installation.database, installation.settings.catalog)


def found(page: str) -> list[str]:
    """Return the addresses that a page of results has, in order."""
    part = page[page.index('<div id="found">') :].partition('class="accounts-found"')[0]
    return re.findall(r'href="([^"]*)"', part)


def test_pages_models_accounts_and_requests_are_found(
    installation: Installation, seeded: Seeded
) -> None:
    operator = installation.visitor("operator")
    request = seeded.requests["atlas"][0]

    assert found(operator.get("/console/find?q=workers").text) == ["/console/workers"]
    assert found(operator.get("/console/find?q=ECHO").text) == ["/console/models/echo"]
    atlas = f"/console/accounts/{seeded.accounts['atlas'].id}"
    assert found(operator.get("/console/find?q=atl").text) == [atlas]
    assert found(operator.get(f"/console/find?q={request}").text) == [
        f"/console/requests/{request}"
    ]
    assert found(operator.get("/console/find?q=zzz").text) == []
    assert "/console/queue" in found(operator.get("/console/find").text)


def test_members_find_only_their_own(installation: Installation, seeded: Seeded) -> None:
    viewer = installation.visitor("viewer", account="atlas")

    assert found(viewer.get("/console/find?q=zenith").text) == []
    assert found(viewer.get("/console/find?q=workers").text) == []
    assert len(found(viewer.get("/console/find?q=atlas").text)) == 1


def test_names_are_text_and_start_of_a_name_is_no_pattern(
    installation: Installation, seeded: Seeded
) -> None:
    operator = installation.visitor("operator")

    assert HOSTILE not in operator.get("/console/find?q=b%3Cimg").text
    assert found(operator.get("/console/find?q=%25").text) == []
    assert found(operator.get("/console/find?q=_tlas").text) == []


def test_switcher_offers_accounts_by_the_start_of_their_names(
    installation: Installation, seeded: Seeded
) -> None:
    operator = installation.visitor("operator")

    page = operator.get("/console/find?account=ze").text

    zenith, atlas = (seeded.accounts[name].id for name in ("zenith", "atlas"))
    assert f'name="account" value="id:{zenith}">zenith<' in page
    assert f'name="account" value="id:{atlas}"' not in page
    chosen = operator.post("/console/preferences", {"account": f"id:{zenith}"})
    assert chosen.status_code == 303
    assert "zenith" in operator.get("/console/balance").text


def test_each_key_of_the_navigation_leads_to_one_page() -> None:
    keys = Counter(place.key for _, places in PLACES for place in places if place.key)

    assert [key for key, number in keys.items() if number > 1] == []
    assert all(len(key) == 1 for key in keys)
