"""The figures and curves of runs. Costly ones are cached in proportion to their cost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec
from sqlalchemy import Connection

from proxy.bounded_cache import BoundedCache
from proxy.clock import Clock
from proxy.contract.states import TrainingState
from proxy.contract.turn import FinishReason, TurnState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.overview.curves import bucket_stride, reward_points
from proxy.overview.figure_cache import FigureCache
from proxy.overview.learning import ENOUGH_STEPS, LearningFacts, why_not_learnt
from proxy.overview.rate import RateHistory
from proxy.overview.repository import OverviewRepository
from proxy.overview.rewards.repository import LedgerRepository
from proxy.overview.steps.assembly import StepFacts, stored_step_facts
from proxy.overview.steps.repository import StepOverviewRepository
from proxy.overview.totals import LARGE, RunTotals, StoreTotals
from proxy.overview.views import REWARD_WINDOW, Curves, RatePoint, RewardPoint, RunSummary, StepPoint
from proxy.runs.asking import AskedBatches
from proxy.runs.beginnings import begun_from
from proxy.settings import RunSettings

_STEP_POINTS = 600
_CACHED_STEPS = 4096
# Decoding 40 audits of some hundred trajectories takes 5 ms, during which the event loop is blocked.
_AUDITS_AT_ONCE = 40
_RECENT_SESSIONS = 200
# Seconds within which a waiting trainer asks again: `ClaimRequest.wait_s` is at most 60.
_LONGEST_WAIT = 90.0
# How often the proxy refreshes costly figures: less than the minute for which a stale one is returned.
REFRESH_SECONDS = 30.0


def _is_long(reward: Sequence[RewardPoint]) -> bool:
    return bool(reward) and reward[-1].sessions > LARGE


class _Recent(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run that indexes find quickly."""

    rewards: list[tuple[str | None, float]]
    learning_rates: list[float]
    trainer_seen_at: float | None
    open_sessions: int
    newest_step: StepFacts | None
    inexact_share: float | None
    unattributed_share: float | None
    cut_share: float | None
    late_rewards: int
    revised_sessions: int
    tokens_per_second: float


