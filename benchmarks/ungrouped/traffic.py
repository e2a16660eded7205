"""Live traffic with one mark per session: the calculator's agent without groups, with or without shadow answers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import torch

from agents_examples.calculator.sampling import Completion, read_answer, sample
from agents_examples.calculator.tasks import Problem, random_problem, score
from benchmarks.learning.tasks import (
    FULL_MARKS,
    GROUPS,
    LONGEST,
    MEMBERS,
    Attempted,
    Calculator,
    Conversation,
)
from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.identifiers import TurnId
from proxy.contract.trajectory import Trajectory, TrajectoryGroup, TrajectoryTurn
from proxy.contract.turn import FinishReason
from proxy.turns.first_messages import first_message_hash

QUESTIONS = 64
"""Number of questions of the recurring traffic; a batch asks each of them twice on average."""
RIGHT = 0.8
"""Share of comparisons of unequal answers in which the judge of shadow answers is right."""


class Ungrouped(Calculator):
    """Sessions without groups, one mark for each: 0 to 100 for new questions, in a range of the question's own for
    recurring ones.

    With `share` and `samples`, that share of answers has `samples` more answers to its prompt. All of them are
    compared in pairs, by a judge that sees which are equal, and is right in `RIGHT` of its other comparisons.
    """

    name = "ungrouped"

    def __init__(self, *, recurring: bool = False, share: float = 0.0, samples: int = 0) -> None:
        self._share, self._samples = share, samples
        draw = random.Random(7)
        ranges = [(draw.uniform(0, FULL_MARKS), FULL_MARKS * draw.choice((0.3, 1.0))) for _ in range(QUESTIONS)]
        self._recurring = [(random_problem(draw), low, width) for low, width in ranges] if recurring else None

    def attempt(self, model: Any, rng: random.Random, generator: torch.Generator, version: int) -> Attempted:
        asked = [self._question(rng) for _ in range(GROUPS * MEMBERS)]
        attempts = self.conversations([problem for problem, _, _ in asked], model, generator, version)
        scores = [score(attempt.problem, attempt.answer or "") for attempt in attempts]
        if self._share:
            self._shadow(attempts, model, rng, generator)
        groups = [
            TrajectoryGroup(id=None, trajectories=(_finished(attempt, low + width * right),))
            for attempt, (_, low, width), right in zip(attempts, asked, scores, strict=True)
        ]
        return Attempted(groups, scores)

    def _question(self, rng: random.Random) -> tuple[Problem, float, float]:
        if self._recurring is None:
            return random_problem(rng), 0.0, FULL_MARKS
        return rng.choice(self._recurring)

    def _shadow(
        self, attempts: list[Conversation], model: Any, rng: random.Random, generator: torch.Generator
    ) -> None:
        """Give a share of the answers more answers to the same prompt, and marks to all of these."""
        chosen = [
            (attempt, number)
            for attempt in attempts
            for number in range(len(attempt.recorded.turns))
            if rng.random() < self._share
        ]
        prompts = [attempt.recorded.prompt_of(number) for attempt, number in chosen for _ in range(self._samples)]
        if not prompts:
            return
        tokenizer = self.tokenizer
        stop = tokenizer.eos_token_id
        drawn = iter(
            sample(
                model,
                prompts,
                temperature=1.0,
                longest=LONGEST,
                stop=stop,
                padding=tokenizer.pad_token_id,
                generator=generator,
            )
        )
        for attempt, number in chosen:
            said = list(itertools.islice(drawn, self._samples))
            texts = [str(tokenizer.decode(each.without(stop))) for each in said]
            worths = [attempt.worth(read_answer(text), number) for text in texts]
            real = attempt.recorded.turns[number]
            own = str(tokenizer.decode([each for each in real.output_ids if each != stop]))
            marks = _ranks([attempt.worth(read_answer(own), number), *worths], rng)
            attempt.recorded.turns[number] = msgspec.structs.replace(real, reward=marks[0])
            attempt.recorded.turns += [
                _sibling(real, each, mark, ended=stop in each.ids) for each, mark in zip(said, marks[1:], strict=True)
            ]


def _finished(attempt: Conversation, reward: float) -> Trajectory:
    messages = [message for message in attempt.messages if message["role"] == "user"]
    return msgspec.structs.replace(
        attempt.recorded.finished(None, reward), first_message=first_message_hash(messages)
    )


def _ranks(worths: list[float], rng: random.Random) -> list[float]:
    """Return the share of comparisons that each answer wins, times the full marks; a draw is half a win."""
    wins = [0.0] * len(worths)
    for one, other in itertools.combinations(range(len(worths)), 2):
        if worths[one] == worths[other]:
            wins[one] += 0.5
            wins[other] += 0.5
            continue
        is_right = rng.random() < RIGHT
        wins[one if (worths[one] > worths[other]) is is_right else other] += 1
    return [FULL_MARKS * won / (len(worths) - 1) for won in wins]


def _sibling(real: TrajectoryTurn, said: Completion, mark: float, *, ended: bool) -> TrajectoryTurn:
    return msgspec.structs.replace(
        real,
        id=TurnId(f"{real.id}_shadow_{next(_numbers)}"),
        packed_output_ids=pack_ids(said.ids),
        packed_logprobs=pack_logprobs(said.logprobs),
        spans=(msgspec.structs.replace(real.spans[0], start=0, end=len(said.ids)),),
        finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        superseded=True,
        reward=mark,
    )


_numbers = itertools.count()
