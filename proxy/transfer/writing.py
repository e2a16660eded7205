"""Writes records as rows. The transaction that checks whether a session exists also writes all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, insert, select

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.identifiers import (
    RunId,
    new_group_id,
    new_reward_id,
    new_session_id,
    new_turn_id,
)
from proxy.contract.states import SessionState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.database.tables import GroupRow, RewardRow, SessionRow, SessionUserRow, TurnRow
from proxy.lifecycle.lifecycle import settle
from proxy.transfer.records import SessionRecord, TurnRecord, as_turn
from proxy.turns.assembly import trainable_turns
from proxy.turns.first_messages import first_message_of

IMPORTED = "import"


class TransferWriter:
    """Writes within one transaction into one run, whose newest version is `head_version`."""

    def __init__(self, connection: Connection, run_id: RunId, head_version: int) -> None:
        self._connection = connection
        self._run_id = run_id
        self._head_version = head_version

    def add(self, record: SessionRecord, users: Sequence[bytes], *, train: bool, keep_ids: bool, now: float) -> bool:
        """Insert a session with turns and rewards. Return False if the run already has it: an earlier import, or
        the run's own session.

        `users` are pseudonyms. Without `train`, or if the record is not whole, the session is never trained. With
        `keep_ids`, it keeps the ids of the record.
        """
        origin = record.origin or record.session_id
        if self._is_known(origin, record.session_id if keep_ids else None):
            return False
        session_id = record.session_id if keep_ids else new_session_id()
        turn_ids = {turn.id: turn.id if keep_ids else new_turn_id() for turn in record.turns}
        # Excluded for good, so that a later reward does not make the session ready.
        held_back = not (train and is_whole(record, self._head_version))
        self._connection.execute(insert(SessionRow).values(**self._session(record, session_id, origin, held_back)))
        renamed = {**turn_ids, record.session_id: session_id}
        ids = [turn_ids[turn.id] for turn in record.turns]
        for ordinal, turn in enumerate(record.turns):
            columns = self._turn(turn, session_id, ids, ordinal, renamed)
            self._connection.execute(insert(TurnRow).values(**columns))
        for reward in record.rewards:
            values = {
                "id": reward.id if keep_ids else new_reward_id(),
                "run_id": self._run_id,
                "session_id": session_id,
                "turn_id": ids[reward.turn] if reward.turn is not None else None,
                "name": reward.name,
                "value": reward.value,
                "source": reward.source,
                "comment": reward.comment,
                "after_training": reward.after_training,
                "created_at": reward.created_at,
            }
            self._connection.execute(insert(RewardRow).values(**values))
        if users:
            rows = [{"session_id": session_id, "digest": digest, "run_id": self._run_id} for digest in users]
            self._connection.execute(insert(SessionUserRow), rows)
        # Combines the rewards and sets the training state, as after any change of the ledger.
        settle(self._connection, [session_id], now=now)
        return True

    def _is_known(self, origin: str, kept_id: str | None) -> bool:
        same_origin = (SessionRow.run_id == self._run_id) & (SessionRow.origin == origin)
        is_it = (SessionRow.run_id == self._run_id) & (SessionRow.id == origin)
        known = same_origin | is_it if kept_id is None else same_origin | is_it | (SessionRow.id == kept_id)
        return self._connection.execute(select(SessionRow.id).where(known).limit(1)).first() is not None

    def _session(self, record: SessionRecord, session_id: str, origin: str, held_back: bool) -> dict[str, Any]:
        versions = [version for turn in record.turns for version, _start, _end in turn.versions]
        return {
            "id": session_id,
            "run_id": self._run_id,
            "external_id": record.external_id,
            "group_id": self._group(record),
            "task": record.task,
            "purpose": record.purpose.value,
            "metadata_": record.metadata,
            "attributed_by": IMPORTED,
            "state": SessionState.ENDED.value,
            "training": (TrainingState.EXCLUDED if held_back else TrainingState.PENDING).value,
            "outcome": record.outcome,
            "end_reason": record.end_reason,
            "turn_count": len(record.turns),
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
            "created_at": record.created_at,
            "last_active_at": record.last_active_at,
            "ended_at": record.ended_at if record.ended_at is not None else record.last_active_at,
            "origin": origin,
            "held_back": held_back,
            "first_message": first_message_of(turn.messages for turn in record.turns if turn.parent is None),
        }

    def _group(self, record: SessionRecord) -> str | None:
        if record.group is None:
            return None
        of_name = select(GroupRow.id).where(GroupRow.run_id == self._run_id, GroupRow.name == record.group)
        known: str | None = self._connection.execute(of_name).scalar_one_or_none()
        if known is not None:
            return known
        group_id = new_group_id()
        values = {"id": group_id, "run_id": self._run_id, "name": record.group, "size": record.group_size}
        self._connection.execute(insert(GroupRow).values(**values, created_at=record.created_at))
        return group_id

    def _turn(
        self, turn: TurnRecord, session_id: str, ids: list[str], ordinal: int, renamed: Mapping[str, str]
    ) -> dict[str, Any]:
        return {
            "id": ids[ordinal],
            "run_id": self._run_id,
            "session_id": session_id,
            "ordinal": ordinal,
            "parent_id": ids[turn.parent] if turn.parent is not None else None,
            "prefix_tokens": turn.prefix_tokens,
            "prompt_ids": pack_ids(turn.prompt_ids),
            "output_ids": pack_ids(turn.output_ids),
            "output_logprobs": pack_logprobs(turn.logprobs),
            "spans": [list(span) for span in turn.versions],
            "sampling": msgspec.to_builtins(turn.sampling),
            "finish_reason": turn.finish_reason.value,
            "continuation": turn.continuation.value,
            "state": turn.state.value,
            "attributed_by": turn.attributed_by,
            "conversation_hash": bytes.fromhex(turn.conversation_hash),
            "settled_hash": bytes.fromhex(turn.settled_hash) if turn.settled_hash is not None else None,
            "tools_hash": bytes.fromhex(turn.tools_hash),
            "prompt_token_count": turn.prompt_token_count,
            "started_at": turn.started_at,
            "first_token_at": turn.first_token_at,
            "finished_at": turn.finished_at,
            "masked": [list(span) for span in turn.masked] or None,
            "messages": turn.messages,
            "request": turn.request,
            "response": _with_ids(turn.response, renamed),
        }


def is_whole(record: SessionRecord, head_version: int) -> bool:
    """Return whether a trainer can learn from the record: an ended training session with trainable turns, sampled
    from versions that this run has."""
    if record.purpose is not Purpose.TRAIN or record.state != SessionState.ENDED.value:
        return False
    versions = [version for turn in record.turns for version, _start, _end in turn.versions]
    if any(not 0 <= version <= head_version for version in versions):
        return False
    parents = [None if turn.parent is None else record.turns[turn.parent].id for turn in record.turns]
    return bool(trainable_turns([as_turn(*pair) for pair in zip(record.turns, parents, strict=True)]))


def _with_ids(value: Any, renamed: Mapping[str, str]) -> Any:
    """Replace old ids by new ones anywhere in a stored response, which names its turn and session."""
    if isinstance(value, str):
        return renamed.get(value, value)
    if isinstance(value, list):
        return [_with_ids(one, renamed) for one in value]
    if isinstance(value, dict):
        return {key: _with_ids(one, renamed) for key, one in value.items()}
    return value
