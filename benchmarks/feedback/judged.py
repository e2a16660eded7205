"""Sessions whose only rewards come from the proxy's own judges, with a scripted model in the place of a provider.

`relative`: attempts at the same problem in groups; the model compares each two of them and is wrong in a fifth of
the comparisons. `follow_up`: an answer, and the user's next message, which shows whether the answer served.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import torch

from agents_examples.calculator.tasks import Problem, random_problem, score
from benchmarks.learning.tasks import Attempted, Calculator
from proxy.contract.identifiers import GroupId
from proxy.contract.trajectory import Trajectory, TrajectoryGroup
from proxy.judges.kinds import KINDS
from proxy.judges.models import JudgeModels
from proxy.judges.prompts import Prompts
from proxy.judges.provider import ModelAnswer
from proxy.judges.subjects import Candidate, Score, Subject, together
from proxy.judges.tools import Tools
from proxy.judges.transcripts import transcript_of
from proxy.settings import JudgeKind, JudgeSettings

MEMBERS = 4
RIGHT_SHARE = 0.8
"""The share of its comparisons in which the scripted judge is right."""
SILENT_SHARE = 0.1
"""The share of users whose next message does not tell whether the answer served."""

_BLOCK = re.compile(r"<(\S+)-(\w+)>\n(.*?)\n</\1-\2>", re.DOTALL)
_NUMBER = itertools.count()


class ScriptedModel:
    """Stands in for the models of providers: it reads the prompt as a model would, and answers by rule."""

    def __init__(self, rng: random.Random, problems: Mapping[str, Problem]) -> None:
        self._rng = rng
        self._problems = problems

    def check(self, judge: JudgeSettings) -> None:
        """Accept every judge."""

    async def ask(
        self, subject: Subject, messages: Sequence[Mapping[str, Any]], _form: dict[str, Any]
    ) -> ModelAnswer:
        blocks = {label: _messages(text) for _, label, text in _BLOCK.findall(messages[1]["content"])}
        said = self._follow_up(blocks) if "after" in blocks else self._relative(blocks)
        return ModelAnswer(text=json.dumps(said), prompt_tokens=0, completion_tokens=0)

    def _relative(self, blocks: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """Score each conversation by its share of won comparisons."""
        right = {
            number: score(self._problems[said[0]["content"]], said[-1]["content"]) for number, said in blocks.items()
        }
        wins = dict.fromkeys(right, 0.0)
        for one, other in itertools.combinations(right, 2):
            if right[one] == right[other]:
                wins[self._rng.choice((one, other))] += 1
                continue
            better, worse = (one, other) if right[one] > right[other] else (other, one)
            wins[better if self._rng.random() < RIGHT_SHARE else worse] += 1
        most = len(right) - 1
        return {"scores": [{"id": int(number), "rationale": "", "score": won / most} for number, won in wins.items()]}

    def _follow_up(self, blocks: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """Score an answer by the words of the message after it alone."""
        said = blocks["after"][0]
        known: dict[str, float | None] = {THANKS: 1.0, COMPLAINT: 0.0}
        served = next((known[words] for words in known if said["content"].startswith(words)), None)
        return {"rationale": "", "score": served if said["role"] == "user" else None}


THANKS, COMPLAINT, NEITHER = "Thanks, that is right.", "No, that is wrong.", "I see."


def judged(kind: JudgeKind, model: ScriptedModel, candidates: Sequence[Candidate]) -> tuple[Score, ...]:
    """Return the scores that a judge of this kind gives the candidates."""
    judge = JudgeSettings(kind=kind, model="scripted/judge")
    subject = Subject(
        run_id="run",
        run_name="run",
        name="judge",
        judge=judge,
        fingerprint="",
        prompt=Prompts().source(judge),
        candidates=tuple(candidates),
    )
    tools = cast("Tools", _OnlyModels(cast("JudgeModels", model)))
    found = asyncio.run(KINDS[kind].judge(tools, subject))
    if found.failure is not None:
        raise found.failure
    return found.scores


class _OnlyModels(msgspec.Struct):
    models: JudgeModels


class Compared(Calculator):
    """The calculator's agent, with `MEMBERS` attempts at each problem and rewards from a relative judge."""

    def __init__(self, sessions: int, seed: int, tokenizer: Any) -> None:
        self._sessions = sessions
        self.tokenizer = tokenizer
        self._judge_rng = random.Random(seed + 1)

    def attempt(self, model: Any, rng: random.Random, generator: torch.Generator, version: int) -> Attempted:
        problems = [problem for problem in self._problems(rng) for _ in range(MEMBERS)]
        attempts = self.conversations(problems, model, generator, version)
        judge = ScriptedModel(self._judge_rng, {problem.question: problem for problem in problems})
        groups = []
        for start in range(0, len(attempts), MEMBERS):
            members = attempts[start : start + MEMBERS]
            candidates = together(
                [_candidate(f"ses_{next(_NUMBER)}", one.messages[0], one.answer) for one in members]
            )
            scores = judged(JudgeKind.RELATIVE, judge, candidates)
            group = GroupId(f"grp_{next(_NUMBER)}")
            trajectories = tuple(
                one.recorded.finished(group, _value(given)) for one, given in zip(members, scores, strict=True)
            )
            groups.append(TrajectoryGroup(id=group, trajectories=trajectories))
        return Attempted(groups, [score(one.problem, one.answer or "") for one in attempts])

    def _problems(self, rng: random.Random) -> list[Problem]:
        return [random_problem(rng) for _ in range(self._sessions // MEMBERS)]


class FollowedUp(Calculator):
    """The calculator's agent in conversations of two questions. The user's second message says in words whether the
    first answer was right, and asks the second question; there is no other feedback. The scores are those of the
    first answers, which the agent gives before it knows anything of the feedback."""

    def __init__(self, sessions: int, seed: int, tokenizer: Any) -> None:
        self._sessions = sessions
        self.tokenizer = tokenizer
        self._user = random.Random(seed + 1)

    def attempt(self, model: Any, rng: random.Random, generator: torch.Generator, version: int) -> Attempted:
        problems = [random_problem(rng) for _ in range(self._sessions)]
        attempts = self.conversations(problems, model, generator, version)
        scores = [score(attempt.problem, attempt.answer or "") for attempt in attempts]
        judge = ScriptedModel(self._user, {})
        groups = [
            TrajectoryGroup(id=None, trajectories=(self._followed(attempt, right, judge, random_problem(rng)),))
            for attempt, right in zip(attempts, scores, strict=True)
        ]
        return Attempted(groups, scores)

    def _followed(self, attempt: Any, right: float, judge: ScriptedModel, following: Problem) -> Trajectory:
        """Return the first question's turns, each with the reward of what followed it. The agent's work at the second
        question has no follow-up, so it is not trained and not part of the trajectory."""
        words = NEITHER if self._user.random() < SILENT_SHARE else THANKS if right == 1 else COMPLAINT
        said = [*attempt.messages, {"role": "user", "content": f"{words} {following.question}"}]
        places = [place for place, message in enumerate(said) if message["role"] == "assistant"]
        turns = attempt.recorded.turns
        session = f"ses_{next(_NUMBER)}"
        candidates = [
            Candidate(
                session_id=session,
                turn_id=turn.id,
                shown=transcript_of(said[: place + 1], task=None, max_characters=100_000),
                reply=transcript_of([said[place + 1]], task=None, max_characters=100_000),
                digest=turn.id,
            )
            for turn, place in zip(turns, places, strict=True)
        ]
        scores = judged(JudgeKind.FOLLOW_UP, judge, candidates)
        attempt.recorded.turns = [
            msgspec.structs.replace(turn, reward=_value(given)) for turn, given in zip(turns, scores, strict=True)
        ]
        return cast("Trajectory", attempt.recorded.finished(None, None))


def _candidate(session: str, question: dict[str, Any], answer: str | None) -> Candidate:
    messages = [question, {"role": "assistant", "content": answer or ""}]
    shown = transcript_of(messages, task=None, max_characters=100_000)
    return Candidate(session_id=session, shown=shown, digest=shown.digest)


def _value(given: Score) -> float | None:
    return None if given.verdict is None else given.verdict.score


def _messages(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n")]
