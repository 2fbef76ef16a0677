"""Formats of exports and their footer; separate from the writers, whose imports are slow."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypedDict

import msgspec

Format: TypeAlias = Literal["csv", "parquet"]
Profile: TypeAlias = Literal["native", "focus"]

MEDIA_TYPES: Final[Mapping[Format, str]] = {
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}


@dataclass(slots=True)
class Footer:
    """Row count, total amount and digest of a file; complete once the whole file is written."""

    rows: int = 0
    amount_nanos: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    @property
    def sha256(self) -> str:
        return str(self.digest.hexdigest())


class FooterView(TypedDict):
    """Row count, total amount and digest of an exported file."""

    object: Literal["export.footer"]
    rows: int
    amount_nanos: int
    sha256: str


def footer_view(footer: Footer) -> FooterView:
    """Return the footer as JSON, by which a file can be verified."""
    return {
        "object": "export.footer",
        "rows": footer.rows,
        "amount_nanos": footer.amount_nanos,
        "sha256": footer.sha256,
    }


def encode_footer(footer: Footer) -> bytes:
    return msgspec.json.encode(footer_view(footer)) + b"\n"
