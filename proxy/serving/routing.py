"""Decide which of several engines takes a call.

An engine has the prefix of a session's next prompt in its cache if it answered the session before, so a session stays
at one engine: the first of a ranking of all engines that depends on the session's id alone (rendezvous hashing). No
memory of sessions is needed, several proxies agree without a message, and an engine that comes or goes moves only its
own sessions. A ranking by chance does not know which engine is busy, so an engine with far more outstanding tokens
than the average is passed over for the one with the fewest.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from proxy.engines.place import EnginePlace

# An engine is busy above this multiple of the mean of outstanding tokens. 1 would move sessions at every small
# difference, which computes their prefixes again; at 2, one engine can do twice the work of the others.
_BUSY_FACTOR = 1.25
# And above this many tokens beyond the mean, about four answers of usual length: a pool with little work has no busy
# engine, whatever the ratio.
_BUSY_TOKENS = 4096


def served_version(held: Sequence[int], wanted: Sequence[tuple[float, int]]) -> int | None:
    """Return the version that new calls get: of the versions that engines hold, the wanted one, or the newest while
    no engine holds that one; None if engines hold none.

    `wanted` has the time of each engine's last look at the store, and the version that the store wanted then.
    """
    # The last look counts: after a rollback an older version is wanted, and who has not looked since wants the newer.
    version = max(wanted)[1] if wanted else None
    return version if version in held else max(held, default=None)


def rank(session_id: str, engine: str) -> bytes:
    """Return the rank of an engine for a session; the highest is the session's own engine."""
    return blake2b(f"{session_id}\0{engine}".encode(), digest_size=8).digest()


def choose_engine(session_id: str | None, outstanding_tokens: Sequence[int], engines: Sequence[str]) -> int:
    """Return the index of the engine that takes the next call of a session; None is a call without a session.

    `outstanding_tokens` are those of the ready `engines`, in the same order, at least one.
    """
    indices = range(len(engines))
    least = min(indices, key=lambda index: (outstanding_tokens[index], engines[index]))
    if session_id is None:
        return least
    own = max(indices, key=lambda index: rank(session_id, engines[index]))
    mean = sum(outstanding_tokens) / len(engines)
    is_busy = outstanding_tokens[own] > max(_BUSY_FACTOR * mean, mean + _BUSY_TOKENS)
    return least if is_busy else own


def choose_place(session_id: str | None, places: Sequence[EnginePlace]) -> EnginePlace | None:
    """Return the place that takes the next call of a session; None if there are no places."""
    if len(places) <= 1:
        return places[0] if places else None
    index = choose_engine(
        session_id,
        [place.load.outstanding_tokens + place.load.tokens_elsewhere for place in places],
        [place.engine.name for place in places],
    )
    return places[index]
