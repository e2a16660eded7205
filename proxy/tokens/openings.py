"""Token ids of the openings that many conversations share.

The sessions of a run mostly begin with the same system message and tools: thousands of tokens, which take some
milliseconds. So the text up to the end of the first message is tokenised once, and only the rest for each session. An
opening is cached from its second use on, if both parts then have the ids of the whole: special tokens divide a text
before it is tokenised, but a tokenizer may treat the text behind one differently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from hashlib import blake2b

from proxy.bounded_cache import BoundedCache
from proxy.contract.token_ids import TokenIds

# Characters of the shortest opening that is cached: tokenising fewer takes no longer than finding them here.
_SHORTEST = 128
# Bounds memory: a token takes about ten bytes here, with its JSON.
_MOST_TOKENS = 1 << 19
# Openings that were seen, by digest: most are never seen again.
_MOST_SEEN = 4096


class Openings:
    """Encodes rendered conversations. Threads may share an instance.

    `encode` returns the ids of a text, `encode_after` those of a text behind a special token. `end` is the id and the
    text of the special token that closes a message; None where the template has none, so that nothing is cached.
    """

    def __init__(
        self,
        encode: Callable[[str], tuple[int, ...]],
        encode_after: Callable[[int, str], tuple[int, ...]],
        end: tuple[int, str] | None,
    ) -> None:
        self._encode = encode
        self._encode_after = encode_after
        self._end = end
        self._lock = threading.Lock()  # an entry that is found may be evicted before it is counted as used
        self._seen: BoundedCache[bytes, bool] = BoundedCache(_MOST_SEEN)
        self._ids: BoundedCache[bytes, TokenIds] = BoundedCache(_MOST_TOKENS, weigh=lambda ids: len(ids) + 1)

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a rendered conversation."""
        at = -1 if self._end is None else text.find(self._end[1])
        if self._end is None or at < _SHORTEST:
            return TokenIds.of(self._encode(text))
        end_id, end_text = self._end
        size = at + len(end_text)
        opening = text[:size]
        # By digest: a prompt may hold a megabyte, and most openings are seen once.
        key = blake2b(opening.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            known, was_seen = self._ids.get(key), self._seen.get(key)
            self._seen.put(key, True)
        if known:
            return known + self._encode_after(end_id, text[size:])
        whole = TokenIds.of(self._encode(text))
        if known is None and was_seen:
            self._learn(key, opening, text[size:], whole, end_id)
        return whole

    def forget(self) -> None:
        """Forget the ids of all openings: they may hold what a user wants erased."""
        with self._lock:
            self._ids.clear()

    def _learn(self, key: bytes, opening: str, rest: str, whole: TokenIds, end_id: int) -> None:
        """Cache the ids of an opening; no ids where the ids of opening and rest are not those of the whole."""
        ids = TokenIds.of(self._encode(opening))
        if ids[-1:] != (end_id,) or ids + self._encode_after(end_id, rest) != whole:
            ids = TokenIds()
        with self._lock:
            self._ids.put(key, ids)
