"""Statements of the request path: written in SQLAlchemy Core, compiled once, run on the driver.

The tables stay the only schema: SQL text and the conversion of values come from Core. Only the work
that SQLAlchemy repeats for each execution is saved. Errors are SQLAlchemy's, and a broken
connection leaves the pool, as after ``Connection.execute``; cursor events are not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NoReturn, TypeAlias

from sqlalchemy import JSON, Boolean, Connection, Dialect, bindparam
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ColumnElement

Row: TypeAlias = dict[str, Any]
"""A row by column name; the caller owns it and can change it."""

_Convert: TypeAlias = Callable[[Any], Any]


class any_of(ColumnElement[bool]):  # lower case, like other SQL functions
    """Whether a column is in a list. The list is one parameter, so the SQL text never varies."""

    type = Boolean()
    inherit_cache = False

    def __init__(self, column: ColumnElement[Any], name: str) -> None:
        self.column = column
        self.name = name

    def self_group(self, against: Any = None) -> ColumnElement[bool]:
        # Without this, SQLite is sent ``(…) = 1``, for which it uses no index.
        return self


@compiles(any_of, "sqlite")
def _any_of_sqlite(element: any_of, compiler: SQLCompiler, **kw: Any) -> str:
    values = compiler.process(bindparam(element.name, type_=JSON()), **kw)
    return f"{compiler.process(element.column)} IN (SELECT value FROM json_each({values}))"


@compiles(any_of, "postgresql")
def _any_of_postgresql(element: any_of, compiler: SQLCompiler, **kw: Any) -> str:
    # Without the column's length: a cast to VARCHAR(36) would cut off what is longer.
    kind = ARRAY(type(element.column.type)())
    values = compiler.process(bindparam(element.name, type_=kind), **kw)
    return f"{compiler.process(element.column)} = ANY ({values})"


class CompiledStatement:
    """A SELECT, INSERT, UPDATE or DELETE in Core, with named parameters.

    ``columns`` are those that an INSERT sets.
    """

    def __init__(self, statement: Any, *, columns: Iterable[str] | None = None) -> None:
        self._statement = statement
        self._columns = None if columns is None else list(columns)
        self._compiled: dict[str, _Compiled] = {}

    def rows(self, connection: Connection, **parameters: Any) -> list[Row]:
        """Execute once; return all rows."""
        compiled, cursor = self._start(connection)
        try:
            cursor.execute(compiled.sql, compiled.bind(parameters))
            return [compiled.read(row) for row in cursor.fetchall()]
        except BaseException as error:
            _fail(connection, compiled, cursor, error)

    def run(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute once for each row of parameters; without rows, do nothing."""
        if not rows:
            return
        compiled, cursor = self._start(connection)
        try:
            if len(rows) == 1:
                cursor.execute(compiled.sql, compiled.bind(rows[0]))
            else:
                cursor.executemany(compiled.sql, [compiled.bind(row) for row in rows])
        except BaseException as error:
            _fail(connection, compiled, cursor, error)

    def first_each(
        self, connection: Connection, rows: Sequence[Mapping[str, Any]]
    ) -> list[Row | None]:
        """Execute once for each row of parameters; return the first row of each result, if any."""
        if not rows:
            return []
        compiled, cursor = self._start(connection)
        found: list[Row | None] = []
        try:
            if len(rows) > 1 and connection.dialect.name == "postgresql":
                # One round trip for all.
                values = [compiled.bind(row) for row in rows]
                cursor.executemany(compiled.sql, values, returning=True)
                for _ in rows:
                    found.append(compiled.read_first(cursor))
                    cursor.nextset()
            else:
                for row in rows:
                    cursor.execute(compiled.sql, compiled.bind(row))
                    found.append(compiled.read_first(cursor))
            return found
        except BaseException as error:
            _fail(connection, compiled, cursor, error)

    def _start(self, connection: Connection) -> tuple[_Compiled, Any]:
        assert connection.in_transaction()
        dialect = connection.dialect
        compiled = self._compiled.get(dialect.name)
        if compiled is None:
            compiled = _Compiled(self._statement, self._columns, dialect)
            self._compiled[dialect.name] = compiled
        try:
            return compiled, connection.connection.cursor()
        except BaseException as error:
            _fail(connection, compiled, None, error)


class _Compiled:
    """The SQL text of a statement for one dialect, and the conversion of its values."""

    def __init__(self, statement: Any, columns: list[str] | None, dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect, column_keys=columns)
        self.sql: Final[str] = compiled.string
        self._fixed = {
            name: bound.value
            for name, bound in compiled.binds.items()
            if not bound.required and bound.value is not None
        }
        names: list[str] | None = compiled.positiontup
        self._in_order = None if names is None else _getter(names)
        converted = {
            name: convert
            for name, bound in compiled.binds.items()
            if (convert := bound.type.dialect_impl(dialect).bind_processor(dialect)) is not None
        }
        places: Iterable[tuple[Any, str]] = (
            enumerate(names) if names else zip(converted, converted, strict=True)
        )
        # Places of values, or their names if the driver takes names.
        self._binds = [
            (place, converted[name], _keeps_none(converted[name]))
            for place, name in places
            if name in converted
        ]
        self._columns = [*statement.exported_columns.keys()]
        self._results = [
            (name, convert, _keeps_none(convert))
            for name, column in statement.exported_columns.items()
            if (convert := column.type.dialect_impl(dialect).result_processor(dialect, None))
            is not None
        ]

    def bind(self, given: Mapping[str, Any]) -> list[Any] | dict[str, Any]:
        """Convert parameters to the driver's."""
        values: list[Any] | dict[str, Any]
        if self._in_order is None:
            values = {**self._fixed, **given}
        else:
            values = [*self._in_order({**self._fixed, **given} if self._fixed else given)]
        for place, convert, keeps_none in self._binds:
            value = values[place]
            if value is not None or not keeps_none:
                values[place] = convert(value)
        return values

    def read(self, row: Sequence[Any]) -> Row:
        """Convert a row of the driver."""
        found = dict(zip(self._columns, row, strict=True))
        for name, convert, keeps_none in self._results:
            value = found[name]
            if value is not None or not keeps_none:
                found[name] = convert(value)
        return found

    def read_first(self, cursor: Any) -> Row | None:
        row = cursor.fetchone()
        return None if row is None else self.read(row)


def _getter(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Iterable[Any]]:
    """Return a function that returns the values of these names in order."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: [values[name] for name in names]


def _keeps_none(convert: _Convert) -> bool:
    """Whether a conversion of values converts None to None, so that it need not be called."""
    try:
        return convert(None) is None
    except (AttributeError, TypeError):
        return False


def _fail(
    connection: Connection, compiled: _Compiled, cursor: Any, error: BaseException
) -> NoReturn:
    """Raise an error as SQLAlchemy does, and drop the connection if it is broken."""
    # Private, but the whole of what ``Connection.execute`` does with an error: translation, the
    # engine's handlers, the pool. Without parameters, which can contain a client's prompt.
    connection._handle_dbapi_exception(error, compiled.sql, None, cursor, None)
