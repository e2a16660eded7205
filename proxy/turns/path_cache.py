"""A cache of recent turns with their full token paths, so that continuing a conversation reads no history."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import FinishReason, TurnState
from proxy.turns.assembly import Lineage

# The default size, for example 500 paths of 8,000 tokens.
_TOKENS = 4_000_000
# The weight of a turn beside its path, in tokens: it bounds the number of short turns.
_TURN_TOKENS = 128


class StoredRequest(msgspec.Struct, frozen=True):
    """A request in the store. `digest` is over its JSON, `turn_id` names the turn whose row has it."""

    digest: bytes
    turn_id: str


class CachedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that may become a parent. `redacted`: the path was read from the store and has placeholders."""

    id: str
    session_id: str
    conversation_hash: bytes
    tools_hash: bytes
    finish_reason: FinishReason
    state: TurnState
    path: TokenIds
    lineage: Lineage
    redacted: bool = False
    request: StoredRequest | None = None


class PathCache:
    """Turns by id and by conversation. The least recently used are evicted once the paths, with 128 tokens added for
    each turn, exceed `tokens`."""

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
        """Remove all turns of these sessions."""
        # A walk over the whole cache: erasures are rare, and an index by session would cost every turn.
        for turn in [turn for _, turn in self._turns.items() if turn.session_id in session_ids]:
            self._turns.drop(turn.id)
            self._by_conversation.pop((turn.session_id, turn.conversation_hash), None)

    def get(self, turn_id: str) -> CachedTurn | None:
        return self._turns.get(turn_id)

    def of_conversation(self, session_id: str, conversation_hash: bytes) -> CachedTurn | None:
        """Return the session's newest cached turn that ended with this conversation."""
        turn_id = self._by_conversation.get((session_id, conversation_hash))
        return self.get(turn_id) if turn_id is not None else None

    def _forget(self, turn: CachedTurn) -> None:
        """Remove the turn from the index of conversations, unless a newer turn has its place there."""
        key = (turn.session_id, turn.conversation_hash)
        if self._by_conversation.get(key) == turn.id:
            del self._by_conversation[key]
