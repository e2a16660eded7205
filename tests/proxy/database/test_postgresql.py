"""PostgreSQL's own cases: other writers, and a server that stops and starts again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from sqlalchemy import Connection, text

from proxy.claims.repository import ClaimRepository
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, StoreContended, StoreUnavailable
from tests.database import PostgresServer, needs_postgresql, postgresql_database

pytestmark = needs_postgresql


@pytest.fixture
def url() -> Iterator[str]:
    with postgresql_database(migrated=False) as made:
        yield made


@pytest.fixture
async def pair(url: str) -> AsyncIterator[tuple[Database, Database]]:
    """Two proxies' connections to one database with a table of two accounts."""
    first, second = Database(url), Database(url)

    def work(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE accounts (name TEXT PRIMARY KEY, value INTEGER NOT NULL)"))
        connection.execute(text("INSERT INTO accounts VALUES ('a', 0), ('b', 0)"))

    await first.commit(work)
    yield first, second
    await first.aclose()
    await second.aclose()


def add(connection: Connection, name: str) -> None:
    connection.execute(text("UPDATE accounts SET value = value + 1 WHERE name = :name"), {"name": name})


async def values(database: Database) -> dict[str, int]:
    def read(connection: Connection) -> dict[str, int]:
        return {row[0]: row[1] for row in connection.execute(text("SELECT name, value FROM accounts"))}

    return await database.read(read)


def setting(name: str) -> Callable[[Connection], str]:
    return lambda connection: str(connection.execute(text(f"SHOW {name}")).scalar_one())


class Crossing:
    """Two writes of two accounts each, in opposite order, that both hold their first before either asks for its
    second. `begun` counts."""

    def __init__(self) -> None:
        self.begun = 0
        self._both = threading.Barrier(2)

    def write(self, first: str, second: str) -> Callable[[Connection], None]:
        met = False

        def write(connection: Connection) -> None:
            nonlocal met
            self.begun += 1
            add(connection, first)
            if not met:
                met = True
                self._both.wait(10)
            add(connection, second)

        return write


async def test_two_transactions_in_a_deadlock_are_both_committed(pair: tuple[Database, Database]) -> None:
    crossing = Crossing()
    await asyncio.gather(pair[0].commit(crossing.write("a", "b")), pair[1].commit(crossing.write("b", "a")))
    assert await values(pair[0]) == {"a": 2, "b": 2}
    assert crossing.begun > 2, "one was run again"


async def test_writes_that_share_a_transaction_with_a_deadlocked_one_are_committed_once(
    pair: tuple[Database, Database],
) -> None:
    crossing = Crossing()

    def mate(number: int) -> Callable[[Connection], int]:
        def write(connection: Connection) -> int:
            connection.execute(text("INSERT INTO accounts VALUES (:name, 0)"), {"name": f"mate {number}"})
            return number

        return write

    results = await asyncio.gather(
        pair[0].commit(mate(0)),
        pair[0].commit(crossing.write("a", "b")),
        pair[0].commit(mate(1)),
        pair[1].commit(crossing.write("b", "a")),
    )
    assert (results[0], results[2]) == (0, 1)
    assert await values(pair[1]) == {"a": 2, "b": 2, "mate 0": 0, "mate 1": 0}


async def test_the_second_of_two_inserts_of_one_name_finds_the_first(pair: tuple[Database, Database]) -> None:
    both = threading.Barrier(2)
    met = set()

    def find_or_insert(who: str) -> Callable[[Connection], str]:
        def write(connection: Connection) -> str:
            found = connection.execute(text("SELECT name FROM accounts WHERE name = 'new'")).scalar_one_or_none()
            if who not in met:
                met.add(who)
                both.wait(10)
            if found is not None:
                return f"{who} found it"
            connection.execute(text("INSERT INTO accounts VALUES ('new', 0)"))
            return f"{who} made it"

        return write

    results = await asyncio.gather(pair[0].commit(find_or_insert("0")), pair[1].commit(find_or_insert("1")))
    assert sorted(result[2:] for result in results) == ["found it", "made it"]


async def test_a_write_that_always_conflicts_fails_after_five_attempts(
    pair: tuple[Database, Database],
) -> None:
    begun = 0

    def contended(connection: Connection) -> None:
        nonlocal begun
        begun += 1
        connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$"))

    with pytest.raises(StoreContended):
        await pair[0].commit(contended)
    assert begun == 5


async def test_a_read_sees_one_state_whatever_is_written_meanwhile(pair: tuple[Database, Database]) -> None:
    begun, written = threading.Event(), threading.Event()

    def read_twice(reader: Connection) -> list[int]:
        first = reader.execute(text("SELECT sum(value) FROM accounts")).scalar_one()
        begun.set()
        written.wait(10)
        return [first, reader.execute(text("SELECT sum(value) FROM accounts")).scalar_one()]

    reading = asyncio.create_task(pair[0].read(read_twice))
    await asyncio.to_thread(begun.wait, 10)
    await pair[1].commit(lambda writer: add(writer, "a"))
    written.set()
    assert await reading == [0, 0]


async def test_a_read_cannot_write(pair: tuple[Database, Database]) -> None:
    with pytest.raises(StoreUnavailable, match="read-only"):
        await pair[0].read(lambda connection: add(connection, "a"))
    assert await values(pair[0]) == {"a": 0, "b": 0}


async def test_waiting_for_a_lock_is_bounded(url: str, pair: tuple[Database, Database]) -> None:
    impatient = Database(url, busy_timeout_seconds=0.05)
    try:
        locked, done = threading.Event(), threading.Event()

        def hold(connection: Connection) -> None:
            add(connection, "a")
            locked.set()
            done.wait(10)

        holding = asyncio.create_task(pair[0].commit(hold))
        await asyncio.to_thread(locked.wait, 10)
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            await impatient.commit(lambda writer: add(writer, "a"))
        done.set()
        await holding
        await impatient.commit(lambda writer: add(writer, "a"))
    finally:
        await impatient.aclose()
    assert (await values(pair[0]))["a"] == 2


async def test_the_time_of_a_statement_is_bounded(url: str) -> None:
    impatient = Database(url, statement_timeout_seconds=0.05)
    try:
        with pytest.raises(StoreUnavailable, match="statement timeout"):
            await impatient.read(lambda connection: connection.execute(text("SELECT pg_sleep(30)")))
        assert await impatient.read(setting("statement_timeout")) == "50ms"
    finally:
        await impatient.aclose()


@pytest.mark.parametrize(("asked", "waits"), [(None, "on"), ("normal", "off"), ("full", "on")])
async def test_a_commit_waits_for_the_disk_as_configured(url: str, asked: str | None, waits: str) -> None:
    database = Database(url, synchronous=asked)
    try:
        assert await database.commit(setting("synchronous_commit")) == waits
    finally:
        await database.aclose()


async def test_only_leases_commit_without_waiting_for_the_disk(pair: tuple[Database, Database]) -> None:
    def lease(connection: Connection) -> str:
        ClaimRepository(connection).commit_without_flush()
        return setting("synchronous_commit")(connection)

    assert await pair[0].commit(lease) == "off"
    assert await pair[0].commit(setting("synchronous_commit")) == "on"


async def test_a_value_that_the_database_cannot_hold_is_an_invalid_request(pair: tuple[Database, Database]) -> None:
    for value in (2**40, "text\0more"):
        with pytest.raises(InvalidRequest, match="cannot hold"):
            await pair[0].commit(
                lambda connection, value=value: connection.execute(  # type: ignore[misc]
                    text("INSERT INTO accounts VALUES (:name, :value)"),
                    {"name": str(value), "value": value if isinstance(value, int) else 0},
                )
            )
    assert await values(pair[0]) == {"a": 0, "b": 0}


async def test_the_first_calls_after_a_restart_of_the_server_succeed(url: str) -> None:
    """The proxy is not restarted; it replaces all of its connections."""
    server = PostgresServer()
    server.start()
    database = Database(server.url("postgres"))
    try:
        await database.commit(lambda connection: connection.execute(text("CREATE TABLE kept (value INTEGER)")))
        for acknowledged, end in enumerate((server.stop, server.kill, server.kill), start=1):
            await add_one(database, acknowledged - 1)
            assert await counted(database) == acknowledged
            end()
            with pytest.raises(StoreUnavailable):
                await add_one(database, 1000)
            with pytest.raises(StoreUnavailable):
                await counted(database)
            with pytest.raises(StoreUnavailable):
                await database.commit(lambda connection: connection.execute(text("INSERT INTO kept VALUES (2000)")))
            server.start()
            assert await counted(database) == acknowledged
            rows = await database.read(
                lambda connection: connection.execute(text("SELECT value FROM kept ORDER BY value")).scalars().all()
            )
            assert list(rows) == list(range(acknowledged))
            await database.commit(lambda connection: connection.execute(text("SELECT 1")))
    finally:
        await database.aclose()
        server.remove()


async def add_one(database: Database, value: int) -> None:
    await database.commit(
        lambda connection: connection.execute(text("INSERT INTO kept VALUES (:value)"), {"value": value})
    )


async def counted(database: Database) -> int:
    return int(
        await database.read(lambda connection: connection.execute(text("SELECT count(*) FROM kept")).scalar_one())
    )


async def test_a_connection_closed_by_the_server_is_replaced_unnoticed(
    pair: tuple[Database, Database],
) -> None:
    await values(pair[0])
    await pair[0].commit(lambda connection: add(connection, "a"))
    await pair[1].commit(
        lambda connection: connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid != pg_backend_pid()"
            )
        )
    )
    await pair[0].commit(lambda connection: add(connection, "a"))
    assert (await values(pair[0]))["a"] == 2
