"""The store of turns: records each once and durably, and finds the parents of later ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Self

import msgspec
from sqlalchemy import Connection

from proxy.bounded_cache import BoundedCache
from proxy.clock import Clock
from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.identifiers import RunId, SessionId, TurnId
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import FinishReason, Turn, TurnState
from proxy.database.group_commit import Together
from proxy.database.packed_json import json_bytes
from proxy.database.unit_of_work import Database
from proxy.lifecycle.judging import Comparison, add_to_comparison, hasten_comparison
from proxy.lifecycle.signals import Signals
from proxy.turns.assembly import Lineage, PathPiece, extend_path, is_redacted, lineage_of, path_of
from proxy.turns.path_cache import CachedTurn, PathCache, StoredRequest
from proxy.turns.recording_repository import RecordingRepository, RecordingResult
from proxy.turns.repository import TurnRepository

# Pairs of session and user whose row is known to exist, so that not every turn writes it again.
_KNOWN_USERS = 16_384


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A turn with everything that is stored about it.

    - `conversation_hash`: over the conversation including the answer.
    - `settled_hash`: the same without a message that the next request may not repeat (`tables.TurnRow`).
    - `tools_hash`: over the tools and template arguments, which the template renders too.
    - `attributed_by`: what identified the call's session.
    - `messages`: those that the call added to its parent's conversation, without the answer.
    - `request`: the body without its messages. `response`: the answer as it was sent.
    - `prompt_token_count`: the length of the full prompt, including the tokens shared with the parent.
    - `prompt_ids`: the full prompt, if the caller has it.
    - `users`: pseudonyms of the users on whose behalf the call was made.
    - `path_ids`: the unredacted path of a redacted turn.
    - `shadow_of`: the turn whose prompt a shadow answer has.
    """

    turn: Turn
    run_id: RunId
    attributed_by: str
    conversation_hash: bytes
    tools_hash: bytes
    idempotency_key: str | None
    prompt_token_count: int
    messages: list[dict[str, Any]]
    request: dict[str, Any]
    response: dict[str, Any]
    settled_hash: bytes | None = None
    prompt_ids: TokenIds | None = None
    users: tuple[bytes, ...] = ()
    path_ids: TokenIds | None = None
    shadow_of: TurnId | None = None


class ParentTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded turn that a call may continue. `path_ids` is its full prompt followed by its output."""

    id: TurnId
    lineage: Lineage
    path_ids: TokenIds
    finish_reason: FinishReason
    state: TurnState
    tools_hash: bytes
    conversation_hash: bytes


class TrajectoryStore:
    """Records turns and finds the parents of calls. Failed turns are recorded and never become parents."""

    def __init__(self, *, database: Database, clock: Clock, signals: Signals, paths: PathCache | None = None) -> None:
        self._database = database
        self._clock = clock
        self._signals = signals
        self._paths = paths or PathCache()
        self._users: BoundedCache[tuple[SessionId, bytes], bool] = BoundedCache(_KNOWN_USERS)
        signals.erasures.listen(self._paths.forget)

    async def record(self, *records: TurnRecord, comparison: Comparison | None = None) -> bool:
        """Commit turns of one session, all or none, and return whether the session is known to be open. With a
        `comparison`, also commit that judges will compare them.

        A turn that was recorded before changes nothing. Turns of a session that has ended meanwhile are recorded too,
        and so are turns whose caller is cancelled. Raise NotFound for an unknown session, Gone for an erased one,
        Conflict if the idempotency key belongs to another turn of the session, and StoreUnavailable.
        """
        requests = self._requests(records)
        paths = [self._path(record, request) for record, request in zip(records, requests, strict=True)]
        turns = [_columns(record, request) for record, request in zip(records, requests, strict=True)]
        users = self._new_users(records[0]) if records and records[0].users else ()
        recording = _Recording(turns, users, self._clock(), comparison)
        recorded = await self._database.commit(recording, order_key=records[0].turn.session_id if records else None)
        # Caches are filled after the commit: they must not know what the store may still refuse.
        for digest in users:
            self._users.put((records[0].turn.session_id, digest), True)
        for path in paths:
            if path is not None:
                self._paths.put(path)
        if any(turn.settled for turn in recorded):
            self._signals.trajectories.notify()
        return any(turn.session_open for turn in recorded)

    async def compare(self, comparison: Comparison, session_id: SessionId) -> None:
        """Let the judges compare the answers that were recorded with this comparison, without a further wait."""
        now = self._clock()
        await self._database.commit(lambda connection: hasten_comparison(connection, comparison, session_id, now=now))
        self._signals.jobs.notify()

    async def find_parent(
        self,
        session_id: SessionId,
        conversation_hashes: Sequence[bytes],
        *,
        tools_hash: bytes | None = None,
        named: Sequence[str] = (),
    ) -> ParentTurn | None:
        """Return the turn of the session that a call continues: one that ended with one of these conversations.

        The hashes are those of the call's prefixes that end in an answer, longest first. A turn with this
        `tools_hash` is preferred to one with a longer conversation, because tokens rendered with other tools cannot
        be reused. Of turns with equal conversations, return one of `named`, else the newest. A parent in the cache
        costs no query.
        """
        if not conversation_hashes:
            return None
        recent = self._recent_parent(session_id, conversation_hashes[0], tools_hash, named)
        if recent is not None:
            # A redacted path has placeholders where the call has the real tokens, so it cannot be continued.
            return None if recent.redacted else _parent(recent)
        # The list is made on the database's thread: each element hashes the conversation up to there.
        turn_id = await self._database.read(
            lambda connection: TurnRepository(connection).by_conversation(
                session_id, list(conversation_hashes), tools_hash=tools_hash, named=named
            )
        )
        return await self._whole(turn_id) if turn_id is not None else None

    async def recent_turns(self, session_id: SessionId, limit: int) -> list[ParentTurn]:
        """Return the last turns of a session, newest first.

        The path of a redacted turn that is not in the cache has placeholders; only its tokens before the first one
        can be reused.
        """
        turn_ids = await self._database.read(lambda connection: TurnRepository(connection).latest(session_id, limit))
        return [_parent(turn) for turn in await self._load(turn_ids)]

    async def answered(self, session_id: SessionId, idempotency_key: str) -> dict[str, Any] | None:
        """Return the recorded answer to the call with this idempotency key, if there is one."""
        return await self._database.read(
            lambda connection: TurnRepository(connection).response(session_id, idempotency_key)
        )

    async def responses(self, turn_ids: Sequence[TurnId]) -> list[dict[str, Any]]:
        """Return the recorded answers of these turns, in this order. Unknown turns are omitted."""
        return await self._database.read(lambda connection: TurnRepository(connection).responses(turn_ids))

    async def endings(self, run_id: RunId, tools_hash: bytes, limit: int) -> list[bytes]:
        """Return the conversation hashes of turns with this tools hash in the run's open sessions, those of the most
        recently active sessions first."""
        return await self._database.read(
            lambda connection: TurnRepository(connection).endings(run_id, tools_hash, limit)
        )

    def _recent_parent(
        self, session_id: SessionId, longest: bytes, tools_hash: bytes | None, named: Sequence[str]
    ) -> CachedTurn | None:
        """Return the cached turn that ended with the longest conversation, if it has the call's tools."""
        recent: CachedTurn | None = None
        for turn_id in named:
            turn = self._paths.get(turn_id)
            if turn is not None and (turn.session_id, turn.conversation_hash) == (session_id, longest):
                recent = turn
                break
        recent = recent or self._paths.of_conversation(session_id, longest)
        return recent if recent is not None and tools_hash in (None, recent.tools_hash) else None

    async def _whole(self, turn_id: str) -> ParentTurn | None:
        found = await self._load([turn_id])
        return _parent(found[0]) if found and not found[0].redacted else None

    async def _load(self, turn_ids: Sequence[str]) -> list[CachedTurn]:
        """Return the turns that are recorded, in this order."""
        missing = [turn_id for turn_id in turn_ids if self._paths.get(turn_id) is None]
        loaded = {turn.id: turn for turn in await self._database.read(partial(_read, missing))} if missing else {}
        turns = [loaded.get(turn_id) or self._paths.get(turn_id) for turn_id in turn_ids]
        for turn in loaded.values():
            self._paths.put(turn)
        return [turn for turn in turns if turn is not None]

    def _new_users(self, record: TurnRecord) -> tuple[bytes, ...]:
        """Return the users that may not be recorded with this session yet."""
        session_id = record.turn.session_id
        return tuple(digest for digest in record.users if (session_id, digest) not in self._users)

    def _requests(self, records: Sequence[TurnRecord]) -> list[StoredRequest]:
        """Return the stored request for each of these choices of one call."""
        stored: list[StoredRequest] = []
        for record in records:
            # Choices of one call share a request: it would otherwise be written up to 128 times.
            is_shared = stored and record.request is records[0].request
            stored.append(stored[0] if is_shared else self._request(record))
        return stored

    def _request(self, record: TurnRecord) -> StoredRequest:
        """Return the stored request of the parent (for a shadow answer: of the call's own answer) if it is the same,
        else one stored with the turn itself."""
        digest = blake2b(json_bytes(record.request), digest_size=16).digest()
        other = record.turn.parent_id if record.shadow_of is None else record.shadow_of
        parent = self._paths.get(other) if other is not None else None
        if parent is not None and parent.request is not None and parent.request.digest == digest:
            return parent.request
        return StoredRequest(digest, record.turn.id)

    def _path(self, record: TurnRecord, request: StoredRequest) -> CachedTurn | None:
        """Return the turn with its path for the cache; None if no conversation goes on from it, or if its
        parent is not in the cache.

        Raise BrokenTree if the turn shares more tokens than its parent has.
        """
        turn = record.turn
        if turn.state in (TurnState.FAILED, TurnState.SHADOW):
            return None
        parent: CachedTurn | None = None
        if turn.parent_id is not None:
            parent = self._paths.get(turn.parent_id)
            if parent is None:
                return None
        return CachedTurn(
            id=turn.id,
            session_id=turn.session_id,
            conversation_hash=record.conversation_hash,
            tools_hash=record.tools_hash,
            finish_reason=turn.finish_reason,
            state=turn.state,
            path=_whole_path(record, parent),
            lineage=Lineage(turn.id, turn.prefix_tokens, parent.lineage if parent is not None else None),
            request=request,
        )


