"""One judgement: asks a judge's model about a conversation, and combines its votes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from proxy.jobs.kinds import JobFailure
from proxy.judges.answers import InvalidAnswer, Verdict, Vote, read_vote, verdict
from proxy.judges.fingerprints import prompt
from proxy.judges.models import JudgeModels, ModelAnswer, cost_of
from proxy.judges.transcripts import Transcript
from proxy.settings import JudgeSettings


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one attempt. Either `verdict` or `failure` is None; the tokens were used in both cases."""

    verdict: Verdict | None
    failure: Exception | None
    votes: tuple[float, ...]
    invalid_votes: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None


async def judge_transcript(models: JudgeModels, judge: JudgeSettings, transcript: Transcript) -> Judged:
    """Ask for all votes at the same time. Raise JobRefused if the judge has no provider."""
    provider = models.provider(judge)
    messages = prompt(judge, transcript)
    asked = await asyncio.gather(*(models.ask(judge, messages) for _ in range(judge.votes)), return_exceptions=True)
    answers = [each for each in asked if isinstance(each, ModelAnswer)]
    votes, problems = _votes(judge, answers)
    failure = _failure(judge, [each for each in asked if isinstance(each, BaseException)], votes, problems)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    return Judged(
        verdict=verdict(votes) if failure is None else None,
        failure=failure,
        votes=tuple(vote.score for vote in votes),
        invalid_votes=judge.votes - len(votes),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cost=cost_of(provider, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens),
    )


def _votes(judge: JudgeSettings, answers: Sequence[ModelAnswer]) -> tuple[list[Vote], list[str]]:
    votes: list[Vote] = []
    problems: list[str] = []
    for answer in answers:
        if answer.is_cut:
            # Its last number may lack digits.
            problems.append(f"an answer was not complete within max_tokens, which is {judge.max_tokens}")
            continue
        try:
            votes.append(read_vote(answer.text, low=judge.low, high=judge.high))
        except InvalidAnswer as problem:
            problems.append(str(problem))
    return votes, problems


def _failure(
    judge: JudgeSettings, errors: Sequence[BaseException], votes: Sequence[Vote], problems: Sequence[str]
) -> Exception | None:
    """Return why there are not enough votes; None if there are. Raise what is no failure of a judge."""
    for error in errors:
        if not isinstance(error, Exception):
            raise error
    # More than half: the median of fewer could be decided by the votes that are missing.
    if 2 * len(votes) > judge.votes:
        return None
    # The provider's own error first: it decides whether and when the job is tried again.
    known = [error for error in errors if isinstance(error, Exception)]
    if known:
        return known[0]
    return JobFailure(f"{len(votes)} of {judge.votes} answers of the judge are valid: {problems[0]}")
