"""What all commands share: how they read amounts, reach the database, print and refuse.

Tables for people, with ``--json`` data for programs. An error is one line on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import click
import msgspec
from pydantic import ValidationError
from sqlalchemy import Connection

from gateway.pricing import parse_usd
from gateway.settings import Settings
from gateway.sql.database import Database, schema_is_current

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Usd(click.ParamType[int]):
    """An amount of USD as a decimal, in nano-dollars."""

    name = "USD"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_usd(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Commands(click.Group):
    """Commands whose amounts may be mistaken for options: click takes ``-5`` for one."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            if not error.option_name.removeprefix("-")[:1].isdigit():
                raise
            raise click.UsageError(
                f"{error.option_name} is not an option, and amounts cannot be negative",
                ctx=error.ctx,
            ) from None


def example(*lines: str) -> str:
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def read_settings() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        refuse(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", status=2)


@contextlib.contextmanager
def open_database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.sql_url, prepare=settings.database_prepare)
    try:
        if not schema_is_current(database.engine):
            refuse("the database is not at the schema of this version; run: tollgate migrate")
        yield database
    finally:
        asyncio.run(database.close())


@contextlib.contextmanager
def transaction() -> Iterator[Connection]:
    with open_database(read_settings()) as database, database.transaction() as connection:
        yield connection


@contextlib.contextmanager
def snapshot() -> Iterator[Connection]:
    with open_database(read_settings()) as database, database.snapshot() as connection:
        yield connection


def print_rows(items: Sequence[Any], row: Callable[[Any], dict[str, Any]], as_json: bool) -> None:
    rows = [row(item) for item in items]
    if as_json:
        click.echo(msgspec.json.encode(rows).decode())
        return
    if not rows:
        return
    cells = [list(rows[0]), *[[_cell(value) for value in one.values()] for one in rows]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value)


def refuse(reason: str, *, status: int = 1) -> NoReturn:
    click.echo(f"tollgate: {reason}", err=True)
    raise SystemExit(status)
