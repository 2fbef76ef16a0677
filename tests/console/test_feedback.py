"""Feedback in the console: rate, change and delete on a request's page, sums, and the export."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.console.seeding import HOSTILE, Seeded, seeded_database
from tests.console.test_limits import words_of
from tests.console.visiting import Installation, installed

PAGE = "/console/feedback"


@pytest.fixture(scope="module")
def seeded(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Installation, Seeded]]:
    directory = tmp_path_factory.mktemp("feedback")
    url, seeded = seeded_database(directory, postgres, requests=12)
    with installed(directory / "home", url, valkey) as made:
        yield made, seeded


def test_member_rates_changes_and_deletes(seeded: tuple[Installation, Seeded]) -> None:
    installation, made = seeded
    member, operator = (
        installation.visitor("member", account="atlas"),
        installation.visitor("operator"),
    )
    request_id = made.requests["atlas"][0]
    of = f"/console/requests/{request_id}"
    assert "Nobody has rated" in member.get(PAGE).text
    sent = {"rating": "2", "labels": "too long, off topic", "comment": HOSTILE}
    assert member.post(f"{of}/feedback", sent).headers["location"] == f"{of}#feedback"

    for page in (member.get(of).text, operator.get(of).text, operator.get(PAGE).text):
        assert "off topic" in page
        assert HOSTILE not in page
        assert "&lt;img src=x" in page
    assert "2 of 5" in words_of(operator, of)
    assert "1 rating, 2 of 5 on average" in operator.get(PAGE).text
    for by in ("served_by", "task", "account"):
        assert operator.get(f"{PAGE}?by={by}").status_code == 200
    assert "No feedback fits" in operator.get(f"{PAGE}?rating=5").text
    (line,) = operator.get(f"{PAGE}/file").text.splitlines()
    assert (json.loads(line)["comment"], "account_id" in json.loads(line)) == (HOSTILE, True)
    (own,) = member.get(f"{PAGE}/file?rating=2").text.splitlines()
    assert "account_id" not in json.loads(own)

    assert member.post(f"{of}/feedback", {"rating": "5"}).status_code == 303
    assert "5 of 5 on average" in operator.get(PAGE).text
    assert member.post(f"{of}/feedback", {"do": "delete"}).status_code == 303
    assert "Nobody has rated" in operator.get(PAGE).text


def test_only_members_of_the_account_rate_what_has_ended(
    seeded: tuple[Installation, Seeded],
) -> None:
    installation, made = seeded
    closed, opened = made.requests["atlas"][1], made.requests["atlas"][-1]
    member = installation.visitor("member", account="atlas")
    assert member.post(f"/console/requests/{opened}/feedback", {"rating": "1"}).status_code == 409
    for sent in ({}, {"rating": "6"}, {"labels": HOSTILE}):
        refused = member.post(f"/console/requests/{closed}/feedback", sent)
        assert refused.status_code == 400
        assert HOSTILE not in refused.text
    stranger = installation.visitor("member", account="zenith")
    viewer = installation.visitor("viewer", account="atlas")
    for browser in (stranger, viewer, installation.visitor("operator")):
        path = f"/console/requests/{closed}/feedback"
        assert browser.post(path, {"rating": "1"}).status_code == 404
    assert "Was it good?" not in viewer.get(f"/console/requests/{closed}").text
    assert stranger.get(f"{PAGE}?by=account").status_code == 400
    assert stranger.get(f"{PAGE}?account=atlas").status_code == 404
