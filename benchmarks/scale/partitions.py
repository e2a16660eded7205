"""`python -m benchmarks.scale.partitions [--turns 240000] [--months 24] [--short]`: one table of turns beside a table
that is partitioned by month, on PostgreSQL → `benchmarks/results/partitions.json`.

Both have the columns and indexes of the real table, and the same rows. Measured are the queries that calls make, in
blocks that alternate between the tables, and the erasure of the content of the oldest month: by updates, as retention
does it, and by dropping the partition. Foreign keys are not checked, because a partition that others refer to cannot
be dropped before the references are deleted. Only ratios are results.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.machine import describe
from benchmarks.postgresql import DURABLE, PostgresServer
from proxy.contract.identifiers import least_turn_id
from proxy.database.migrate import upgrade

RESULT = Path(__file__).parents[1] / "results" / "partitions.json"
PLAIN, PARTITIONED = "turns", "turns_by_month"
TURNS_PER_SESSION = 5
KINDS = ("by id", "by conversation", "by conversation, since", "of a session", "insertion")
_MONTH = 30 * 86400.0
_BEGAN = 1_750_000_000.0
_BLOCKS, _PER_BLOCK = 15, 200
_TURNS_AT_ONCE = 200
"""Turns in one transaction of retention, as in `proxy.retention.eraser`."""
_CONTENT = 600
"""Bytes of each of request, messages and answer, which is little: contents of agents are longer."""
_COLUMNS = (
    "id, run_id, session_id, ordinal, prefix_tokens, prompt_ids, output_ids, output_logprobs, spans, sampling,"
    " finish_reason, continuation, state, attributed_by, conversation_hash, tools_hash, prompt_token_count,"
    " started_at, finished_at, messages, request, response"
)

Connection = psycopg.Connection[tuple[object, ...]]
Row = tuple[Any, ...]


def rows_of(first: int, count: int, months: int, total: int) -> Iterator[Row]:
    """Yield `count` turns from number `first` on, of `total` turns that are spread evenly over `months`."""
    for number in range(first, first + count):
        at = _BEGAN + number * months * _MONTH / total
        drawn = random.Random(number)
        content, ids = drawn.randbytes(_CONTENT), drawn.randbytes(400)
        session = f"ses_{number // TURNS_PER_SESSION:012d}"
        yield (
            # An id that a turn could have got at this time, with its number in place of random characters.
            f"{least_turn_id(at)[:-8]}{number:08d}",
            "run_1",
            session,
            number % TURNS_PER_SESSION,
            *(0, ids, ids, ids, "[]", "{}", "stop", "exact", "complete", "session"),
            hash_of(number),
            b"tools",
            *(100, at, at, content, content, content),
        )


def hash_of(number: int) -> bytes:
    """Return the conversation hash of a turn by its number."""
    return random.Random(f"conversation {number}").randbytes(16)


def month_begins(month: int) -> str:
    """Return the least id of a turn of a month."""
    return least_turn_id(_BEGAN + month * _MONTH)


def make_tables(connection: Connection, months: int) -> None:
    """Make the partitioned table beside the real one, with partitions for `months` and one for all later turns."""
    execute(connection, f"CREATE TABLE {PARTITIONED} (LIKE {PLAIN} INCLUDING DEFAULTS) PARTITION BY RANGE (id)")
    bounds = ["MINVALUE", *(f"'{month_begins(month)}'" for month in range(1, months + 1)), "MAXVALUE"]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        limits = f"FOR VALUES FROM ({begin}) TO ({end})"
        execute(connection, f"CREATE TABLE {PARTITIONED}_{number} PARTITION OF {PARTITIONED} {limits}")
    execute(connection, f"ALTER TABLE {PARTITIONED} ADD PRIMARY KEY (id)")
    rows = connection.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'turns'").fetchall()
    for (definition,) in rows:
        text = str(definition)
        if "(id)" in text:
            continue
        # A unique index of a partitioned table must contain the id, so that of idempotency keys is not unique here.
        name = text.split(" ")[text.split(" ").index("INDEX") + 1]
        text = text.replace("UNIQUE ", "").replace(name, f"{name}_by_month", 1)
        execute(connection, text.replace("public.turns ", f"public.{PARTITIONED} "))


def execute(connection: Connection, statement: str) -> None:
    connection.execute(statement.encode())


def fill(connection: Connection, turns: int, months: int) -> None:
    for table in (PLAIN, PARTITIONED):
        with connection.cursor() as cursor, cursor.copy(f"COPY {table} ({_COLUMNS}) FROM STDIN".encode()) as copy:
            for row in rows_of(0, turns, months, turns):
                copy.write_row(row)
        execute(connection, f"ANALYZE {table}")


def question(name: str, table: str, number: int, id_: str) -> tuple[bytes, Row]:
    """Return the statement and the values of a query that calls make about the turn with this number and id."""
    session = f"ses_{number // TURNS_PER_SESSION:012d}"
    text, values = {
        "by id": (f"SELECT session_id, parent_id, messages FROM {table} WHERE id = %s", (id_,)),
        "by conversation": (
            f"SELECT id FROM {table} WHERE session_id = %s AND conversation_hash = ANY(%s) ORDER BY ordinal",
            (session, [hash_of(number), hash_of(number - 1)]),
        ),
        # The bound excludes partitions that are older than the session.
        "by conversation, since": (
            f"SELECT id FROM {table} WHERE session_id = %s AND conversation_hash = ANY(%s) AND id >= %s"
            " ORDER BY ordinal",
            (session, [hash_of(number), hash_of(number - 1)], f"{id_[:-8]}{'0' * 8}"),
        ),
        "of a session": (
            f"SELECT id, ordinal, prompt_ids, output_ids FROM {table} WHERE session_id = %s ORDER BY ordinal",
            (session,),
        ),
    }[name]
    return text.encode(), values


def statements(name: str, block: int, table: str, turns: int, months: int) -> list[tuple[bytes, Row]]:
    """Return the statements of a block, with their values: queries about turns of the newest month, or insertions."""
    if name == "insertion":
        rows = list(rows_of(turns + block * _PER_BLOCK, _PER_BLOCK, months, turns))
        marks = ", ".join(["%s"] * len(rows[0]))
        return [(f"INSERT INTO {table} ({_COLUMNS}) VALUES ({marks})".encode(), row) for row in rows]
    drawn = random.Random(f"{name} {block}")
    numbers = [drawn.randrange(turns - turns // months, turns) for _ in range(_PER_BLOCK)]
    return [question(name, table, number, next(rows_of(number, 1, months, turns))[0]) for number in numbers]


def ratio(connection: Connection, name: str, turns: int, months: int, blocks: int) -> float:
    """Return the time of a kind of statement on the partitioned table, compared with the plain one: the ratio of the
    medians of blocks."""
    seconds: dict[str, list[float]] = {PLAIN: [], PARTITIONED: []}
    for block in range(blocks):
        for table in (PLAIN, PARTITIONED)[:: 1 if block % 2 else -1]:
            prepared = statements(name, block, table, turns, months)
            began = time.perf_counter()
            with connection.transaction():
                for statement, values in prepared:
                    connection.execute(statement, values, prepare=True)
            seconds[table].append(time.perf_counter() - began)
    return statistics.median(seconds[PARTITIONED]) / statistics.median(seconds[PLAIN])


def erase_by_updates(connection: Connection) -> None:
    """Delete the content of the oldest month's turns as retention does, and make their space free for new rows."""
    old = connection.execute(f"SELECT id FROM {PLAIN} WHERE id < %s".encode(), (month_begins(1),))
    ids = [str(row[0]) for row in old]
    statement = (
        f"UPDATE {PLAIN} SET prompt_ids = '', output_ids = '', output_logprobs = '', spans = '[]', sampling = '{{}}',"
        " conversation_hash = '', tools_hash = '', messages = '', request = '', response = '' WHERE id = ANY(%s)"
    ).encode()
    for start in range(0, len(ids), _TURNS_AT_ONCE):
        connection.execute(statement, (ids[start : start + _TURNS_AT_ONCE],), prepare=True)
    execute(connection, f"VACUUM {PLAIN}")


