"""PostgreSQL with few connections, and behind PgBouncer in transaction mode."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Connection, text

from proxy.cli.addresses import random_free_port
from proxy.database import migrate, postgresql
from proxy.database.unit_of_work import Database
from proxy.errors import StoreUnavailable
from proxy.lifecycle.check import check
from tests.database import WATCHING, needs_postgresql, postgresql_database, shared_server
from tests.proxy.turns.world import open_world

pytestmark = needs_postgresql

_ROLES = itertools.count()

needs_pgbouncer = pytest.mark.skipif(
    shutil.which("pgbouncer") is None and os.environ.get("BASE_RL_REQUIRE_PGBOUNCER") != "1",
    reason="no PgBouncer is installed (apt-get install pgbouncer)",
)


@contextmanager
def limited(connections: int, *, migrated: bool = True) -> Iterator[str]:
    """Yield the URL of a database for a new role with this connection limit."""
    role = f"few_{next(_ROLES)}"
    server = shared_server()
    with postgresql_database(migrated=False) as url:
        database = url.partition("@/")[2].partition("?")[0]
        server.run(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT {connections}")
        server.run(f"ALTER DATABASE {database} OWNER TO {role}")
        try:
            own = url.replace("postgres@", f"{role}@")
            if migrated:
                migrate.upgrade(own)
            yield own
        finally:
            with server.connect("postgres") as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,)
                )
            server.run(f"ALTER DATABASE {database} OWNER TO postgres")
            with server.connect(database) as connection:
                connection.execute(f"DROP OWNED BY {role}".encode())
            server.run(f"DROP ROLE {role}")


def touch(number: int) -> Callable[[Connection], int]:
    def write(connection: Connection) -> int:
        connection.execute(
            text("INSERT INTO write_probes (id, at) VALUES (:id, 0) ON CONFLICT (id) DO UPDATE SET at = 1"),
            {"id": number + 2},
        )
        return number

    return write


def count(connection: Connection) -> int:
    return int(connection.execute(text("SELECT count(*) FROM write_probes WHERE id > 1")).scalar_one())


async def everything_at_once(database: Database, number: int) -> None:
    """Writes with keys, writes without, and reads, all at the same time."""
    await asyncio.gather(
        *(database.commit(touch(one), order_key=str(one)) for one in range(number)),
        *(database.read(count) for _ in range(number)),
        *(database.commit(touch(number + one)) for one in range(number)),
    )
    assert await database.read(count) == 2 * number


@pytest.mark.parametrize("connections", [1, 2, 5])
async def test_a_role_with_few_connections_serves_everybody_in_turn(connections: int) -> None:
    """A proxy uses up to six connections by default."""
    with limited(connections) as url:
        database = Database(url, busy_timeout_seconds=60)
        await everything_at_once(database, 25)
        await database.aclose()


async def test_two_proxies_share_the_connections_of_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each closes idle connections, so that the other can connect."""
    monkeypatch.setattr(postgresql, "IDLE_SECONDS", 0.2)
    with limited(5) as url:
        first, second = Database(url, busy_timeout_seconds=60), Database(url, busy_timeout_seconds=60)
        await asyncio.gather(*(first.read(count) for _ in range(50)))
        await asyncio.gather(*(second.commit(touch(one)) for one in range(50)))
        await asyncio.gather(*(database.read(count) for database in (first, second) for _ in range(50)))
        await first.aclose()
        await second.aclose()


async def test_no_more_connections_are_made_than_allowed_and_idle_ones_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgresql, "IDLE_SECONDS", 0.2)
    with postgresql_database() as url:
        database = Database(url, connections=3)

        def held() -> int:
            # By name, because the connection of an earlier count may still be ending.
            with psycopg.connect(url, application_name=WATCHING) as connection:
                query = (
                    "SELECT count(*) FROM pg_stat_activity"
                    f" WHERE datname = current_database() AND application_name <> '{WATCHING}'"
                )
                return int(connection.execute(query).fetchall()[0][0])

        working = asyncio.create_task(everything_at_once(database, 60))
        most = 0
        while not working.done():
            most = max(most, await asyncio.to_thread(held))
        await working
        assert 1 <= most <= 3
        deadline = time.monotonic() + 20
        while held() > 0:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert await database.read(count) == 120
        await database.aclose()


