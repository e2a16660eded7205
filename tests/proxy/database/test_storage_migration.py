"""The migration that packs turns, and its downgrade."""

from __future__ import annotations

import json
import struct
from typing import Any

from sqlalchemy import insert, select, text

from proxy.contract.arrays import unpack_ids
from proxy.database.migrate import downgrade, upgrade
from proxy.database.tables import TurnRow
from tests.proxy.database.test_migrate import plain_engine

OLD = {
    "id": "turn_1",
    "run_id": "run_1",
    "session_id": "ses_1",
    "ordinal": 0,
    "prefix_tokens": 0,
    "prompt_ids": struct.pack("<3i", 1, 151_935, 70_000),
    "output_ids": struct.pack("<2i", 4, 1 << 25),
    "output_logprobs": struct.pack("<2f", -0.5, -0.25),
    "spans": "[[0, 0, 2]]",
    "sampling": '{"max_new_tokens": 5}',
    "finish_reason": "stop",
    "continuation": "new",
    "state": "complete",
    "attributed_by": "header",
    "conversation_hash": b"c" * 16,
    "tools_hash": b"t" * 16,
    "idempotency_key": "once",
    "prompt_token_count": 3,
    "started_at": 1.0,
    "finished_at": 2.0,
    "messages": '[{"role": "user", "content": "h\\u00e9 \\ud83d\\ude00"}]',
    "request": '{"model": "policy", "tools": []}',
    "response": '{"choices": [{"text": "ok"}]}',
}
RUN = (
    "INSERT INTO runs (id, name, state, base_model, config, head_version, serving_version, created_at)"
    " VALUES ('run_1', 'policy', 'active', 'base', '{}', 0, 0, 0)"
)
SESSION = (
    "INSERT INTO sessions"
    " (id, run_id, purpose, attributed_by, state, training, turn_count, created_at, last_active_at)"
    " VALUES ('ses_1', 'run_1', 'train', 'header', 'open', 'pending', 1, 0, 0)"
)


def written(url: str, *statements: str, turn: dict[str, Any] | None = None) -> None:
    engine = plain_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
        if turn is not None:
            names = ", ".join(turn)
            values = ", ".join(f":{name}" for name in turn)
            connection.execute(text(f"INSERT INTO turns ({names}) VALUES ({values})"), turn)


def read(url: str, statement: Any) -> Any:
    with plain_engine(url).connect() as connection:
        return connection.execute(statement).one()


def upgraded(url: str) -> Any:
    """Return the old turn after migrating its database to this revision."""
    upgrade(url, "0004")
    written(url, RUN, SESSION, turn=OLD)
    upgrade(url)
    return read(url, select(TurnRow.__table__))


def test_old_turns_survive_the_migration(empty_database_url: str) -> None:
    row = upgraded(empty_database_url)
    assert unpack_ids(bytes(row.prompt_ids)) == (1, 151_935, 70_000)
    assert unpack_ids(bytes(row.output_ids)) == (4, 1 << 25)
    assert bytes(row.output_logprobs) == OLD["output_logprobs"]
    assert row.messages == json.loads(str(OLD["messages"]))
    assert row.request == json.loads(str(OLD["request"]))
    assert row.response == json.loads(str(OLD["response"]))
    assert (row.request_of, row.idempotency_key, row.ordinal) == (None, "once", 0)


def test_turns_with_shared_requests_survive_the_downgrade(empty_database_url: str) -> None:
    url = empty_database_url
    first = upgraded(url)
    second = {**first._mapping, "id": "turn_2", "ordinal": 1, "idempotency_key": None, "request": None}
    with plain_engine(url).begin() as connection:
        connection.execute(insert(TurnRow).values({**second, "parent_id": "turn_1", "request_of": "turn_1"}))
    downgrade(url, "0004")
    row = read(url, text("SELECT prompt_ids, output_ids, request, messages FROM turns WHERE id = 'turn_2'"))
    assert (bytes(row.prompt_ids), bytes(row.output_ids)) == (OLD["prompt_ids"], OLD["output_ids"])
    for name in ("request", "messages"):
        value = getattr(row, name)
        assert (json.loads(value) if isinstance(value, str) else value) == json.loads(str(OLD[name]))
