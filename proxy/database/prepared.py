"""Statements of the hot path, compiled once and run on the driver's cursor.

SQLAlchemy spends about 100 µs on a statement around SQLite's own work, and more on the insert of a turn's row; a
prepared statement takes 15 µs. Use it where a model call waits: recording a turn, opening a session. Everywhere else
use `connection.execute`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from sqlalchemy import (
    ARRAY,
    JSON,
    ColumnElement,
    Connection,
    Dialect,
    Executable,
    String,
    Table,
    TableValuedAlias,
    Text,
    bindparam,
    column,
    func,
    insert,
    literal_column,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ClauseElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from proxy.database.packed_json import json_text

_Convert = Callable[[Any], Any]


class Prepared:
    """A statement of SQLAlchemy Core, compiled at its first use. Raises SQLAlchemy's exceptions.

    Use `among` for a condition on a list of values. For an insert, `columns` names the columns that every row has.
    Rows are the driver's own tuples, so select only columns that need no conversion (no JSON).
    """

    def __init__(self, statement: Executable, columns: Sequence[str] | None = None) -> None:
        self._statement = statement
        self._columns = columns
        self._texts: dict[tuple[str, str], _Text] = {}

    def run(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Run the statement within a transaction and return its rows, if it has any."""
        dialect = connection.dialect
        text = self._texts.get((dialect.name, dialect.driver))
        if text is None:
            text = self._texts[dialect.name, dialect.driver] = _Text(self._statement, self._columns, dialect)
        return _run(connection, text.sql, text.parameters(values))


