"""How a new version enters its run by the run's release policy, and the sessions that other versions than the serving
one answer: a canary's share, and sessions held on a version."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, select

from proxy.contract.identifiers import created_at
from proxy.contract.policy import VersionState
from proxy.database.tables import PolicyVersionRow, VersionHoldRow
from proxy.errors import Conflict
from proxy.runs.service import RunView
from proxy.versions.repository import UNDECIDED, WITHDRAWN, VersionRepository

_DIGEST_BYTES = 8


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that a version answers: calls with a key, or a share of the sessions that began at `since` or later.

    `is_canary`: the version is on trial, so a call of the track that it cannot answer goes to the serving version. A
    candidate that is evaluated, or that answers prompts unseen (`is_shadow`), has no share: it only needs an engine.
    """

    version: int
    since: float
    key_id: str | None = None
    share: float | None = None
    is_canary: bool = False
    is_shadow: bool = False


class Change(NamedTuple):
    """A change that was made: the kind and the data of its event, and the versions that it rolled back."""

    event: str
    data: dict[str, object]
    rolled_back: Sequence[int] = ()


def enter(repository: VersionRepository, run: RunView, version: int, *, parent: int) -> None:
    """Let a version that was just committed serve at once, or make it a candidate, as the run's policy says. In the
    transaction of the commit."""
    promoted = repository.run(run.id).promoted_version
    if run.settings.release.policy == "immediate":
        if promoted is not None:
            repository.promote(run.id, None)
        return
    repository.set_state(run.id, version, VersionState.CANDIDATE)
    if promoted is None:  # the run released at once before, so its engines follow the head
        repository.promote(run.id, parent)


def pass_version(repository: VersionRepository, run: RunView, version: int) -> Change:
    """Make a version that waits the one that engines should serve, under the run's lock. Raise Conflict if it does
    not wait."""
    row = repository.version(run.id, version)
    if row.state not in UNDECIDED:
        raise Conflict(
            f"version {version} does not wait for a decision, it is {row.state}: pin it to serve it again",
            param="version",
        )
    promoted = repository.run(run.id).promoted_version
    if promoted is not None and version < promoted:
        raise Conflict(
            f"version {promoted} is newer and passed already: pin version {version} instead", param="version"
        )
    repository.set_state(run.id, version, VersionState.COMMITTED)
    repository.promote(run.id, version)
    return Change("version.promoted", {"version": version, "before": promoted})


def in_use(connection: Connection, run_id: str) -> set[int]:
    """Return the versions that wait for their gates, or that sessions are held on."""
    undecided = select(PolicyVersionRow.version).where(
        PolicyVersionRow.run_id == run_id, PolicyVersionRow.state.in_(UNDECIDED)
    )
    held = select(VersionHoldRow.version).where(VersionHoldRow.run_id == run_id)
    return {*connection.execute(undecided).scalars(), *connection.execute(held).scalars()}


def read_tracks(connection: Connection, runs: Sequence[RunView]) -> dict[str, tuple[Track, ...]]:
    """Return the tracks by run, the canary first; runs without any are omitted."""
    found: dict[str, list[Track]] = {}
    releases = {run.id: run.settings.release for run in runs}
    trials = select(
        PolicyVersionRow.run_id,
        PolicyVersionRow.version,
        PolicyVersionRow.state,
        PolicyVersionRow.shadow_at,
        PolicyVersionRow.canary_at,
    ).where(PolicyVersionRow.state.in_(UNDECIDED))
    # The canary, or else the shadow, or else the oldest candidate, whose evaluation is due first.
    is_candidate = PolicyVersionRow.state != VersionState.CANARY.value
    has_no_shadow = PolicyVersionRow.shadow_at.is_(None)
    for row in connection.execute(trials.order_by(is_candidate, has_no_shadow, PolicyVersionRow.version)):
        if row.run_id in releases and row.run_id not in found:
            release, is_canary = releases[row.run_id], row.state == VersionState.CANARY
            track = Track(
                version=row.version,
                since=row.canary_at or 0.0,
                share=release.canary.share if is_canary else 0.0,
                is_canary=True,
                is_shadow=not is_canary and row.shadow_at is not None and "shadow.share" in release.trials,
            )
            found[row.run_id] = [track]
    holds = select(VersionHoldRow.__table__).join(
        PolicyVersionRow,
        (PolicyVersionRow.run_id == VersionHoldRow.run_id) & (PolicyVersionRow.version == VersionHoldRow.version),
    )
    # Not withdrawn ones: their sessions are answered by the serving version.
    holds = holds.where(PolicyVersionRow.state.not_in(WITHDRAWN)).order_by(VersionHoldRow.id)
    for row in connection.execute(holds):
        track = Track(version=row.version, since=row.created_at, key_id=row.key_id, share=row.share)
        found.setdefault(row.run_id, []).append(track)
    return {run_id: tuple(tracks) for run_id, tracks in found.items()}


def track_of(tracks: Sequence[Track], session_id: str, key_id: str | None) -> Track | None:
    """Return the track of a session; None if the serving version answers it.

    It depends on the session's id, its key and the tracks alone, so that it is the same for every call of a session
    at every proxy. A key that is held belongs to no share. The canary takes the lower end of a session's place in
    [0, 1), and held shares take the upper end, so that a new canary moves no held session.
    """
    for track in tracks:
        if track.key_id is not None and track.key_id == key_id:
            return track
    place, began = _place(session_id), created_at(session_id)
    top = 1.0
    for track in tracks:
        if track.share is None:
            continue
        if track.is_canary:
            is_inside = place < track.share
        else:
            is_inside = top - track.share <= place < top
            top -= track.share
        if is_inside and began >= track.since:
            return track
    return None


def _place(session_id: str) -> float:
    """Return a number in [0, 1) that is uniform over sessions and the same at every proxy."""
    digest = blake2b(session_id.encode(), digest_size=_DIGEST_BYTES, person=b"tracks").digest()
    return int.from_bytes(digest) / (1 << 8 * _DIGEST_BYTES)