class _Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The curves of one run that indexes find quickly."""

    steps: tuple[StepPoint, ...]
    rate: tuple[RatePoint, ...]


class RunFigures:
    """Computes and caches the figures of all runs. `hold_seconds` and `elapsed` are those of `FigureCache`.

    In a store of more than `LARGE` sessions, figures that need a walk over all sessions are some seconds old while
    somebody watches, and at most a minute otherwise. No request waits for them if `refresh` is called every
    `REFRESH_SECONDS`. Other figures are current.
    """

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        hold_seconds: float,
        elapsed: Clock = time.monotonic,
        asked: AskedBatches | None = None,
        has_weights: bool = True,
    ) -> None:
        self._database = database
        self._clock = clock
        self._asked = asked or AskedBatches()
        self._has_weights = has_weights
        self.cache = FigureCache(hold_seconds, elapsed)
        self.totals = StoreTotals(database, self.cache)
        self._rates: dict[str, RateHistory] = {}
        self._facts: BoundedCache[tuple[str, int], StepFacts] = BoundedCache(_CACHED_STEPS)

    def close(self) -> None:
        self.cache.close()

    async def refresh(self, runs: Sequence[AnyRow]) -> None:
        """Compute the figures that are due and take long, so that the next request need not wait for them."""
        for run in runs:
            # Figures of smaller runs are counted in milliseconds on request. Counting those of hundreds of runs here
            # would take a noticeable share of the time of calls.
            if (await self.totals.of_run(run.id)).session_count > LARGE:
                await self.summary(run)
                await self.curves(run.id)

    async def curves(self, run_id: str) -> Curves:
        quick = await self.cache.get(("steps", run_id), lambda: self._step_points(run_id))
        reward = await self.cache.get(("reward", run_id), lambda: self._reward_points(run_id), may_be_stale=_is_long)
        return Curves(window=REWARD_WINDOW, reward=reward, steps=quick.steps, rate=quick.rate)

    async def sessions_by_training(self) -> dict[str, dict[str, int]]:
        """Count sessions by run and training state; current unless the store is large. Runs without sessions are
        omitted."""
        totals = await self.totals.by_run(fresh=True)
        return {run_id: of_run.sessions for run_id, of_run in totals.items()}

    async def summary(self, run: AnyRow) -> RunSummary:
        """Return a run's summary: current values of its row, figures from the cache."""
        recent = await self.cache.get(("recent", run.id), lambda: self._recent(run.id))
        # Last, as it may start a background count that would compete with the other queries.
        totals = await self.totals.of_run(run.id)
        step = recent.newest_step
        rewards = [reward for _, reward in recent.rewards]
        return RunSummary(
            id=run.id,
            name=run.name,
            project=run.project,
            state=run.state,
            base_model=run.base_model,
            created_at=run.created_at,
            head_version=run.head_version,
            serving_version=run.serving_version,
            sessions={state.value: totals.sessions.get(state, 0) for state in TrainingState},
            session_count=totals.session_count,
            open_sessions=recent.open_sessions,
            turn_count=totals.turns,
            swaps=totals.swaps,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            reward_count=len(rewards),
            staleness_mean=step.staleness_mean if step is not None else None,
            staleness_max=step.staleness_max if step is not None else None,
            tokens_per_second=recent.tokens_per_second,
            late_rewards=recent.late_rewards,
            revised_sessions=recent.revised_sessions,
            inexact_share=recent.inexact_share,
            unattributed_share=recent.unattributed_share,
            cut_share=recent.cut_share,
            last_activity_at=totals.last_activity_at,
            begun_from=begun_from(run),
            not_learnt_because=why_not_learnt(self._learning_facts(run, recent, totals)),
        )

    def _learning_facts(self, run: AnyRow, recent: _Recent, totals: RunTotals) -> LearningFacts:
        asked = self._asked.find(run.id)
        seen = [at for at in (recent.trainer_seen_at, asked.at if asked is not None else None) if at is not None]
        lease = RunSettings.model_validate(run.config).lease_seconds
        return LearningFacts(
            state=run.state,
            head_version=run.head_version,
            sessions=totals.sessions,
            open_sessions=recent.open_sessions,
            rewards=recent.rewards,
            learning_rates=recent.learning_rates,
            trainer_seen=bool(seen) and self._clock() - max(seen) <= max(lease, _LONGEST_WAIT),
            wanted=asked.want if asked is not None else None,
            has_weights=self._has_weights,
            cut_share=recent.cut_share,
        )

    async def _recent(self, run_id: str) -> _Recent:
        rate = await self._rate(run_id)
        newest = await self._database.read(
            lambda connection: StepOverviewRepository(connection).version_times(run_id, 1)
        )
        steps = await self.facts_of(run_id, [row.version for row in newest if row.version > 0])

        def read(connection: Connection) -> _Recent:
            repository = OverviewRepository(connection)
            turns = repository.recent_turns(run_id, _RECENT_SESSIONS)
            continuations = _sums((row.continuation, row.turns) for row in turns)
            continued = sum(count for kind, count in continuations.items() if kind != "new")
            attributions = _sums((row.attributed_by, row.turns) for row in turns)
            recorded = sum(attributions.values())
            ends = _sums((row.finish_reason, row.turns) for row in turns if row.state != TurnState.FAILED.value)
            answered = sum(ends.values())
            return _Recent(
                rewards=repository.last_rewards(run_id, REWARD_WINDOW),
                learning_rates=StepOverviewRepository(connection).learning_rates(run_id, ENOUGH_STEPS),
                trainer_seen_at=mark.created_at if (mark := repository.trainer_marks(run_id)) else None,
                open_sessions=repository.open_sessions(run_id),
                newest_step=next(iter(steps.values()), None),
                inexact_share=1.0 - continuations.get("exact", 0) / continued if continued else None,
                unattributed_share=attributions.get("new", 0) / recorded if recorded else None,
                cut_share=ends.get(FinishReason.LENGTH.value, 0) / answered if answered else None,
                late_rewards=repository.late_rewards(run_id),
                revised_sessions=LedgerRepository(connection).revised_count(run_id),
                tokens_per_second=rate.last_minute(self._clock()),
            )

        return await self._database.read(read)

    async def _rate(self, run_id: str) -> RateHistory:
        rate = self._rates.setdefault(run_id, RateHistory(run_id))
        await rate.update(self._database, self._clock())
        return rate

    async def _reward_points(self, run_id: str) -> tuple[RewardPoint, ...]:
        totals = await self.totals.of_run(run_id)
        stride = bucket_stride(totals.session_count)
        buckets = await self._database.read(
            lambda connection: OverviewRepository(connection).reward_buckets(run_id, stride)
        )
        return reward_points([(row.sessions, row.at, row.total) for row in buckets], REWARD_WINDOW)

    async def _step_points(self, run_id: str) -> _Steps:
        rate = await self._rate(run_id)
        times = await self._database.read(
            lambda connection: StepOverviewRepository(connection).version_times(run_id, _STEP_POINTS)
        )
        facts = await self.facts_of(run_id, [row.version for row in times])
        return _Steps(
            steps=tuple(
                StepPoint(
                    version=row.version,
                    at=row.created_at,
                    served_at=row.served_at,
                    staleness_mean=facts[row.version].staleness_mean,
                    staleness_max=facts[row.version].staleness_max,
                    swap_seconds=row.swap_seconds,
                    reward_mean=facts[row.version].reward_mean,
                )
                for row in reversed(times)
                if row.version in facts  # a run without history may be deleted between the two reads
            ),
            rate=rate.points(self._clock()),
        )

    async def facts_of(self, run_id: str, versions: Sequence[int]) -> dict[int, StepFacts]:
        """Return facts by version. Each audit is read once, as it never changes after the commit."""
        known = {version: self._facts.get((run_id, version)) for version in versions}
        found = {version: facts for version, facts in known.items() if facts is not None}
        unknown = [version for version in versions if version not in found]
        for start in range(0, len(unknown), _AUDITS_AT_ONCE):
            read = partial(_audits, run_id, unknown[start : start + _AUDITS_AT_ONCE])
            audits = await self._database.read(read)
            for version, audit in audits.items():
                found[version] = stored_step_facts(audit)
                self._facts.put((run_id, version), found[version])
        return found


def _audits(run_id: str, versions: Sequence[int], connection: Connection) -> dict[int, str]:
    return StepOverviewRepository(connection).audits(run_id, versions)


def _sums(counted: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for kind, count in counted:
        sums[kind] = sums.get(kind, 0) + count
    return sums
