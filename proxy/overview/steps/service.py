"""Views of single steps, from the rows of their commit and claims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from proxy.contract.arrays import unpack_ids, unpack_logprobs
from proxy.contract.claim import TrajectoryAudit
from proxy.contract.step import StepInputs
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import NotFound
from proxy.overview.rewards.assembly import subject_of
from proxy.overview.sessions.assembly import TokenText, TokenTextOf, decoder_of
from proxy.overview.steps.assembly import audit_of, step_facts, step_item
from proxy.overview.steps.repository import StepOverviewRepository
from proxy.overview.steps.views import AuditedTurn, StepTokens, StepTrajectory, StepView, UsedReward

# exp(710) overflows a float.
_LARGEST_EXPONENT = 700.0


class StepOverview:
    """Reads steps of all runs. `token_text` finds the decoder of a run; None if the
    proxy cannot decode."""

    def __init__(self, database: Database, token_text: TokenTextOf | None) -> None:
        self._database = database
        self._token_text = token_text

    async def step(self, run_id: str, run_name: str, version: int) -> StepView:
        """Return a step with its batch. Raise NotFound."""

        def read(connection: Connection) -> tuple[AnyRow, dict[str, AnyRow], list[AnyRow], set[str]]:
            repository = StepOverviewRepository(connection)
            row = repository.version(run_id, version)
            if row is None:
                raise NotFound(f"the run {run_name!r} has no version {version}")
            handed_out = {each.session_id: each for each in repository.handed_out(row.claim_ids)}
            ledger = repository.rewards_of(list(handed_out))
            return row, handed_out, ledger, repository.sampled(run_id, version)

        row, handed_out, ledger, sampled = await self._database.read(read)
        rewards = _used(handed_out, ledger)
        inputs = None if row.inputs is None else msgspec.convert(row.inputs, StepInputs)
        audit = audit_of(row.audit)
        trajectories = tuple(
            _trajectory(entry, handed_out.get(entry.session_id), rewards, inputs, entry.session_id in sampled)
            for entry in audit
        )
        return StepView(
            step=step_item(row, step_facts(audit)),
            run=run_name,
            config_hash=row.config_hash,
            seed=row.seed,
            claim_ids=tuple(row.claim_ids),
            trajectories=trajectories,
            rewards_revised=sum(entry.revised for entry in trajectories),
            inputs=inputs,
        )

    async def tokens(self, run_id: str, run_name: str, version: int) -> StepTokens:
        """Return the audited tokens of a step. Raise NotFound."""

        def read(connection: Connection) -> list[AnyRow]:
            repository = StepOverviewRepository(connection)
            if repository.version(run_id, version) is None:
                raise NotFound(f"the run {run_name!r} has no version {version}")
            return repository.tokens(run_id, version)

        rows = await self._database.read(read)
        text = await decoder_of(self._token_text, run_id)
        return StepTokens(version=version, turns=tuple(_audited_turn(row, text) for row in rows))


def _audited_turn(row: AnyRow, text: TokenText | None) -> AuditedTurn:
    logprobs, engine = unpack_logprobs(row.logprobs), unpack_logprobs(row.engine_logprobs)
    ids = unpack_ids(row.output_ids) if row.output_ids is not None else None
    if ids is not None and len(ids) != len(logprobs):  # the turn was erased
        ids = None
    return AuditedTurn(
        session_id=row.session_id,
        turn_id=row.turn_id,
        ordinal=row.ordinal,
        output_ids=ids,
        texts=tuple(map(text, ids)) if ids is not None and text is not None else None,
        logprobs=logprobs,
        engine_logprobs=engine,
        ratios=tuple(
            math.exp(min(mine - its, _LARGEST_EXPONENT)) for mine, its in zip(logprobs, engine, strict=True)
        ),
        advantages=unpack_logprobs(row.advantages),
        staleness=unpack_ids(row.staleness),
        clipped=tuple(map(bool, row.clipped)),
    )


def _trajectory(
    audit: TrajectoryAudit,
    session: AnyRow | None,
    rewards: Mapping[str, tuple[UsedReward, ...]],
    inputs: StepInputs | None,
    sampled: bool,
) -> StepTrajectory:
    if session is None:
        return StepTrajectory(audit=audit, reward_now=None, revised=False, sampled=sampled)
    return StepTrajectory(
        audit=audit,
        reward_now=session.reward_now,
        revised=session.revised_at is not None,
        claim_id=session.claim_id,
        kept=inputs is not None and session.claim_id != inputs.trained_claim,
        group_id=session.group_id,
        group=session.group_name,
        task=session.task,
        external_id=session.external_id,
        sampled=sampled,
        rewards=rewards[session.session_id],
    )


def _used(sessions: Mapping[str, AnyRow], ledger: Sequence[AnyRow]) -> dict[str, tuple[UsedReward, ...]]:
    """Return by session, in order of arrival, the entries that were trained on, each with its current value."""
    standing = {subject_of(entry): entry for entry in ledger}
    entries: dict[str, list[UsedReward]] = {session_id: [] for session_id in sessions}
    for entry in _handed_out(sessions, ledger):
        now = standing[subject_of(entry)]
        entries[entry.session_id].append(
            UsedReward(
                id=entry.id,
                turn_id=entry.turn_id,
                name=entry.name,
                source=entry.source,
                value=entry.value,
                value_now=None if now.id == entry.id else now.value,
            )
        )
    return {session_id: tuple(used) for session_id, used in entries.items()}


def _handed_out(sessions: Mapping[str, AnyRow], ledger: Iterable[AnyRow]) -> Iterable[AnyRow]:
    used = {session_id: set(session.reward_ids) for session_id, session in sessions.items()}
    return (entry for entry in ledger if entry.id in used[entry.session_id])
