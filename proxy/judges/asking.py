"""Asking a judge's model: several requests at the same time, and their answers as votes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from proxy.jobs.kinds import JobFailure
from proxy.judges.answers import InvalidAnswer
from proxy.judges.models import JudgeModels
from proxy.judges.prompts import Messages
from proxy.judges.provider import ModelAnswer
from proxy.judges.subjects import Subject, Usage

# Requests of one job that are under way at a time; a provider may limit them.
_AT_ONCE = 16

Vote = TypeVar("Vote")


class Answers(msgspec.Struct, Generic[Vote], frozen=True, kw_only=True):
    """`votes` has one entry a request, None for an answer that is invalid or did not come. `problems` says why."""

    votes: tuple[Vote | None, ...]
    problems: tuple[str, ...]
    errors: tuple[Exception, ...]
    usage: Usage

    def failure(self, missing: str) -> Exception:
        """Return why there are not enough votes. `missing` says in words how many there are."""
        # The provider's own error first: it decides whether and when the job is tried again.
        if self.errors:
            return self.errors[0]
        return JobFailure(f"{missing}: {self.problems[0]}" if self.problems else missing)


async def ask_all(
    models: JudgeModels,
    subject: Subject,
    requests: Sequence[Messages],
    form: dict[str, Any],
    read: Callable[[int, str], Vote],
) -> Answers[Vote]:
    """Ask the judge's model all requests. `form` is the JSON schema of an answer; `read` gets the number of the
    request and the text of its answer, and raises InvalidAnswer. Raise JobRefused if the judge has no provider."""
    models.check(subject.judge)
    places = asyncio.Semaphore(_AT_ONCE)

    async def ask(messages: Messages) -> ModelAnswer:
        async with places:
            return await models.ask(subject, messages, form)

    asked = await asyncio.gather(*map(ask, requests), return_exceptions=True)
    votes: list[Vote | None] = []
    problems: list[str] = []
    errors: list[Exception] = []
    for number, answer in enumerate(asked):
        vote = None
        if isinstance(answer, ModelAnswer):
            try:
                vote = read(number, _complete(answer, subject.judge.max_tokens))
            except InvalidAnswer as problem:
                problems.append(str(problem))
        elif isinstance(answer, Exception):
            errors.append(answer)
        else:
            raise answer
        votes.append(vote)
    answers = [answer for answer in asked if isinstance(answer, ModelAnswer)]
    return Answers(votes=tuple(votes), problems=tuple(problems), errors=tuple(errors), usage=_usage(answers))


def _complete(answer: ModelAnswer, max_tokens: int) -> str:
    if answer.is_cut:
        # Its last number may lack digits.
        raise InvalidAnswer(f"an answer was not complete within max_tokens, which is {max_tokens}")
    return answer.text


def _usage(answers: Sequence[ModelAnswer]) -> Usage:
    costs = [answer.cost for answer in answers]
    return Usage(
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        completion_tokens=sum(answer.completion_tokens for answer in answers),
        cost=sum(cost for cost in costs if cost is not None) if costs and None not in costs else None,
    )
