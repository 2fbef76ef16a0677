"""Shared by all commands: types of options, access to the database, output and errors.

Output is a table or, with ``--json``, JSON. An error is one line on stderr. SQL is imported when a
command opens the database; ``tollgate up`` never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import getitem
from typing import TYPE_CHECKING, Any, BinaryIO, Concatenate, Final, NoReturn, ParamSpec, TypeVar

import click
import msgspec
from pydantic import BaseModel, ValidationError

from gateway.pricing import parse_usd
from gateway.settings import Settings
from gateway.tasks.mistakes import invalid_field

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from gateway.audit_log import Author
    from gateway.sql.database import Database

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Body = TypeVar("Body", bound=BaseModel)

_ACTOR: Final = "tollgate.actor"
_REASON: Final = "tollgate.reason"


def _keep(name: str) -> Callable[[click.Context, click.Parameter, str], None]:
    """Return a callback that keeps an option's value for ``perform``."""
    return lambda ctx, param, value: ctx.meta.update({name: value})


actor_option = click.option(
    "--actor",
    default="operator",
    envvar="TOLLGATE_ACTOR",
    show_default=True,
    expose_value=False,
    callback=_keep(_ACTOR),
    help="Name recorded as the author.",
)
"""Option of every command that changes something; ``perform`` reads it."""
audit_reason_option = click.option(
    "--reason",
    default="",
    expose_value=False,
    callback=_keep(_REASON),
    help="Reason, recorded in the audit log.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Usd(click.ParamType[str]):
    """Amount of USD, as the decimal string that bodies of operations contain."""

    name = "USD"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_usd(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Clear:
    """The value ``none`` of an option, which removes a limit."""


CLEAR: Final = Clear()


class OrNone(click.ParamType[Any]):
    """Type of an option that also accepts ``none``."""

    def __init__(self, value: click.ParamType[Any]) -> None:
        self._value = value
        self.name = f"{value.name}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return CLEAR if value == "none" else self._value.convert(value, param, ctx)


class UtcTime(click.DateTime):
    """Moment in UTC, entered without an offset, as the string that bodies of operations contain."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return f"{super().convert(value, param, ctx).isoformat()}Z"


class Commands(click.Group):
    """Group that reports a negative amount as such; click mistakes ``-5`` for an option."""

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


class LazyCommands(Commands):
    """Group that imports a command when it is used, since most modules are slow to import.

    ``places`` maps names of commands to ``module:attribute`` in ``package``.
    """

    def __init__(
        self, *arguments: Any, package: str, places: Mapping[str, str], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._package = package
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._places])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._places:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self._places[cmd_name].partition(":")
        found = getattr(importlib.import_module(f"{self._package}.{module}"), attribute)
        assert isinstance(found, click.Command)
        return found


def subcommands(group: click.Group, ctx: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group with their names, in alphabetical order."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        yield name, command


def page_options(command: F) -> F:
    """Add the options of a list in pages."""
    limit = click.option(
        "--limit",
        type=click.IntRange(1, 100_000),
        default=1000,
        show_default=True,
        help="Number of rows.",
    )
    after = click.option("--after", "cursor", metavar="ID", help="Only rows after this one.")
    return limit(after(command))


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
    from gateway.sql.database import Database, schema_is_current

    file = settings.sqlite_file
    if file is not None and not file.exists():
        refuse(
            f"there is no installation at {file}; run `tollgate up` or `tollgate migrate` here, go "
            "to the directory in which it was started, or set TOLLGATE_HOME to its home"
        )
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


def command_author() -> Author:
    """Return the author of the running command, which has the option ``--actor``."""
    from gateway.audit_log import Author

    entered = click.get_current_context().meta
    return Author(entered[_ACTOR], "cli", reason=entered.get(_REASON, ""))


def perform(
    operation: Callable[Concatenate[Connection, Author, P], T],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Run an operation in one transaction, as an act of the command's author."""
    author = command_author()
    with transaction() as connection:
        return operation(connection, author, *args, **kwargs)


def look_up(
    operation: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run an operation that reads, on one snapshot."""
    with snapshot() as connection:
        return operation(connection, *args, **kwargs)


def read_body(kind: type[Body], entered: Mapping[str, Any]) -> Body:
    """Build an operation's body from options. Options that were not given keep its defaults, and
    ``none`` becomes null.

    Raise ``InvalidRequest``.
    """
    try:
        return kind.model_validate(
            {
                name: None if value is CLEAR else value
                for name, value in entered.items()
                if value not in (None, ())
            }
        )
    except ValidationError as error:
        raise invalid_field(error.errors(include_url=False)) from None


def columns(names: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that picks a table row from a view; ``a.b`` is field ``b`` of ``a``."""
    paths = names.split()
    return lambda view: {path: functools.reduce(getitem, path.split("."), view) for path in paths}


def print_views(
    views: Sequence[Mapping[str, Any]], row: Callable[[Any], dict[str, Any]], as_json: bool
) -> None:
    """Print views of operations: as JSON exactly as HTTP returns them, or as a table of ``row``."""
    if as_json:
        print_json(views)
    else:
        print_rows(views, row, False)


def print_page(
    page: tuple[Sequence[Mapping[str, Any]], str | None],
    row: Callable[[Any], dict[str, Any]],
    as_json: bool,
    option: str = "--after",
) -> None:
    """Print a page of views and, if there are more, on standard error the option to continue."""
    views, cursor = page
    print_views(views, row, as_json)
    if cursor is not None:
        click.echo(f"there are more: continue with {option} {cursor}", err=True)


def write_pages(
    file: BinaryIO, operation: Callable[..., tuple[bytes, str | None]], /, *args: Any, **kwargs: Any
) -> None:
    """Write what an operation encodes of an export after each ``cursor``, until the last part."""
    part, cursor = operation(*args, **kwargs, cursor=None)
    file.write(part)
    while cursor is not None:
        part, cursor = operation(*args, **kwargs, cursor=cursor)
        file.write(part)


def print_json(value: object) -> None:
    click.echo(msgspec.json.encode(value).decode())


def print_rows(items: Sequence[Any], row: Callable[[Any], dict[str, Any]], as_json: bool) -> None:
    rows = [row(item) for item in items]
    if as_json:
        print_json(rows)
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
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value)


def refuse(reason: str, *, status: int = 1) -> NoReturn:
    click.echo(f"tollgate: {reason}", err=True)
    raise SystemExit(status)
