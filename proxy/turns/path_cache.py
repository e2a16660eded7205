"""The full token paths of recent turns, so that continuing a conversation does not walk its history."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.contract.token_ids import TokenIds
from proxy.turns.assembly import Lineage

_TOKENS = 4_000_000
_TURN_TOKENS = 128
"""What a turn costs beside its path, in the memory of tokens: short ones are many."""


class KeptRequest(msgspec.Struct, frozen=True):
    """A request as the store has it: `digest` is over its JSON, `turn_id` the turn it is kept with."""

    digest: bytes
    turn_id: str


class CachedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that may become a parent. `redacted`: the path was read from the store, and placeholders are in it."""

    id: str
    session_id: str
    conversation_hash: bytes
    tools_hash: bytes
    finish_reason: str
    state: str
    path: TokenIds
    lineage: Lineage
    redacted: bool = False
    request: KeptRequest | None = None


class PathCache:
    """Least recently used turns leave first. `tokens` bounds the sum of the kept paths' lengths, of which every turn
    adds 128 for itself."""

    def __init__(self, tokens: int = _TOKENS) -> None:
        self._turns: BoundedCache[str, CachedTurn] = BoundedCache(
            tokens, weigh=lambda turn: len(turn.path) + _TURN_TOKENS, evicted=lambda _, turn: self._forget(turn)
        )
        self._by_conversation: dict[tuple[str, bytes], str] = {}

    def put(self, turn: CachedTurn) -> None:
        if turn.id in self._turns:
            return
        self._by_conversation[turn.session_id, turn.conversation_hash] = turn.id
        self._turns.put(turn.id, turn)

    def forget(self, session_ids: Collection[str]) -> None:
        """Of these sessions, nothing stays. Walks all that is kept."""
        for turn in [turn for _, turn in self._turns.items() if turn.session_id in session_ids]:
            self._turns.drop(turn.id)
            self._by_conversation.pop((turn.session_id, turn.conversation_hash), None)

    def get(self, turn_id: str) -> CachedTurn | None:
        return self._turns.get(turn_id)

    def of_conversation(self, session_id: str, conversation_hash: bytes) -> CachedTurn | None:
        """The newest kept turn of a session that ended with this conversation."""
        turn_id = self._by_conversation.get((session_id, conversation_hash))
        return self.get(turn_id) if turn_id is not None else None

    def _forget(self, turn: CachedTurn) -> None:
        """Forget which conversation the turn ended with, unless a newer turn ended with the same."""
        key = (turn.session_id, turn.conversation_hash)
        if self._by_conversation.get(key) == turn.id:
            del self._by_conversation[key]
