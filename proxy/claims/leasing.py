"""The transactions of claims: find what is ready, lease it, end a claim.

Each function runs in one transaction of its caller. Changes of claims lock the run first, so that claims and commits
of one run follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from proxy.claims.handing_out import Lease, assemble_candidates
from proxy.claims.repository import ClaimRepository, RunStanding
from proxy.claims.selection import Bounds, Candidate, Selection, select_units
from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import ClaimId, RunId, new_claim_id
from proxy.contract.states import ClaimState
from proxy.contract.trajectory import Trajectory
from proxy.lifecycle.combining import SessionRewards, session_rewards
from proxy.lifecycle.events import append_event
from proxy.lifecycle.lifecycle import ledger_of
from proxy.lifecycle.texts import FeedbackEntry, texts_of
from proxy.runs.service import RunView
from proxy.turns.repository import TurnRepository

# Ready sessions read at once: up to `_PAGE`, and some more than the request still needs, as groups may be incomplete
# and sessions stale.
_PAGE = 512
_PAGE_AT_LEAST = 16
# Claims that one transaction expires: each gives back up to thousands of sessions, and other writes wait meanwhile.
_EXPIRED_AT_ONCE = 16


class Raced(Exception):
    """A selected session was claimed by another trainer, or has a new turn."""


class Unrewarded(Exception):
    """Ready sessions have nothing to be trained on by the run's present rules, which were changed since they became
    ready."""

    def __init__(self, session_ids: Sequence[str]) -> None:
        super().__init__(session_ids)
        self.session_ids = session_ids


class Attempt(NamedTuple):
    """One attempt to serve a request, at the time `now`: at least `minimum` trajectories, or none."""

    run: RunView
    request: ClaimRequest
    minimum: int
    now: float


class Found(NamedTuple):
    """A selection made without a lock. `overdue`: the lease of some claim has passed."""

    standing: RunStanding
    selection: Selection
    overdue: bool

    def is_promising(self, minimum: int) -> bool:
        """Whether `lease` may have something to lease, or to mark as stale."""
        return self.selection.count >= minimum or bool(self.selection.stale)

    @property
    def leasable(self) -> list[Candidate]:
        """The candidates that `lease` will take if nothing changes; none if some are stale, as it then selects
        again."""
        return [] if self.selection.stale else self.selection.candidates


def find(connection: Connection, attempt: Attempt) -> Found:
    """Select what the attempt could lease, without a lock."""
    repository = ClaimRepository(connection)
    overdue = bool(repository.overdue(attempt.now, 1))
    standing = repository.run(attempt.run.id)
    if not standing.is_active or repository.ready_count(attempt.run.id, attempt.minimum) < attempt.minimum:
        return Found(standing, Selection(), overdue)
    return Found(standing, _select(repository, standing, attempt), overdue)


def read_trajectories(connection: Connection, candidates: Sequence[Candidate]) -> dict[str, Trajectory | None]:
    """Return the candidates' trajectories by session; None for one without a trainable turn."""
    turn_counts = {candidate.id: candidate.turn_count for candidate in candidates}
    return assemble_candidates(candidates, TurnRepository(connection).turns_of(turn_counts))


def lease(connection: Connection, attempt: Attempt, found: Found | None) -> Lease | None:
    """Lease what was found, or select again under the run's lock if the run has changed since. Mark stale sessions.

    Return None if fewer than the minimum can be leased. Raise Raced if a session was claimed or has a new turn since
    it was found, and Unrewarded if sessions have lost their rewards.
    """
    run, request, minimum, now = attempt
    repository = ClaimRepository(connection)
    repository.commit_without_flush()
    standing = repository.run(run.id, lock=True)
    if not standing.is_active:
        return None
    if found is not None and found.standing == standing and not found.selection.stale:
        selection = found.selection
    else:
        selection = _select(repository, standing, attempt)
    if selection.stale:
        repository.mark_stale([candidate.id for candidate in selection.stale])
        data = {
            "count": len(selection.stale),
            "head": standing.head_version,
            "max_staleness": request.max_staleness,
        }
        append_event(connection, run_id=run.id, kind="sessions.stale", data=data, now=now)
    if selection.count < minimum:
        return None
    claim_id = new_claim_id()
    expires_at = now + run.settings.lease_seconds
    repository.insert_claim(claim_id, run.id, request, standing=standing, now=now, lease_expires_at=expires_at)
    rewards, texts = _hand_out(connection, claim_id, selection.candidates, standing)
    return Lease(
        claim_id=claim_id,
        expires_at=expires_at,
        base_version=standing.head_version,
        units=selection.units,
        rewards=rewards,
        texts=texts,
    )


