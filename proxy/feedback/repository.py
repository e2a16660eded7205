"""Rows of rewards, texts and preferences, and of the runs, sessions and turns that feedback names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from sqlalchemy import Connection, Table, bindparam, or_, select, update
from sqlalchemy.exc import IntegrityError

from proxy.database.prepared import NewRows, Prepared, among
from proxy.database.rows import AnyRow
from proxy.database.tables import FeedbackTextRow, PreferenceRow, RewardRow, RunRow, SessionRow, TurnRow
from proxy.errors import InvalidRequest
from proxy.lifecycle.session_names import session_called


class FoundSession(NamedTuple):
    """The columns of a session that feedback needs."""

    id: str
    run_id: str
    training: str
    erased_at: float | None
    erased_reason: str | None


class FoundRun(NamedTuple):
    """A run and its project."""

    id: str
    project_id: str


class FeedbackRepository:
    """Queries that run within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, name_or_id: str) -> FoundRun | None:
        statement = select(RunRow.id, RunRow.project_id)
        statement = statement.where(or_(RunRow.name == name_or_id, RunRow.id == name_or_id))
        # A run's name may equal another run's id; the name wins, as it does in model calls.
        row = self._connection.execute(statement.order_by(RunRow.name != name_or_id).limit(1)).first()
        return None if row is None else FoundRun(*row)

    def run_by_id(self, run_id: str) -> FoundRun | None:
        row = self._connection.execute(select(RunRow.id, RunRow.project_id).where(RunRow.id == run_id)).first()
        return None if row is None else FoundRun(*row)

    def sessions(self, ids: Sequence[str]) -> list[FoundSession]:
        """Return the sessions that exist, by id, with their rows locked as in `session`."""
        # Ordered by id: two transactions that lock the same rows in different orders would deadlock.
        return [FoundSession(*row) for row in _BY_IDS.run(self._connection, {"ids": ids})]

    def session(self, name: str, *, run_id: str | None) -> FoundSession | None:
        """Return the session with this id or, within a run, the newest with this name; its row is locked."""
        # The lock orders an entry before or after a claim or commit of its session, for every process.
        row = session_called(self._connection, name, run_id, _BY_ID)
        return FoundSession(*row) if row is not None else None

    def session_of_turn(self, turn_id: str, *, run_id: str | None) -> str | None:
        statement = select(TurnRow.session_id).where(TurnRow.id == turn_id)
        if run_id is not None:
            statement = statement.where(TurnRow.run_id == run_id)
        return (self._connection.execute(statement)).scalar_one_or_none()

    def under_key(self, *, run_id: str, first: str, last: str) -> list[AnyRow]:
        """Return the entries whose idempotency keys are in [first, last), in order of arrival."""
        statement = (
            select(RewardRow.id, RewardRow.session_id, RewardRow.turn_id, RewardRow.after_training)
            .where(RewardRow.run_id == run_id, RewardRow.idempotency_key >= first, RewardRow.idempotency_key < last)
            .order_by(RewardRow.sequence)
        )
        return list((self._connection.execute(statement)).all())

    def insert(self, rows: Sequence[dict[str, Any]]) -> None:
        """Insert entries in order; a later one supersedes an earlier one about the same subject.

        Raise InvalidRequest if another process has just used the idempotency key.
        """
        with _taken_keys_refused():
            _NEW_ENTRIES.add(self._connection, rows)

    def text_under_key(self, *, run_id: str, idempotency_key: str) -> AnyRow | None:
        """Return `id`, `session_id`, `turn_id` and `after_training` of the text with this idempotency key."""
        columns = (FeedbackTextRow.id, FeedbackTextRow.session_id, FeedbackTextRow.turn_id)
        statement = select(*columns, FeedbackTextRow.after_training).where(
            FeedbackTextRow.run_id == run_id, FeedbackTextRow.idempotency_key == idempotency_key
        )
        return self._connection.execute(statement).one_or_none()

    def insert_texts(self, rows: Sequence[dict[str, Any]]) -> None:
        """Insert texts in order. Raise InvalidRequest like `insert`."""
        with _taken_keys_refused():
            _NEW_TEXTS.add(self._connection, rows)

    def preference(self, *, run_id: str, idempotency_key: str) -> AnyRow | None:
        statement = select(PreferenceRow.__table__).where(
            PreferenceRow.run_id == run_id, PreferenceRow.idempotency_key == idempotency_key
        )
        return self._connection.execute(statement).one_or_none()

    def insert_preference(self, row: dict[str, Any]) -> None:
        """Insert a preference. Raise InvalidRequest like `insert`."""
        with _taken_keys_refused():
            _NEW_PREFERENCES.add(self._connection, [row])


@contextmanager
def _taken_keys_refused() -> Iterator[None]:
    """Turn a violated constraint into InvalidRequest."""
    # Only the idempotency key can be at fault: this transaction has checked everything else.
    try:
        yield
    except IntegrityError as error:
        raise InvalidRequest(
            "this idempotency_key was used by another request at this very time; send it again",
            param="idempotency_key",
        ) from error


# The column that the database fills.
_NUMBERED = "sequence"

_NEW_ENTRIES = NewRows(cast("Table", RewardRow.__table__), filled=[_NUMBERED])

_NEW_TEXTS = NewRows(cast("Table", FeedbackTextRow.__table__), filled=[_NUMBERED])

_NEW_PREFERENCES = NewRows(cast("Table", PreferenceRow.__table__), filled=[_NUMBERED])

_SESSION = select(*(getattr(SessionRow, name) for name in FoundSession._fields)).with_for_update(key_share=True)

_BY_IDS = Prepared(_SESSION.where(among(SessionRow.id, "ids")).order_by(SessionRow.id))

_BY_ID = Prepared(_SESSION.where(SessionRow.id == bindparam("of")))


class RulesRepository:
    """Queries for applying changed reward rules, within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def runs(self) -> list[AnyRow]:
        """Return every run's `id`, `config` and the `reward_rules` last applied to all of its sessions."""
        return list(self._connection.execute(select(RunRow.id, RunRow.config, RunRow.reward_rules)).all())

    def config(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._connection.execute(
            select(RunRow.config).where(RunRow.id == run_id).with_for_update(key_share=True)
        ).scalar_one()
        return found

    def entries(self, table: type[RewardRow | FeedbackTextRow], after: int, limit: int) -> list[AnyRow]:
        """Return `sequence`, `run_id` and `session_id` of the next rewards or texts of all runs."""
        statement = select(table.sequence, table.run_id, table.session_id)
        return list(
            self._connection.execute(
                statement.where(table.sequence > after).order_by(table.sequence).limit(limit)
            ).all()
        )

    def set_applied(self, run_id: str, rules: dict[str, Any]) -> None:
        self._connection.execute(update(RunRow).where(RunRow.id == run_id).values(reward_rules=rules))