class _Recording(Together[list[RecordingResult]]):
    """The write that records turns of one session, users that may be new to it, and the comparison of the turns."""

    def __init__(
        self,
        turns: Sequence[Mapping[str, Any]],
        users: Sequence[bytes],
        now: float,
        comparison: Comparison | None,
    ) -> None:
        self._turns = turns
        self._users = users
        self._now = now
        self._comparison = comparison

    def __call__(self, connection: Connection) -> list[RecordingResult]:
        repository = RecordingRepository(connection)
        recorded = [repository.record(columns, now=self._now) for columns in self._turns]
        self._add_users(repository)
        self._add_to_comparison(connection)
        return recorded

    @classmethod
    def together(cls, connection: Connection, writes: Sequence[Self]) -> list[list[RecordingResult]]:
        repository = RecordingRepository(connection)
        turns = [columns for write in writes for columns in write._turns]
        recorded = iter(repository.record_new(turns, now=max(write._now for write in writes)))
        for write in writes:
            write._add_users(repository)
            write._add_to_comparison(connection)
        return [[next(recorded) for _ in write._turns] for write in writes]

    def _add_users(self, repository: RecordingRepository) -> None:
        if self._users:
            repository.add_users(self._turns[0]["run_id"], self._turns[0]["session_id"], self._users)

    def _add_to_comparison(self, connection: Connection) -> None:
        if self._comparison is not None:
            for turn in self._turns:
                ids = turn["run_id"], turn["session_id"], turn["id"]
                add_to_comparison(connection, self._comparison, *ids, now=self._now)


def _whole_path(record: TurnRecord, parent: CachedTurn | None) -> TokenIds:
    """Return the path from the root to the end of the turn's output. Raise BrokenTree."""
    turn = record.turn
    if record.path_ids is not None:
        return record.path_ids
    if record.prompt_ids is not None:
        return record.prompt_ids + TokenIds.of(turn.output_ids)
    piece = PathPiece(
        id=turn.id,
        parent_id=turn.parent_id,
        prefix_tokens=turn.prefix_tokens,
        prompt_ids=TokenIds.of(turn.prompt_ids),
        output_ids=TokenIds.of(turn.output_ids),
    )
    return extend_path(parent.path if parent is not None else TokenIds(), piece)


def _read(turn_ids: Sequence[str], connection: Connection) -> list[CachedTurn]:
    repository = TurnRepository(connection)
    pieces = repository.pieces(turn_ids)
    return [
        CachedTurn(
            id=head.id,
            session_id=head.session_id,
            conversation_hash=head.conversation_hash,
            tools_hash=head.tools_hash,
            finish_reason=FinishReason(head.finish_reason),
            state=TurnState(head.state),
            path=path_of(head.id, pieces),
            lineage=lineage_of(head.id, pieces),
            redacted=is_redacted(head.id, pieces),
        )
        for head in repository.heads(turn_ids)
    ]


def _columns(record: TurnRecord, request: StoredRequest) -> dict[str, Any]:
    """Return the columns of the turn's row, without its ordinal."""
    turn = record.turn
    return {
        "id": turn.id,
        "run_id": record.run_id,
        "session_id": turn.session_id,
        "parent_id": turn.parent_id,
        "prefix_tokens": turn.prefix_tokens,
        "prompt_ids": pack_ids(turn.prompt_ids),
        "output_ids": pack_ids(turn.output_ids),
        "output_logprobs": pack_logprobs(turn.output_logprobs),
        "spans": [[span.version, span.start, span.end] for span in turn.spans],
        "sampling": msgspec.to_builtins(turn.sampling),
        "finish_reason": turn.finish_reason.value,
        "continuation": turn.continuation.value,
        "state": turn.state.value,
        "attributed_by": record.attributed_by,
        "conversation_hash": record.conversation_hash,
        "settled_hash": record.settled_hash,
        "tools_hash": record.tools_hash,
        "idempotency_key": record.idempotency_key,
        "prompt_token_count": record.prompt_token_count,
        "started_at": turn.started_at,
        "first_token_at": turn.first_token_at,
        "finished_at": turn.finished_at,
        "masked": [list(span) for span in turn.masked] or None,
        "messages": record.messages,
        "request_of": request.turn_id if request.turn_id != turn.id else None,
        "request": record.request if request.turn_id == turn.id else None,
        "response": record.response,
    }


def _parent(turn: CachedTurn) -> ParentTurn:
    return ParentTurn(
        id=TurnId(turn.id),
        path_ids=turn.path,
        lineage=turn.lineage,
        finish_reason=turn.finish_reason,
        state=turn.state,
        tools_hash=turn.tools_hash,
        conversation_hash=turn.conversation_hash,
    )