def _hand_out(
    connection: Connection, claim_id: ClaimId, candidates: Sequence[Candidate], standing: RunStanding
) -> tuple[dict[str, SessionRewards], dict[str, tuple[FeedbackEntry, ...]]]:
    """Move the candidates into the claim. Return their rewards, which are recorded with it, and their texts."""
    repository = ClaimRepository(connection)
    if not repository.lease(claim_id, candidates):
        raise Raced
    # After the lease: feedback that arrives from now on is late, so what is read here is what the claim has.
    session_ids = [candidate.id for candidate in candidates]
    ledger, texts = ledger_of(connection, session_ids), texts_of(connection, session_ids)
    rules = standing.reward_rules
    rewards = {session_id: session_rewards(entries, rules) for session_id, entries in ledger.items()}
    unrewarded = [
        session_id
        for session_id, combined in rewards.items()
        if not combined.may_be_trained(described=rules.texts_train and session_id in texts)
    ]
    if unrewarded:
        raise Unrewarded(unrewarded)
    repository.hand_out(claim_id, candidates, rewards)
    return rewards, texts


def _select(repository: ClaimRepository, standing: RunStanding, attempt: Attempt) -> Selection:
    run, request = attempt.run, attempt.request
    bounds = Bounds(
        oldest_version=standing.head_version - request.max_staleness,
        group_timeout=run.settings.group_timeout_seconds,
        now=attempt.now,
    )
    selection = Selection()
    seen: set[str] = set()
    last: Candidate | None = None
    while selection.count < request.want:
        size = min(_PAGE, 2 * (request.want - selection.count) + _PAGE_AT_LEAST)
        page = repository.ready_page(run.id, last, size)
        named = {candidate.group_id: None for candidate in page if candidate.group_id is not None}
        groups = repository.groups([group_id for group_id in named if group_id not in seen])
        select_units(page, groups, bounds, want=request.want, seen=seen, selection=selection)
        if len(page) < size:
            break
        last = page[-1]
    return selection


def has_overdue(connection: Connection, now: float) -> bool:
    """Return whether the lease of some claim has passed."""
    return bool(ClaimRepository(connection).overdue(now, 1))


def expire_some(connection: Connection, now: float) -> int:
    """End up to `_EXPIRED_AT_ONCE` overdue claims and return how many were found."""
    repository = ClaimRepository(connection)
    overdue = repository.overdue(now, _EXPIRED_AT_ONCE)
    # Runs are locked in the order of their ids: two proxies that expire the same claims then cannot deadlock.
    for run_id, claim_id in sorted((run_id, claim_id) for claim_id, run_id in overdue):
        repository.run(run_id, lock=True)
        known = repository.state(claim_id, run_id)
        if known is None or known[0] is not ClaimState.LEASED or known[1] > now:
            continue  # another proxy ended or extended it before the run was locked
        end_claim(connection, run_id, claim_id, ClaimState.EXPIRED, now=now)
    return len(overdue)


def exclude(
    connection: Connection,
    *,
    run_id: RunId,
    claim_id: ClaimId,
    session_ids: Sequence[str],
    nothing_left: bool,
    now: float,
) -> None:
    """Exclude sessions without a trainable turn from a claim, and end the claim if nothing is left of it."""
    repository = ClaimRepository(connection)
    repository.run(run_id, lock=True)
    repository.exclude(claim_id, session_ids)
    if nothing_left:
        repository.end(claim_id, ClaimState.RELEASED, now=now)
    data = {"count": len(session_ids), "reason": "no trainable turn"}
    append_event(connection, run_id=run_id, kind="sessions.excluded", data=data, now=now)


def end_claim(connection: Connection, run_id: str, claim_id: ClaimId, state: ClaimState, *, now: float) -> None:
    """End a claim in `state` and return its sessions to the run."""
    count = ClaimRepository(connection).end(claim_id, state, now=now)
    data = {"claim": claim_id, "sessions": count}
    append_event(connection, run_id=run_id, kind=f"claim.{state.value}", data=data, now=now)
