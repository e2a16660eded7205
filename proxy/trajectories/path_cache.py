"""The full token paths of recent turns, so that continuing a conversation does not walk its history."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import msgspec

from proxy.contract.token_ids import TokenIds
from proxy.trajectories.assembly import Lineage

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
        self._tokens_left = tokens
        self._turns: OrderedDict[str, CachedTurn] = OrderedDict()
        self._by_conversation: dict[tuple[str, bytes], str] = {}

    def put(self, turn: CachedTurn) -> None:
        if turn.id in self._turns:
            return
        self._turns[turn.id] = turn
        self._by_conversation[turn.session_id, turn.conversation_hash] = turn.id
        self._tokens_left -= len(turn.path) + _TURN_TOKENS
        while self._tokens_left < 0 and self._turns:
            _, oldest = self._turns.popitem(last=False)
            self._tokens_left += len(oldest.path) + _TURN_TOKENS
            key = (oldest.session_id, oldest.conversation_hash)
            if self._by_conversation.get(key) == oldest.id:
                del self._by_conversation[key]

    def forget(self, session_ids: Collection[str]) -> None:
        """Of these sessions, nothing stays. Walks all that is kept."""
        for turn in [turn for turn in self._turns.values() if turn.session_id in session_ids]:
            del self._turns[turn.id]
            self._tokens_left += len(turn.path) + _TURN_TOKENS
            self._by_conversation.pop((turn.session_id, turn.conversation_hash), None)

    def get(self, turn_id: str) -> CachedTurn | None:
        turn = self._turns.get(turn_id)
        if turn is not None:
            self._turns.move_to_end(turn_id)
        return turn

    def of_conversation(self, session_id: str, conversation_hash: bytes) -> CachedTurn | None:
        """The newest kept turn of a session that ended with this conversation."""
        turn_id = self._by_conversation.get((session_id, conversation_hash))
        return self.get(turn_id) if turn_id is not None else None
