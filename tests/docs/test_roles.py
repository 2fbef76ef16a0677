"""The page of the roles has the rights of the code."""

from __future__ import annotations

from gateway.accounts.roles import AREAS, ROLES
from tests.docs.pages import ROOT, table


def test_every_area_is_listed_with_its_rights() -> None:
    rows = table(ROOT / "docs" / "guides" / "roles.md", "## Administrators")

    assert {row[0]: row[1:] for row in rows} == {
        area: [rights[role] or "none" for role in ROLES] for area, rights in AREAS.items()
    }
