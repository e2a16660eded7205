"""Writes a judge's scores as rewards and judgements, within one transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sqlalchemy import Connection

from proxy.contract.identifiers import RewardId, new_judgement_id, new_reward_id
from proxy.contract.states import TrainingState
from proxy.feedback.repository import FeedbackRepository, FoundSession
from proxy.judges.repository import JudgementRepository
from proxy.judges.subjects import Candidate, Judged, Score, Subject, Usage, digest_of
from proxy.lifecycle.lifecycle import settle

SOURCE = "judge:"
"""The beginning of the source of a judge's rewards; its name follows."""
_WITH_THE_TRAINER = (TrainingState.LEASED.value, TrainingState.CONSUMED.value)


class SessionsErased(Exception):
    """All sessions that were judged were erased while the judge was asked. Nothing was written."""


class Recorded(NamedTuple):
    """`changed`: the training state of a session changed. `late` of the rewards came after training."""

    reward_ids: list[RewardId]
    late: int
    changed: bool

    @property
    def on_time(self) -> int:
        return len(self.reward_ids) - self.late


def record(connection: Connection, subject: Subject, judged: Judged, now: float) -> Recorded:
    """Write the rewards and the judgements. Raise SessionsErased if all sessions were erased meanwhile."""
    feedback, repository = FeedbackRepository(connection), JudgementRepository(connection)
    wanted = dict.fromkeys(candidate.session_id for candidate in subject.candidates)
    sessions = {session.id: session for session in feedback.sessions(list(wanted)) if session.erased_at is None}
    if not sessions:
        raise SessionsErased
    # Asked again under the locks: another job of the same group may have been faster.
    open_ = [place for place, one in enumerate(subject.candidates) if not _is_judged(repository, subject, one)]
    shares = _shares(judged.usage, len(open_))
    rewards: list[dict[str, Any]] = []
    for place in open_:
        candidate, usage = subject.candidates[place], next(shares)
        session = sessions.get(candidate.session_id)
        if session is None:
            continue
        mine = [score for score in judged.scores if score.candidate == place]
        for number, score in enumerate(mine or [Score(candidate=place, verdict=None)]):
            digest = candidate.digest if number == 0 else _further_digest(candidate, score)
            reward_id = None
            if score.verdict is not None:
                reward_id = new_reward_id()
                rewards.append(_reward(subject, candidate, score, reward_id, digest, session, now))
            row = _judgement(subject, candidate, digest, usage if number == 0 else Usage(), now)
            turn_id = score.turn_id or candidate.turn_id
            repository.add(row | _scored(score, reward_id) | {"turn_id": turn_id})
    feedback.insert(rewards)
    changed = settle(connection, sessions, now=now).changed
    late = sum(reward["after_training"] for reward in rewards)
    return Recorded([reward["id"] for reward in rewards], late, bool(changed))


def record_failure(connection: Connection, subject: Subject, judged: Judged, failure: Exception, now: float) -> None:
    """Write what a failed attempt cost and why it failed, with the first candidate."""
    candidate = subject.candidates[0]
    row = _judgement(subject, candidate, candidate.digest, judged.usage, now)
    failed = {"votes": list(judged.votes), "invalid_votes": judged.invalid_votes, "error": str(failure)}
    JudgementRepository(connection).add(row | failed)


def _is_judged(repository: JudgementRepository, subject: Subject, candidate: Candidate) -> bool:
    return repository.is_judged(candidate.session_id, subject.name, subject.fingerprint, candidate.digest)


def _further_digest(candidate: Candidate, score: Score) -> str:
    """Return the digest of a second reward for the same candidate, which the store keeps apart from the first."""
    return digest_of(candidate.digest, score.reward or "", score.turn_id or "")


def _shares(usage: Usage, count: int) -> Iterator[Usage]:
    """Yield the usage of each candidate: equal parts of what they cost together, the rest with the first."""
    for number in range(count):
        yield Usage(
            prompt_tokens=usage.prompt_tokens // count + (usage.prompt_tokens % count if number == 0 else 0),
            completion_tokens=usage.completion_tokens // count
            + (usage.completion_tokens % count if number == 0 else 0),
            cost=None if usage.cost is None else usage.cost / count,
        )


def _reward(
    subject: Subject,
    candidate: Candidate,
    score: Score,
    reward_id: RewardId,
    digest: str,
    session: FoundSession,
    now: float,
) -> dict[str, Any]:
    assert score.verdict is not None
    cut = "[the judge was shown a part of the conversation] " if candidate.is_cut else ""
    return {
        "id": reward_id,
        "run_id": subject.run_id,
        "session_id": candidate.session_id,
        "turn_id": score.turn_id or candidate.turn_id,
        "name": score.reward or subject.judge.reward or subject.name,
        "value": score.verdict.score,
        "source": f"{SOURCE}{subject.name}",
        "comment": cut + score.verdict.rationale,
        # Clients' keys end with a control character and a name, so none of them is equal to this one.
        "idempotency_key": f"judge:{subject.name}:{subject.fingerprint}:{candidate.session_id}:{digest}",
        "after_training": session.training in _WITH_THE_TRAINER,
        "created_at": now,
    }


def _scored(score: Score, reward_id: RewardId | None) -> dict[str, Any]:
    verdict = score.verdict
    return {
        "reward_id": reward_id,
        "score": None if verdict is None else verdict.score,
        "spread": None if verdict is None else verdict.spread,
        "votes": list(score.votes),
        "invalid_votes": score.invalid_votes,
    }


def _judgement(subject: Subject, candidate: Candidate, digest: str, usage: Usage, now: float) -> dict[str, Any]:
    return {
        "id": new_judgement_id(),
        "run_id": subject.run_id,
        "session_id": candidate.session_id,
        "turn_id": candidate.turn_id,
        "judge": subject.name,
        "fingerprint": subject.fingerprint,
        "digest": digest,
        "reward_id": None,
        "score": None,
        "votes": [],
        "invalid_votes": 0,
        "spread": None,
        "is_cut": candidate.is_cut,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cost": usage.cost,
        "error": None,
        "created_at": now,
    }
