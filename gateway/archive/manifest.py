"""The manifest of an archive: which files it has, and what they contain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec

from workers.contract.jobs import BlobRef

Name: TypeAlias = Literal["receipts", "receipt_steps", "transfers"]

CONTENT_TYPE: Final = "application/vnd.apache.parquet"


class Sum(msgspec.Struct, frozen=True):
    """Number and amount of the transfers of one kind."""

    count: int
    nanos: int


class ArchiveFile(msgspec.Struct, frozen=True):
    """One file: the range of its first column, and that of the charges that its receipts name."""

    table: Name
    key: str
    rows: int
    bytes: int
    sha256: str
    first: str | int
    last: str | int
    first_charge: int | None = None
    last_charge: int | None = None

    @property
    def ref(self) -> BlobRef:
        return BlobRef(self.key, self.bytes, self.sha256, CONTENT_TYPE)


class Rewrite(msgspec.Struct, frozen=True):
    """When and why files were written again, and how many rows lost their personal columns."""

    at: str
    reason: str
    rows: int


class Manifest(msgspec.Struct, frozen=True):
    """What the files of a month contain; all but ``rewrites`` is recomputed from them."""

    month: str
    sha256: str
    receipts: int
    charge_nanos: int
    steps: int
    personal: int
    """Number of receipts and steps with metadata or an error, which erasing clears."""
    transfers: dict[str, Sum]
    files: tuple[ArchiveFile, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    """Erasures, which the files do not tell."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def transfer_count(self) -> int:
        return sum(each.count for each in self.transfers.values())

    def of(self, table: Name) -> Iterator[ArchiveFile]:
        return (file for file in self.files if file.table == table)
