from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

import migrations
from proxy.database.migrate import current, downgrade, upgrade
from proxy.database.tables import Base
from proxy.settings import ConfigurationError

_SCRIPTS = ScriptDirectory(str(Path(migrations.__file__).parent))
NEWEST = str(_SCRIPTS.get_current_head())


def tables(path: Path) -> set[str]:
    with sqlite3.connect(path) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    return names


def differences(path: Path) -> list[object]:
    engine = create_engine(f"sqlite:///{path}")
    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            return list(compare_metadata(context, Base.metadata))
    finally:
        engine.dispose()


def test_an_upgraded_database_has_exactly_the_declared_tables(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    upgrade(f"sqlite+aiosqlite:///{path}")
    assert differences(path) == []
    assert tables(path) >= set(Base.metadata.tables)


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
    return {name: sorted(clauses(sql)) for name, sql in rows}


def clauses(sql: str) -> list[str]:
    """What stands between the commas of a statement's outer parentheses, and what stands before them: a column that
    was added later follows the constraints."""
    found, depth = [""], 0
    for character in " ".join(sql.split()):
        depth += (character == "(") - (character == ")")
        if depth <= 1 and character in ",()":
            found.append("")
        else:
            found[-1] += character
    return [clause.strip().replace("( ", "(").replace(" )", ")") for clause in found if clause.strip()]


def test_down_to_nothing_and_up_again(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    url = f"sqlite+aiosqlite:///{path}"
    assert current(url) is None
    upgrade(url)
    assert current(url) == NEWEST
    downgrade(url, "base")
    assert current(url) is None
    assert tables(path) == {"alembic_version"}
    upgrade(url)
    upgrade(url)
    assert differences(path) == []


def test_a_database_of_a_newer_version_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    upgrade(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(ConfigurationError, match="newer"):
        upgrade(f"sqlite:///{path}")


def test_a_file_that_is_no_database_is_refused_with_a_remedy_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    content = b"this is no database, but long enough to be taken for one. " * 100
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="backup"):
        upgrade(f"sqlite:///{path}")
    assert path.read_bytes() == content


def test_processes_that_start_at_once_migrate_once(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'store.sqlite3'}"
    script = f"from proxy.database.migrate import upgrade, current; upgrade({url!r}); print(current({url!r}))"
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out.strip()) == (0, NEWEST), err
