"""Smaller turns: packed JSON and token ids, repeated requests stored once, and fewer indexes.

The migration rewrites every turn: about a minute for a million of them, and twice their space meanwhile.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

from proxy.contract.arrays import pack_ids, widened_ids
from proxy.database.packed_json import pack_json, unpack_json

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_AT_ONCE = 500
_SETTLED = sa.text("settled_hash IS NOT NULL")
_KEYED = sa.text("idempotency_key IS NOT NULL")
_WHERE_SET = {
    "group_id_training_ended_at": ("group_id", ["group_id", "training", "ended_at"]),
    "claim_id": ("claim_id", ["claim_id"]),
    "run_id_external_id_created_at": ("external_id", ["run_id", "external_id", "created_at"]),
}
"""Indexes of sessions on a column that is null in most rows."""
_KEPT = (
    "id",
    "run_id",
    "session_id",
    "ordinal",
    "parent_id",
    "prefix_tokens",
    "prompt_ids",
    "output_ids",
    "output_logprobs",
    "spans",
    "sampling",
    "finish_reason",
    "continuation",
    "state",
    "attributed_by",
    "conversation_hash",
    "settled_hash",
    "tools_hash",
    "idempotency_key",
    "prompt_token_count",
    "started_at",
    "first_token_at",
    "finished_at",
    "masked",
)
_JSON = ("messages", "request", "response")
_IDS = ("prompt_ids", "output_ids")

_Convert = Callable[[Any], Any]


def upgrade() -> None:
    op.drop_index(op.f("ix_sessions_state_last_active_at"), "sessions")
    for index in ("run_id_conversation_hash", "run_id_settled_hash", "session_id_conversation_hash"):
        op.drop_index(op.f(f"ix_turns_{index}"), "turns")
    _index_sessions(where_set=True)
    packed = [sa.Column(name, sa.LargeBinary(), nullable=name == "request") for name in _JSON]
    if op.get_bind().dialect.name == "sqlite":
        op.drop_index(op.f("ix_turns_session_id_ordinal"), "turns")
        _rebuild(packed, _pack, _pack_ids, keyed_constraint=False, request_of=True)
        op.create_index(op.f("ix_turns_session_id_ordinal"), "turns", ["session_id", "ordinal"])
    else:
        op.drop_constraint(op.f("uq_turns_session_id_idempotency_key"), "turns")
        op.add_column("turns", sa.Column("request_of", sa.String(length=40), nullable=True))
        op.create_foreign_key(op.f("fk_turns_request_of_turns"), "turns", "turns", ["request_of"], ["id"])
        _replace(packed, _pack, _pack_ids)
        for name in (*_JSON, *_IDS):  # packed already: not worth trying again
            op.execute(f"ALTER TABLE turns ALTER COLUMN {name} SET STORAGE EXTERNAL")
        op.execute("ALTER TABLE sessions SET (fillfactor = 80)")  # every turn updates one, mostly in its page
    op.create_index(
        "uq_turns_session_id_idempotency_key",
        "turns",
        ["session_id", "idempotency_key"],
        unique=True,
        sqlite_where=_KEYED,
        postgresql_where=_KEYED,
    )
    op.create_index(op.f("ix_turns_conversation_hash_session_id"), "turns", ["conversation_hash", "session_id"])
    op.create_index(
        op.f("ix_turns_settled_hash"), "turns", ["settled_hash"], sqlite_where=_SETTLED, postgresql_where=_SETTLED
    )


def downgrade() -> None:
    op.execute(
        "UPDATE turns SET request = (SELECT holder.request FROM turns AS holder WHERE holder.id = turns.request_of) "
        "WHERE request_of IS NOT NULL"
    )
    op.create_index(op.f("ix_sessions_state_last_active_at"), "sessions", ["state", "last_active_at"])
    _index_sessions(where_set=False)
    for index in ("conversation_hash_session_id", "settled_hash"):
        op.drop_index(op.f(f"ix_turns_{index}"), "turns")
    op.drop_index("uq_turns_session_id_idempotency_key", "turns")
    plain = [sa.Column(name, sa.JSON(), nullable=False) for name in _JSON]
    if op.get_bind().dialect.name == "sqlite":
        op.drop_index(op.f("ix_turns_session_id_ordinal"), "turns")
        _rebuild(plain, _unpack, widened_ids, keyed_constraint=True, request_of=False)
        op.create_index(op.f("ix_turns_session_id_ordinal"), "turns", ["session_id", "ordinal"])
    else:
        op.drop_constraint(op.f("fk_turns_request_of_turns"), "turns")
        op.drop_column("turns", "request_of")
        _replace(plain, _unpack, widened_ids)
        for name in _IDS:
            op.execute(f"ALTER TABLE turns ALTER COLUMN {name} SET STORAGE EXTENDED")
        op.execute("ALTER TABLE sessions RESET (fillfactor)")
        op.create_unique_constraint(
            op.f("uq_turns_session_id_idempotency_key"), "turns", ["session_id", "idempotency_key"]
        )
    op.create_index(op.f("ix_turns_run_id_conversation_hash"), "turns", ["run_id", "conversation_hash"])
    op.create_index(
        op.f("ix_turns_run_id_settled_hash"),
        "turns",
        ["run_id", "settled_hash"],
        sqlite_where=_SETTLED,
        postgresql_where=_SETTLED,
    )
    op.create_index(op.f("ix_turns_session_id_conversation_hash"), "turns", ["session_id", "conversation_hash"])


def _index_sessions(*, where_set: bool) -> None:
    """Recreate the indexes of `_WHERE_SET`, with all sessions or only those that have a value."""
    for index, (column, columns) in _WHERE_SET.items():
        name = op.f(f"ix_sessions_{index}")
        op.drop_index(name, "sessions")
        where = sa.text(f"{column} IS NOT NULL") if where_set else None
        op.create_index(name, "sessions", columns, sqlite_where=where, postgresql_where=where)


def _pack(value: Any) -> bytes | None:
    """Pack a JSON value as the driver returns it: as text by SQLite's, decoded by PostgreSQL's."""
    return pack_json(json.loads(value) if isinstance(value, str) else value)


def _unpack(value: bytes | None) -> str:
    return json.dumps(None if value is None else unpack_json(bytes(value)))


def _pack_ids(plain: bytes) -> bytes:
    return pack_ids(struct.unpack(f"<{len(plain) // 4}i", plain))


def _rebuild(
    columns: list[sa.Column[Any]],
    convert: _Convert,
    convert_ids: _Convert,
    *,
    keyed_constraint: bool,
    request_of: bool,
) -> None:
    """Create a new table in SQLite, as the present code would. Other tables' references to it stay unchanged."""
    bind = op.get_bind()
    driver = bind.connection.driver_connection
    assert driver is not None
    driver.create_function("base_rl_convert", 1, convert, deterministic=True)
    driver.create_function("base_rl_convert_ids", 1, convert_ids, deterministic=True)
    bind.exec_driver_sql("PRAGMA legacy_alter_table = ON")
    op.rename_table("turns", "turns_before")
    bind.exec_driver_sql("PRAGMA legacy_alter_table = OFF")
    keyed = sa.UniqueConstraint("session_id", "idempotency_key", name=op.f("uq_turns_session_id_idempotency_key"))
    holder = [
        sa.Column("request_of", sa.String(length=40), nullable=True),
        sa.ForeignKeyConstraint(["request_of"], ["turns.id"], name=op.f("fk_turns_request_of_turns")),
    ]
    op.create_table(
        "turns",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("run_id", sa.String(length=40), nullable=False),
        sa.Column("session_id", sa.String(length=40), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.String(length=40), nullable=True),
        sa.Column("prefix_tokens", sa.Integer(), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("output_ids", sa.LargeBinary(), nullable=False),
        sa.Column("output_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("spans", sa.JSON(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=False),
        sa.Column("continuation", sa.String(length=12), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("attributed_by", sa.String(length=32), nullable=False),
        sa.Column("conversation_hash", sa.LargeBinary(length=16), nullable=False),
        sa.Column("settled_hash", sa.LargeBinary(length=16), nullable=True),
        sa.Column("tools_hash", sa.LargeBinary(length=16), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("prompt_token_count", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("first_token_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=False),
        sa.Column("masked", sa.JSON(), nullable=True),
        *(holder[:1] if request_of else ()),
        *columns,
        sa.ForeignKeyConstraint(["parent_id"], ["turns.id"], name=op.f("fk_turns_parent_id_turns")),
        *(holder[1:] if request_of else ()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_turns_run_id_runs")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_turns_session_id_sessions")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_turns")),
        *((keyed,) if keyed_constraint else ()),
    )
    names = ", ".join((*_KEPT, *_JSON))
    kept = (f"base_rl_convert_ids({name})" if name in _IDS else name for name in _KEPT)
    converted = ", ".join((*kept, *(f"base_rl_convert({name})" for name in _JSON)))
    op.execute(f"INSERT INTO turns ({names}) SELECT {converted} FROM turns_before ORDER BY rowid")  # noqa: S608
    op.drop_table("turns_before")


def _replace(columns: list[sa.Column[Any]], convert: _Convert, convert_ids: _Convert) -> None:
    """Add new columns in PostgreSQL, fill them in order of the ids, then replace the old ones."""
    bind = op.get_bind()
    for column in columns:
        op.add_column("turns", sa.Column(f"new_{column.name}", column.type, nullable=True))
    columns_read = ", ".join(("id", *_IDS, *_JSON))
    page = sa.text(f"SELECT {columns_read} FROM turns WHERE id > :after ORDER BY id LIMIT {_AT_ONCE}")  # noqa: S608
    assigned = ", ".join(
        (*(f"{name} = :{name}" for name in _IDS), *(f"new_{column.name} = :{column.name}" for column in columns))
    )
    write = sa.text(f"UPDATE turns SET {assigned} WHERE id = :of").bindparams(  # noqa: S608
        *(sa.bindparam(str(column.name), type_=column.type) for column in columns)
    )
    after = ""
    while rows := bind.execute(page, {"after": after}).all():
        values = [
            {
                "of": row.id,
                **{name: convert_ids(bytes(getattr(row, name))) for name in _IDS},
                **{name: convert(getattr(row, name)) for name in _JSON},
            }
            for row in rows
        ]
        bind.execute(write, [_as_values(each) for each in values])
        after = rows[-1].id
    for column in columns:
        name = str(column.name)
        op.drop_column("turns", name)
        op.alter_column("turns", f"new_{name}", new_column_name=name, nullable=bool(column.nullable))


def _as_values(values: dict[str, Any]) -> dict[str, Any]:
    """Decode JSON text, as a JSON column encodes its values itself."""
    return {
        name: json.loads(value) if name != "of" and isinstance(value, str) else value
        for name, value in values.items()
    }
