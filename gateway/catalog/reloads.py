"""Which catalog was loaded last by somebody, in SQL, so that every gateway loads it.

A load is announced with the digest of its text. A gateway with the same text in its own file loads
that; one with another text, such as a copy on another machine, waits until its file has it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sqlalchemy import Connection, select, update

from gateway.audit_log import AuditEvent, Author, newest_event, record
from gateway.catalog.problems import CatalogProblem
from gateway.tables.prices import ONLY, price_version

log = logging.getLogger(__name__)

PROBLEM_MAX: Final = 500
"""Characters of a problem that the audit log keeps."""


class Announced(NamedTuple):
    """What a gateway reads in each round: the version of prices, and the last load."""

    version: int
    loads: int
    sha256: str


def digest_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def announce_load(connection: Connection, sha256: str) -> int:
    """Record that a catalog was loaded. Return how many were."""
    changed = (
        update(price_version)
        .where(price_version.c.id == ONLY)
        .values(catalog_loads=price_version.c.catalog_loads + 1, catalog_sha256=sha256)
        .returning(price_version.c.catalog_loads)
    )
    return int(connection.execute(changed).scalar_one())


def read_announced(connection: Connection) -> Announced:
    found = select(
        price_version.c.version, price_version.c.catalog_loads, price_version.c.catalog_sha256
    ).where(price_version.c.id == ONLY)
    return Announced(*connection.execute(found).one())


def note_refusal(
    connection: Connection, author: Author, problems: Sequence[CatalogProblem]
) -> None:
    """Record that a file was not loaded, and why: it is wrong until somebody repairs it."""
    why = {"problems": len(problems), "first": str(problems[0])[:PROBLEM_MAX]}
    record(connection, author, "catalog.refuse", "catalog", after=why)


def last_load(connection: Connection) -> AuditEvent | None:
    """Return the act of the last load, also of one that was refused; None if none is recorded."""
    return newest_event(connection, ("catalog.load", "catalog.save", "catalog.refuse"))


class Follower:
    """Which loads of all gateways one gateway has followed."""

    def __init__(self) -> None:
        self.announced = Announced(0, 0, "")
        """What was read in the last round."""
        self.loads = 0
        self._awaited = 0
        """The load whose text the file lacked, as was logged."""

    @property
    def is_behind(self) -> bool:
        return self.announced.loads > self.loads

    def note(self, loads: int) -> None:
        self.loads = max(self.loads, loads)

    def read(self, path: Path) -> bytes | None:
        """Return the file if it has the text that was loaded; otherwise log once that it has not.

        Raise ``OSError``.
        """
        content = path.read_bytes()
        if digest_of(content) == self.announced.sha256:
            return content
        if self._awaited != self.announced.loads:
            self._awaited = self.announced.loads
            log.warning(
                "another gateway loaded a catalog (sha256 %s) that %s does not have; it is loaded "
                "here as soon as the file has the same text",
                self.announced.sha256[:12],
                path,
            )
        return None
