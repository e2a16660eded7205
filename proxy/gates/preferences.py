"""Let a judge say which of two answers to a prompt is better, the candidate's or the serving version's."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, func, select, update

from proxy.clock import Clock
from proxy.database.rows import AnyRow
from proxy.database.tables import AnswerPairRow, RunRow
from proxy.database.unit_of_work import Database
from proxy.jobs.kinds import Json, RunningJob
from proxy.judges.budget import postpone_over_budget
from proxy.judges.candidates import with_unseen_answer
from proxy.judges.kinds.pairwise import Pairwise
from proxy.judges.prompts import Prompts
from proxy.judges.reader import JudgingTask, SubjectReader
from proxy.judges.service import JudgeObserver, count_judgement
from proxy.judges.subjects import Judged, Skipped, Subject, Usage
from proxy.judges.tools import Tools
from proxy.lifecycle.signals import Signals
from proxy.settings import JudgeKind, JudgeSettings, RunSettings
from proxy.versions.repository import UNDECIDED, VersionRepository

# The places of the two answers among the candidates of `with_unseen_answer`.
_UNSEEN = 1
_EVEN = 0.5


class Preference(NamedTuple):
    """`value` is 1 if the unseen answer is better, 0 if the other one is, 0.5 for neither.

    If it is not `is_consistent`, the judge named the same place in both orders, and so compared nothing.
    """

    value: float
    is_consistent: bool


class PreferenceJudge:
    """Runs jobs of the kind `prefer`, one for each pair."""

    def __init__(
        self,
        database: Database,
        tools: Tools,
        prompts: Prompts,
        signals: Signals,
        clock: Clock,
        observer: JudgeObserver,
    ) -> None:
        self._database = database
        self._tools = tools
        self._prompts = prompts
        self._signals = signals
        self._clock = clock
        self._observer = observer

    async def run(self, job: RunningJob) -> Json | None:
        """Ask the judge about a pair in both orders, so that a preference for a place cancels out.

        The preference and the completion are one transaction. If the process dies before it, the next attempt asks
        again; a pair counts once.
        """
        pair_id = str(job.payload["pair"])
        subject = await self._database.read(lambda connection: self._find(connection, pair_id))
        if isinstance(subject, Skipped):
            return {"skipped": subject.reason}
        await postpone_over_budget(self._database, subject, now=self._clock())
        judged = await Pairwise().judge(self._tools, subject)
        if judged.failure is not None:
            if judged.usage.prompt_tokens or judged.usage.completion_tokens:
                await self._database.commit(
                    lambda connection: self._spend(connection, pair_id, subject, judged.usage)
                )
            count_judgement(self._observer, "failed", judged.usage)
            raise judged.failure
        preference = preference_in(subject, judged)

        def save(connection: Connection) -> None:
            self._spend(connection, pair_id, subject, judged.usage)
            values = {"preference": preference.value, "is_consistent": preference.is_consistent}
            # Never replaced: the test must keep the values that it has seen.
            open_ = (AnswerPairRow.id == pair_id, AnswerPairRow.preference.is_(None))
            connection.execute(update(AnswerPairRow).where(*open_).values(**values))

        await job.complete(save, result={"preference": preference.value, "consistent": preference.is_consistent})
        count_judgement(self._observer, "compared", judged.usage)
        self._signals.events.notify()
        return None

    def _find(self, connection: Connection, pair_id: str) -> Subject | Skipped:
        """Return the pair with the judge of its gate, if a gate still waits for it. Raise JobRefused if the judge's
        prompt cannot be read."""
        pair = connection.execute(_PAIR.where(AnswerPairRow.id == pair_id)).one_or_none()
        if pair is None or pair.preference is not None:
            return Skipped("the pair was deleted, or is compared already")
        settings = RunSettings.model_validate(pair.config)
        name = settings.release.preference.judge
        version = VersionRepository(connection).find(pair.run_id, pair.version)
        if name is None or version is None or version.state not in UNDECIDED:
            return Skipped("no gate waits for the judge's preference any more")
        return with_unseen_answer(self._reader(connection, pair, settings, name), pair.turn_id, pair.response)

    def _reader(self, connection: Connection, pair: AnyRow, settings: RunSettings, name: str) -> SubjectReader:
        return SubjectReader(
            connection,
            JudgingTask(run_id=pair.run_id, judge=name, session_id=pair.session_id),
            run_name=pair.name,
            settings=settings,
            judge=comparing(settings.judges[name]),
            prompts=self._prompts,
            now=self._clock(),
        )

    def _spend(self, connection: Connection, pair_id: str, subject: Subject, usage: Usage) -> None:
        values = {
            "judge": subject.name,
            "judged_at": self._clock(),
            "prompt_tokens": AnswerPairRow.prompt_tokens + usage.prompt_tokens,
            "completion_tokens": AnswerPairRow.completion_tokens + usage.completion_tokens,
        }
        if usage.cost is not None:
            values["cost"] = func.coalesce(AnswerPairRow.cost, 0.0) + usage.cost
        connection.execute(
            update(AnswerPairRow)
            .where(AnswerPairRow.id == pair_id, AnswerPairRow.preference.is_(None))
            .values(**values)
        )


def comparing(judge: JudgeSettings) -> JudgeSettings:
    """Return the judge as one that compares. A judge of another kind keeps its model and its criteria; its own prompt
    asks for something else, so the shipped one for comparisons is used."""
    if judge.kind is JudgeKind.PAIRWISE:
        return judge
    return judge.model_copy(update={"kind": JudgeKind.PAIRWISE, "prompt": None})


def preference_in(subject: Subject, judged: Judged) -> Preference:
    """Return the preference in the result of a comparison."""
    score = next(each for each in judged.scores if each.candidate == _UNSEEN)
    if score.verdict is None:
        return Preference(_EVEN, is_consistent=False)
    low, high = subject.judge.low, subject.judge.high
    return Preference((score.verdict.score - low) / (high - low), is_consistent=True)


_PAIR = select(
    AnswerPairRow.run_id,
    AnswerPairRow.version,
    AnswerPairRow.session_id,
    AnswerPairRow.turn_id,
    AnswerPairRow.preference,
    AnswerPairRow.response,
    RunRow.name,
    RunRow.config,
).join(RunRow, RunRow.id == AnswerPairRow.run_id)
