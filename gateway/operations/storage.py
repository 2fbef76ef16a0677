"""Storage of accounts: its use, and the limits that operators set."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account
from gateway.accounts.locks import lock_accounts
from gateway.audit_log import Author, record
from gateway.files.room import BYTES_MAX, COUNT_MAX, StorageLimits, limits_of, measure, set_limits
from gateway.operations.accounts import subject
from gateway.operations.bodies import Body, Id, Name
from gateway.operations.refusals import refusals
from gateway.settings import Settings


class StorageLimitBody(Body):
    """Storage limits of an account. An omitted limit is the installation's."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"account": "acme", "bytes": 107374182400}]},
    )

    account: Name | Id
    files: Annotated[int, Field(ge=0, le=COUNT_MAX)] | None = None
    bytes: Annotated[int, Field(ge=0, le=BYTES_MAX)] | None = None


class StorageView(TypedDict):
    """An account's stored files and bytes, and their limits."""

    object: Literal["storage"]
    account: str
    files: int
    bytes: int
    files_max: int | None
    bytes_max: int | None


@refusals()
def put(
    connection: Connection, author: Author, body: StorageLimitBody, settings: Settings
) -> StorageView:
    owner = find_account(connection, body.account)
    lock_accounts(connection, [owner.id])
    before = of_account(connection, owner, settings)
    set_limits(connection, owner.id, files_max=body.files, bytes_max=body.bytes)
    view = of_account(connection, owner, settings)
    record(
        connection,
        author,
        "storage.set",
        subject(owner),
        account_id=owner.id,
        before=before,
        after=view,
    )
    return view


def of_account(connection: Connection, owner: Account, settings: Settings) -> StorageView:
    stored = measure(connection, owner.id)
    defaults = StorageLimits(settings.account_files_max, settings.account_file_bytes_max)
    limits = limits_of(connection, owner.id, defaults)
    return {
        "object": "storage",
        "account": owner.name,
        "files": stored.files,
        "bytes": stored.bytes,
        "files_max": limits.files_max,
        "bytes_max": limits.bytes_max,
    }