async def test_work_without_a_free_connection_fails_without_naming_the_address_or_the_role() -> None:
    with limited(1) as url, psycopg.connect(url):
        role = url.partition("//")[2].partition("@")[0]
        database = Database(url, busy_timeout_seconds=0.3)
        with pytest.raises(StoreUnavailable, match="all connections are in use") as raised:
            await database.read(count)
        assert role not in raised.value.message
        await database.aclose()


async def test_errors_name_neither_the_server_nor_the_user() -> None:
    away = Database("postgresql://somebody:secret@127.0.0.1:1/hidden")
    nobody = Database(shared_server().url("postgres").replace("postgres@", "nobody_at_all@"))
    for database, hidden in ((away, ("somebody", "127.0.0.1", "secret")), (nobody, ("nobody_at_all", "/tmp"))):
        for use in (database.read(count), database.commit(touch(1))):
            with pytest.raises(StoreUnavailable, match="cannot be reached") as raised:
                await use
            assert not any(word in raised.value.message for word in hidden)
        await database.aclose()


async def test_writes_continue_while_slow_reads_use_all_their_connections() -> None:
    under_way, written = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        connection.execute(text("SELECT 1"))
        under_way.set()
        assert written.wait(60)

    with postgresql_database() as url:
        database = Database(url, connections=2)
        reading = asyncio.create_task(database.read(slow))
        assert await asyncio.to_thread(under_way.wait, 60)
        assert await database.commit(touch(1)) == 1
        written.set()
        await reading
        await database.aclose()


@contextmanager
def pgbouncer(directory: Path, url: str, *, servers: int) -> Iterator[str]:
    """Yield the database's URL through PgBouncer in transaction mode, with this number of server connections."""
    database, _, socket = url.partition("@/")[2].partition("?host=")
    port = random_free_port("127.0.0.1")
    users = directory / "users.txt"
    users.write_text('"postgres" ""\n')
    config = directory / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n{database} = host={socket} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nunix_socket_dir =\nauth_type = any\nauth_file = {users}\npool_mode = transaction\n"
        f"default_pool_size = {servers}\nserver_idle_timeout = 2\n"
    )
    for path in (directory, users, config):
        path.chmod(0o755)
    for parent in list(directory.parents)[:3]:  # pytest's own directories are readable by their owner only
        parent.chmod(0o755)
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    user = ["-u", "postgres"] if os.geteuid() == 0 else []
    with (directory / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen([program, *user, str(config)], stdout=log, stderr=log)
    pooled = f"postgresql://postgres@127.0.0.1:{port}/{database}"
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                psycopg.connect(pooled, connect_timeout=5).close()
                break
            except psycopg.OperationalError:
                assert process.poll() is None, (directory / "pgbouncer.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield pooled
    finally:
        process.terminate()
        process.wait(20)


@needs_pgbouncer
async def test_everything_works_behind_pgbouncer_in_transaction_mode(tmp_path: Path) -> None:
    """Migrate, run every kind of work often enough for statements to be prepared, and check the store."""
    with postgresql_database(migrated=False) as direct, pgbouncer(tmp_path, direct, servers=2) as url:
        migrate.upgrade(url)
        database = Database(url, statement_timeout_seconds=30, synchronous="normal")
        await everything_at_once(database, 30)

        def shown(connection: Connection) -> list[str]:
            names = ("statement_timeout", "synchronous_commit", "jit", "enable_seqscan")
            return [str(connection.execute(text(f"SHOW {name}")).scalar_one()) for name in names]

        for _ in range(10):
            assert await database.commit(shown) == ["30s", "off", "off", "off"]
            assert await database.read(shown) == ["30s", "off", "off", "on"]
        with psycopg.connect(url, prepare_threshold=None) as connection:
            (left,) = connection.execute("SHOW enable_seqscan").fetchall()[0]
            assert left == "on", "nothing stays behind for others"
        await database.aclose()
        async with open_world(url) as world:
            for _ in range(12):
                await world.ready()
        assert check(url) == []
