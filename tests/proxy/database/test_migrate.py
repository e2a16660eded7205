from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, inspect, make_url, text
from sqlalchemy.pool import NullPool

import migrations
from proxy.database.migrate import current, downgrade, upgrade
from proxy.database.tables import Base
from proxy.errors import StoreUnavailable
from proxy.settings import ConfigurationError
from tests.database import needs_postgresql, shared_server

_SCRIPTS = ScriptDirectory(str(Path(migrations.__file__).parent))
NEWEST = str(_SCRIPTS.get_current_head())


def plain_engine(url: str) -> Engine:
    drivers = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
    return create_engine(make_url(url).set(drivername=drivers[make_url(url).get_backend_name()]), poolclass=NullPool)


def tables(url: str) -> set[str]:
    with plain_engine(url).connect() as connection:
        return set(inspect(connection).get_table_names())


def differences(url: str) -> list[object]:
    with plain_engine(url).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))


def test_an_upgraded_database_has_exactly_the_declared_tables(empty_database_url: str) -> None:
    upgrade(empty_database_url)
    assert differences(empty_database_url) == []
    assert tables(empty_database_url) >= set(Base.metadata.tables)


def test_constraints_and_indexes_are_those_of_the_metadata(tmp_path: Path) -> None:
    """Autogenerate does not compare CHECK constraints, so the DDL itself is compared."""
    migrated, declared = tmp_path / "migrated.sqlite3", tmp_path / "declared.sqlite3"
    upgrade(f"sqlite:///{migrated}")
    engine = create_engine(f"sqlite:///{declared}")
    Base.metadata.create_all(engine)
    engine.dispose()
    assert normalised_schema(migrated) == normalised_schema(declared)


def normalised_schema(path: Path) -> dict[str, list[str]]:
    connection = sqlite3.connect(path)
    rows = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name != 'alembic_version'"
    ).fetchall()
    connection.close()
    # SQLite quotes the name of a table that a migration has renamed.
    return {name: sorted(clauses(sql.replace('"', ""))) for name, sql in rows}


def clauses(sql: str) -> list[str]:
    """Return the clauses between the commas of a statement's outer parentheses, and the text before them: a column
    that was added later follows the constraints."""
    found, depth = [""], 0
    for character in " ".join(sql.split()):
        depth += (character == "(") - (character == ")")
        if depth <= 1 and character in ",()":
            found.append("")
        else:
            found[-1] += character
    return [clause.strip().replace("( ", "(").replace(" )", ")") for clause in found if clause.strip()]


def test_migrations_go_down_to_nothing_and_up_again(empty_database_url: str) -> None:
    url = empty_database_url
    assert current(url) is None
    upgrade(url)
    assert current(url) == NEWEST
    downgrade(url, "base")
    assert current(url) is None
    assert tables(url) == {"alembic_version"}
    upgrade(url)
    upgrade(url)
    assert differences(url) == []


def changed(url: str, *statements: str) -> None:
    with plain_engine(url).begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_a_database_of_a_newer_version_is_refused_with_a_remedy(database_url: str) -> None:
    changed(database_url, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(ConfigurationError, match="newer"):
        upgrade(database_url)


def test_a_database_that_lacks_a_table_or_a_column_is_refused_with_a_remedy(database_url: str) -> None:
    changed(database_url, "ALTER TABLE events DROP COLUMN data", "DROP TABLE claimed_sessions")
    with pytest.raises(ConfigurationError, match=r"claimed_sessions, events\.data.*backup"):
        upgrade(database_url)


def test_a_database_with_foreign_tables_is_refused_and_unchanged(empty_database_url: str) -> None:
    changed(empty_database_url, "CREATE TABLE sessions (name TEXT)")
    with pytest.raises(ConfigurationError, match="name an empty database"):
        upgrade(empty_database_url)
    assert tables(empty_database_url) == {"sessions"}


@needs_postgresql
def test_an_unusable_address_is_reported_with_its_cause() -> None:
    url = shared_server().url("store")
    with pytest.raises(ConfigurationError, match="createdb"):
        upgrade(url)
    with pytest.raises(ConfigurationError, match="no such database or user"):
        upgrade(url.replace("postgres@", "nobody:secret@"))
    with pytest.raises(StoreUnavailable, match="cannot be reached") as refused:
        upgrade("postgresql://somebody:secret@127.0.0.1:1/store?connect_timeout=2")
    assert "secret" not in refused.value.message


def test_a_file_that_is_no_database_is_refused_with_a_remedy_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    content = b"this is no database, but long enough to be taken for one. " * 100
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="backup"):
        upgrade(f"sqlite:///{path}")
    assert path.read_bytes() == content


def test_processes_that_start_at_once_migrate_once(empty_database_url: str) -> None:
    url = empty_database_url
    script = f"from proxy.database.migrate import upgrade, current; upgrade({url!r}); print(current({url!r}))"
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out.strip()) == (0, NEWEST), err
