"""What judges score: sessions, groups of sessions, and answers within a session. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.contract.identifiers import RewardId
from proxy.judges.answers import Verdict
from proxy.judges.transcripts import Transcript
from proxy.settings import JudgeSettings


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A session, or one turn of it, that gets a score.

    `shown` is its text in the judge's prompt, `reply` the messages that followed it. `digest` is the hash of
    everything that the judge reads about it, so that the same content is not judged twice; it contains the other
    candidates if they are shown together. `document` is the session as data, for judges that are programs.
    """

    session_id: str
    turn_id: str | None = None
    shown: Transcript
    reply: Transcript | None = None
    digest: str
    document: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def is_cut(self) -> bool:
        return self.shown.is_cut or (self.reply is not None and self.reply.is_cut)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates of one job, with the judge as its run has it now. `context` is the conversation that all
    candidates share, if they are answers to it."""

    run_id: str
    run_name: str
    name: str
    judge: JudgeSettings
    fingerprint: str
    prompt: str
    candidates: tuple[Candidate, ...]
    context: Transcript | None = None
    left_out: int = 0
    """Turns that would be candidates, beyond the bound of the kind."""


class Skipped(msgspec.Struct, frozen=True):
    """Why there is nothing to judge."""

    reason: str


class NotYet(msgspec.Struct, frozen=True):
    """Why the judging has to wait, and for how many seconds."""

    reason: str
    seconds: float


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What answers have cost. `cost` is None if a price is unknown."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge says about one candidate. Without a verdict, `problem` says why there is none.

    `reward` is the name of the reward; None: the judge's. `turn_id` is the turn that the reward is about; None: the
    candidate's own.
    """

    candidate: int
    verdict: Verdict | None
    votes: tuple[float, ...] = ()
    invalid_votes: int = 0
    problem: str | None = None
    reward: str | None = None
    turn_id: str | None = None


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one attempt. With a `failure`, no candidate has a score; the tokens were used in both cases."""

    scores: tuple[Score, ...] = ()
    failure: Exception | None = None
    usage: Usage = Usage()
    votes: tuple[float, ...] = ()
    invalid_votes: int = 0
    """Valid votes and the number of invalid ones of an attempt that failed."""


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A score with its rewards' id; None without a verdict."""

    score: Score
    reward_id: RewardId | None


def digest_of(*parts: str) -> str:
    """Return a hash of the parts and of their boundaries."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def together(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates with digests that depend on all of them."""
    everything = digest_of(*sorted(candidate.digest for candidate in candidates))
    return tuple(
        msgspec.structs.replace(
            candidate, digest=digest_of(candidate.session_id, candidate.turn_id or "", everything, candidate.digest)
        )
        for candidate in candidates
    )
