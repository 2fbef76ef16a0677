"""The navigation: which pages exist, in which groups, and who sees them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.console.roles import Act
from gateway.console.visitors import Visitor


@dataclass(frozen=True, slots=True)
class Destination:
    """A page in the navigation, for those who may do its act.

    ``key`` follows ``g`` on the keyboard, and is a capital where the letter is taken.
    One that ``is_of_account`` needs a chosen account.
    """

    label: str
    path: str
    icon: str
    act: Act
    key: str
    is_of_account: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A place as a visitor sees it; ``primary`` ones are in the bar of small screens."""

    place: Destination
    current: bool
    primary: bool


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    links: Sequence[Link]


PLACES: Final[Sequence[tuple[str, Sequence[Destination]]]] = (
    (
        "Now",
        (
            Destination("Overview", "/console", "pulse", "installation.read", "o"),
            Destination("Home", "/console/home", "home", "accounts.read", "h", True),
        ),
    ),
    (
        "Requests",
        (
            Destination("Requests", "/console/requests", "list", "requests.read", "r"),
            Destination("Failures", "/console/failures", "alert", "requests.read", "f"),
            Destination("Feedback", "/console/feedback", "star", "requests.read", ""),
        ),
    ),
    (
        "Models",
        (
            Destination("Models", "/console/models", "cube", "catalog.read", "m"),
            Destination("Picker", "/console/pick", "target", "catalog.read", "i"),
            Destination("Playground", "/console/playground", "play", "play.read", "p", True),
            Destination("GPU planner", "/console/plan", "chip", "catalog_file.read", "v"),
            Destination("Catalog file", "/console/catalog", "edit", "catalog_file.read", "c"),
        ),
    ),
    (
        "Money",
        (
            Destination(
                "Balance", "/console/balance", "wallet", "accounts.read", "b", is_of_account=True
            ),
            Destination("Payments", "/console/payments", "card", "payments.read", ""),
            Destination("Ledger", "/console/ledger", "book", "ledger.read", "l"),
            Destination("Usage", "/console/usage", "chart", "usage.read", "u"),
            Destination(
                "Statements", "/console/statements", "page", "periods.read", "s", is_of_account=True
            ),
            Destination("Prices", "/console/prices", "tag", "margins.read", "$"),
            Destination("Months", "/console/periods", "calendar", "installation.read", "z"),
            Destination("Archives", "/console/archives", "folder", "installation.read", ""),
            Destination("Margins", "/console/margins", "scale", "margins.read", "n"),
        ),
    ),
    (
        "Account",
        (
            Destination("Limits", "/console/limits", "gauge", "budgets.read", "t", True),
            Destination("Keys", "/console/keys", "key", "keys.read", "k"),
            Destination("Batches", "/console/batches", "stack", "batches.read", "", True),
            Destination("Files", "/console/files", "folder", "files.read", "", True),
            Destination("Voices", "/console/voices", "mic", "voices.read", "", True),
            Destination("Webhooks", "/console/webhooks", "hook", "webhooks.read", "W"),
            Destination("Notices", "/console/notices", "bell", "notices.read", ""),
            Destination("Accounts", "/console/accounts", "people", "installation.read", "a"),
            Destination(
                "Organisations", "/console/organisations", "people", "organisations.read", ""
            ),
            Destination("Audit log", "/console/audit", "eye", "audit.read", "d"),
            Destination("Access", "/console/access", "lock", "access.read", "A", True),
            Destination(
                "Members", "/console/members", "people", "members.read", "e", is_of_account=True
            ),
            Destination("Users", "/console/users", "people", "users.read", "U"),
        ),
    ),
    (
        "Installation",
        (
            Destination("Workers", "/console/workers", "server", "installation.read", "w"),
            Destination("Queue", "/console/queue", "queue", "installation.read", "q"),
            Destination("Upstreams", "/console/upstreams", "cloud", "installation.read", "j"),
            Destination("Gateways", "/console/gateways", "gate", "installation.read", "g"),
            Destination("Set aside", "/console/set-aside", "aside", "set_aside.read", ""),
            Destination("Retention", "/console/retention", "clock", "installation.read", ""),
            Destination("Erasures", "/console/erasures", "eraser", "erasures.read", ""),
            Destination("Settings", "/console/settings", "gear", "settings.read", "x"),
            Destination("API", "/console/docs", "code", "catalog.read", "y"),
            Destination("About", "/console/about", "info", "own.write", ""),
        ),
    ),
)
PRIMARY: Final = ("/console", "/console/home", "/console/requests", "/console/models")
"""Places in the bar of small screens; the others are behind "More"."""


def navigation(visitor: Visitor, path: str) -> Sequence[Section]:
    """Return the groups that a visitor sees, with the place of ``path`` marked."""
    current = _current(path)
    groups = []
    for name, places in PLACES:
        links = [
            Link(place, place.path == current, place.path in PRIMARY)
            for place in places
            if _sees(visitor, place)
        ]
        if links:
            groups.append(Section(name, links))
    return groups


def _current(path: str) -> str:
    """Return the place that a path belongs to: the longest whose path begins it."""
    paths = [place.path for _, places in PLACES for place in places]
    found = [each for each in paths if path == each or path.startswith(f"{each}/")]
    return max((each for each in found if each != "/console" or path == each), key=len, default="")


def _sees(visitor: Visitor, place: Destination) -> bool:
    if place.is_of_account and visitor.account_id is None:
        return False
    return visitor.may(place.act)