class NewRows:
    """Inserts rows into a table, leaving out the columns `filled`, which the database fills."""

    # Several rows use PostgreSQL's COPY, which costs half as much as inserts.

    def __init__(self, table: Table, *, filled: Collection[str] = ()) -> None:
        self._columns = [column for column in table.columns if column.name not in filled]
        self._insert = Prepared(insert(table), [column.name for column in self._columns])
        names = ", ".join(f'"{column.name}"' for column in self._columns)
        self._sql = f'COPY "{table.name}" ({names}) FROM STDIN (FORMAT BINARY)'
        self._types: list[str] = []

    def add(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert the rows in order, within a transaction. Each has every column that is not filled, None for null.

        Raise SQLAlchemy's exceptions.
        """
        if len(rows) > 1 and _is_psycopg(connection):
            self._copy(connection, rows)
            return
        for row in rows:
            self._insert.run(connection, row)

    def _copy(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        dialect = connection.dialect
        self._types = self._types or [_sent_as(column.type, dialect) for column in self._columns]
        converts = [_converter(column.type, dialect) for column in self._columns]
        named = [(column.name, convert) for column, convert in zip(self._columns, converts, strict=True)]
        with _cursor(connection, self._sql) as cursor, cursor.copy(self._sql) as copy:
            copy.set_types(self._types)
            for row in rows:
                copy.write_row(
                    [
                        value if convert is None or value is None else convert(value)
                        for value, convert in ((row[name], convert) for name, convert in named)
                    ]
                )


class _TextList(TypeDecorator[Sequence[str]]):
    """A list of texts as one parameter: an array on PostgreSQL, JSON on SQLite."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(ARRAY(Text()) if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: Sequence[str] | None, dialect: Dialect) -> Any:
        return list(value or ()) if dialect.name == "postgresql" else json_text(value)


class _Among(FunctionElement[Any]):
    inherit_cache = True
    name = "among"


@compiles(_Among, "postgresql")
def _any_of(element: _Among, compiler: SQLCompiler, **kwargs: Any) -> str:
    column, values = (compiler.process(clause, **kwargs) for clause in element.clauses)
    return f"{column} = ANY ({values})"


@compiles(_Among)
def _in_list(element: _Among, compiler: SQLCompiler, **kwargs: Any) -> str:
    column, values = (compiler.process(clause, **kwargs) for clause in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({values}))"  # noqa: S608  (both are the compiler's)


def among(column: ColumnElement[Any] | InstrumentedAttribute[Any], parameter: str) -> ColumnElement[Any]:
    """Return the condition that a text column has one of the values in a list parameter.

    The list is a single parameter, so the statement is the same for every length and no limit on parameters applies.
    """
    return _Among(column, bindparam(parameter, type_=_TextList()))


def given_rows(**types: TypeEngine[Any]) -> TableValuedAlias:
    """Return a table of given rows for a statement of PostgreSQL: each parameter is the list of a column's values."""
    lists = [bindparam(name, type_=ARRAY(type_)) for name, type_ in types.items()]
    columns = [column(name, type_) for name, type_ in types.items()]
    return func.unnest(*lists).table_valued(*columns, name="given").render_derived()


def unindexed(column: ColumnElement[Any] | InstrumentedAttribute[Any]) -> ColumnElement[Any]:
    """Return `column` as an expression that no index covers, for a condition next to one that names a row by its id.

    Before a table is analysed for the first time, PostgreSQL considers all of its indexes equally good, and may scan
    a whole index that covers the extra condition. It keeps that plan until the table is analysed, after a minute or
    more.
    """
    if isinstance(column.type, String):
        return column.op("||", return_type=column.type)(literal_column("''"))
    return column.op("+", return_type=column.type)(literal_column("0"))


def run_plain(connection: Connection, sql: str) -> None:
    """Run a statement without parameters that every database has, such as SAVEPOINT."""
    _run(connection, sql, ())


def run_script(connection: Connection, sql: str) -> None:
    """Run several statements of PostgreSQL, sent as one message, without parameters or results."""
    with _cursor(connection, sql) as cursor:
        cursor.execute(sql, prepare=False)  # only a single statement can be prepared


def _sent_as(type_: TypeEngine[Any], dialect: Dialect) -> str:
    """Return PostgreSQL's name of the type in which the driver sends a column's values."""
    if isinstance(type_, JSON):
        return "text"  # our JSON is already text, and a json column reads the same binary form
    name = str(type_.compile(dialect=dialect)).partition("(")[0].partition(" COLLATE ")[0].lower()
    return "float8" if name == "float" else name


def _converter(type_: TypeEngine[Any], dialect: Dialect) -> _Convert | None:
    """Return the function that converts a value to what the driver sends; None if the driver takes it as it is."""
    # SQLAlchemy's own bind processors do not fit here: they wrap values for a cast in the statement's text.
    if isinstance(type_, JSON):
        return json_text
    if isinstance(type_, TypeDecorator):
        return lambda value: type_.process_bind_param(value, dialect)
    return None


def _run(connection: Connection, sql: str, parameters: Any) -> Sequence[tuple[Any, ...]]:
    # On the driver's own connection, not SQLAlchemy's wrapper: every statement of a commit runs here, and the wrapper
    # costs as much as SQLite's work. sqlite3 and psycopg both execute without a cursor made before, which ends with
    # the last reference to it.
    driver: Any = connection.connection.driver_connection
    try:
        if _is_psycopg(connection):
            cursor = driver.execute(sql, parameters, binary=True)  # binary results: blobs take half the bytes
        else:
            cursor = driver.execute(sql, parameters)
        return cursor.fetchall() if cursor.description is not None else ()
    except connection.dialect.loaded_dbapi.Error as error:
        raise _own_error(connection, sql, error) from error


def _is_psycopg(connection: Connection) -> bool:
    return connection.dialect.driver == "psycopg"


@contextmanager
def _cursor(connection: Connection, sql: str) -> Iterator[Any]:
    """Open the driver's own cursor, and raise its errors as SQLAlchemy's, with the statement `sql`."""
    cursor = connection.connection.cursor()
    try:
        yield cursor
    except connection.dialect.loaded_dbapi.Error as error:
        raise _own_error(connection, sql, error) from error
    finally:
        cursor.close()


def _own_error(connection: Connection, sql: str, error: Exception) -> BaseException:
    """Return SQLAlchemy's exception for one of the driver's."""
    base = cast("type[Exception]", connection.dialect.loaded_dbapi.Error)
    return DBAPIError.instance(sql, None, error, base, dialect=connection.dialect)


class _Text:
    """A statement compiled for one driver."""

    def __init__(self, statement: Executable, columns: Sequence[str] | None, dialect: Dialect) -> None:
        element = cast("ClauseElement", statement)
        names = None if columns is None else list(columns)
        compiled = cast("SQLCompiler", element.compile(dialect=dialect, column_keys=names))
        if compiled.prefetch or compiled.post_compile_params or compiled.literal_execute_params:
            raise ValueError(f"every value must be a parameter, and a list needs `among`: {compiled}")
        self.sql = str(compiled)
        self._given: Mapping[str, Any] = compiled.params
        self._order = compiled.positiontup
        self._names = list(compiled.params) if self._order is None else list(dict.fromkeys(self._order))
        self._convert: dict[str, _Convert] = {}
        for parameter, name in compiled.bind_names.items():
            convert = parameter.type.dialect_impl(dialect).bind_processor(dialect)
            if convert is not None:
                self._convert[name] = convert

    def parameters(self, values: Mapping[str, Any]) -> Any:
        """Return `values`, with the statement's own constants, in the form that the driver takes."""
        found = {**self._given, **values}
        for name, convert in self._convert.items():
            found[name] = convert(found[name])
        if self._order is not None:
            return [found[name] for name in self._order]
        return {name: found[name] for name in self._names}