def erase_by_dropping(connection: Connection) -> None:
    execute(connection, f"DROP TABLE {PARTITIONED}_0")


def cost_of(connection: Connection, action: Callable[[Connection], None]) -> tuple[float, int]:
    """Return the seconds that an action takes and the bytes of log that it writes."""
    before, began = _logged(connection), time.perf_counter()
    action(connection)
    return time.perf_counter() - began, _logged(connection) - before


def _logged(connection: Connection) -> int:
    found = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    assert found is not None
    return int(str(found[0]))


def measured(turns: int, months: int, blocks: int) -> dict[str, Any]:
    """Fill both tables and return the result."""
    server = PostgresServer({**DURABLE, "autovacuum": "off"})
    try:
        server.start()
        server.make_database("store")
        upgrade(server.url("store"))
        with server.connect("store") as connection:
            connection.execute("SET session_replication_role = replica")
            make_tables(connection, months)
            fill(connection, turns, months)
            times = {kind: ratio(connection, kind, turns, months, blocks) for kind in KINDS}
            updates = cost_of(connection, erase_by_updates)
            drop = cost_of(connection, erase_by_dropping)
    finally:
        server.remove()
    return {
        "machine": describe(),
        "turns": turns,
        "months": months,
        "time_partitioned_vs_plain": {name: round(value, 2) for name, value in times.items()},
        "erasing_a_month": {
            "turns": turns // months,
            "seconds_by_updates_vs_drop": round(updates[0] / drop[0]),
            "log_bytes_by_updates": updates[1],
            "log_bytes_by_drop": drop[1],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=240_000)
    parser.add_argument("--months", type=int, default=24)
    parser.add_argument("--short", action="store_true", help="does it run? Writes nothing")
    options = parser.parse_args()
    turns, blocks = (options.months * 50, 2) if options.short else (options.turns, _BLOCKS)
    result = measured(turns, options.months, blocks)
    print(json.dumps(result, indent=1))
    if not options.short:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
