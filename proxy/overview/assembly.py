"""Build views from rows, without I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from sqlalchemy import Row

from proxy.contract.arrays import unpack_ids, unpack_logprobs
from proxy.contract.claim import TrajectoryAudit
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import SamplingParameters, TurnPlace, TurnState, VersionSpan
from proxy.database.audits import SessionAudit
from proxy.database.weights import weights_of
from proxy.lifecycle.outcomes import TurnFacts, explanation, standing_of, untrained_turns
from proxy.overview.views import (
    EventItem,
    RewardPoint,
    SessionItem,
    StepItem,
    Trained,
    TurnTokens,
    TurnView,
)

AnyRow = Row[*tuple[Any, ...]]
TokenText = Callable[[int], str]
"""The text of a token id."""

_MAX_BUCKETS = 400


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A step's audit in numbers. None where nothing was trained."""

    trajectories: int
    trained_tokens: int
    reward_mean: float | None
    staleness_mean: float | None
    staleness_max: int | None


def session_item(row: AnyRow, *, teaches: bool, skipped: str | None = None) -> SessionItem:
    """Build the view of a session. `teaches`: at least one of its turns can be trained. `skipped` is why the step
    that consumed it learnt nothing from it."""
    standing = standing_of(row, teaches=teaches, skipped=skipped)
    return SessionItem(
        id=row.id,
        run_id=row.run_id,
        external_id=row.external_id,
        attempt=row.attempt if row.external_id is not None else None,
        task=row.task,
        group_id=row.group_id,
        group=row.group_name,
        purpose=row.purpose,
        state=row.state,
        training=row.training,
        explanation=explanation(standing),
        outcome=row.outcome,
        end_reason=row.end_reason,
        attributed_by=row.attributed_by,
        turn_count=row.turn_count,
        reward=row.reward,
        oldest_version=row.oldest_version,
        newest_version=row.newest_version,
        consumed_by=row.consumed_by,
        revised_at=row.revised_at,
        created_at=row.created_at,
        last_active_at=row.last_active_at,
        ended_at=row.ended_at,
        erased_at=row.erased_at,
        erased_reason=row.erased_reason,
    )


def turn_view(row: AnyRow, *, with_tokens: bool, text: TokenText | None) -> TurnView:
    logprobs = unpack_logprobs(row.output_logprobs)
    tokens = None
    if with_tokens:
        output_ids = unpack_ids(row.output_ids)
        tokens = TurnTokens(
            prompt_ids=unpack_ids(row.prompt_ids),
            output_ids=output_ids,
            output_logprobs=logprobs,
            output_texts=tuple(map(text, output_ids)) if text is not None else None,
        )
    return TurnView(
        id=row.id,
        session_id=row.session_id,
        run_id=row.run_id,
        ordinal=row.ordinal,
        parent_id=row.parent_id,
        state=row.state,
        attributed_by=row.attributed_by,
        continuation=row.continuation,
        finish_reason=row.finish_reason,
        prompt_tokens=row.prompt_token_count,
        prefix_tokens=row.prefix_tokens,
        output_tokens=len(logprobs),
        spans=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in row.spans),
        sampling=_sampling(row.sampling),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        started_at=row.started_at,
        first_token_at=row.first_token_at,
        finished_at=row.finished_at,
        messages=tuple(message for message in row.messages if isinstance(message, dict)),
        answer=answer_of(row.response),
        request=row.request,
        tokens=tokens,
        masked=tuple((start, end) for start, end in row.masked or ()),
        failure=_failure_of(row.response),
    )


def _sampling(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter: the store leaves out what is as it is by default."""
    parameters = msgspec.convert(stored, SamplingParameters)
    return {name: msgspec.to_builtins(getattr(parameters, name)) for name in SamplingParameters.__struct_fields__}


def answer_of(response: Mapping[str, Any]) -> dict[str, Any] | None:
    """A recorded answer as a message in the shape of chat completions; None where there is none."""
    match response:
        case {"choices": [{"text": str()} as choice, *_]}:
            return _answer_message(choice)
    return None


def _failure_of(response: Mapping[str, Any]) -> str | None:
    match response:
        case {"choices": [{"failure": str() as failure}, *_]}:
            return failure
    return None


def _answer_message(choice: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.get("text", "")}
    if choice.get("reasoning"):
        message["reasoning_content"] = choice["reasoning"]
    if choice.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": made["id"],
                "type": "function",
                "function": {"name": made["call"]["name"], "arguments": made["call"]["arguments"]},
            }
            for made in choice["tool_calls"]
        ]
    return message


def trained(session: SessionItem, trainings: Sequence[AnyRow]) -> Trained | None:
    """Return what the consuming step was given; None for a session that was not consumed."""
    if session.consumed_by is None:
        return None
    claim = next((training for training in trainings if training.version == session.consumed_by), None)
    return Trained(
        version=session.consumed_by,
        claim_id=claim.claim_id if claim is not None else None,
        reward_then=claim.reward if claim is not None else None,
        reward_now=session.reward,
        revised=session.revised_at is not None,
    )


def untrained(turns: Sequence[TurnView], purpose: str, audit: SessionAudit | None) -> dict[str, str]:
    """Return why turns of a session are not trained, by their ids. `audit` is that of the step that consumed it."""
    facts = [
        TurnFacts(
            place=TurnPlace(turn.id, turn.parent_id, turn.prefix_tokens, turn.prompt_tokens, TurnState(turn.state)),
            is_greedy=turn.sampling["temperature"] == 0.0,
        )
        for turn in turns
    ]
    return untrained_turns(facts, Purpose(purpose), audit.reasons if audit is not None else {})


def audit_of(stored: Sequence[Any]) -> tuple[TrajectoryAudit, ...]:
    """Numbers that were not finite are null in the store."""
    return tuple(msgspec.convert({**_UNKNOWN, **_told(entry)}, TrajectoryAudit) for entry in stored)


def _told(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if value is not None}


_UNKNOWN = {field.name: math.nan for field in msgspec.structs.fields(TrajectoryAudit) if field.type is float}


class _Audited(Protocol):
    """The fields of an audit that `step_facts` reads."""

    @property
    def reward(self) -> float: ...
    @property
    def trained_tokens(self) -> int: ...
    @property
    def staleness_mean(self) -> float: ...
    @property
    def staleness_max(self) -> int: ...


class _AuditFigures(msgspec.Struct, frozen=True):
    """These fields of a stored audit alone: hundreds of steps are decoded at once."""

    trained_tokens: int
    staleness_max: int
    stored_reward: float | None = msgspec.field(name="reward", default=None)
    stored_staleness: float | None = msgspec.field(name="staleness_mean", default=None)

    @property
    def reward(self) -> float:
        return math.nan if self.stored_reward is None else self.stored_reward

    @property
    def staleness_mean(self) -> float:
        return math.nan if self.stored_staleness is None else self.stored_staleness


_AUDIT_FIGURES = msgspec.json.Decoder(tuple[_AuditFigures, ...])


def stored_step_facts(audit: str) -> StepFacts:
    """Return the facts of a step from its audit as stored JSON."""
    return step_facts(_AUDIT_FIGURES.decode(audit))


def step_facts(audit: Sequence[_Audited]) -> StepFacts:
    """Staleness is weighted by trained tokens, rewards by trajectory."""
    tokens = sum(entry.trained_tokens for entry in audit)
    taught = [entry for entry in audit if entry.trained_tokens > 0]
    weighted = sum(entry.staleness_mean * entry.trained_tokens for entry in taught)
    return StepFacts(
        trajectories=len(audit),
        trained_tokens=tokens,
        reward_mean=sum(entry.reward for entry in audit) / len(audit) if audit else None,
        staleness_mean=weighted / tokens if tokens else None,
        staleness_max=max((entry.staleness_max for entry in taught), default=None),
    )


def step_item(row: AnyRow, facts: StepFacts) -> StepItem:
    return StepItem(
        version=row.version,
        parent_version=row.parent_version,
        state=row.state,
        created_at=row.created_at,
        served_at=row.served_at,
        swap_seconds=row.swap_seconds,
        weights=weights_of(row, with_files=False),
        trajectories=facts.trajectories,
        trained_tokens=facts.trained_tokens,
        reward_mean=facts.reward_mean,
        staleness_mean=facts.staleness_mean,
        staleness_max=facts.staleness_max,
        metrics=row.metrics,
        weights_removed_at=row.weights_removed_at,
        rejected_because=row.rejected_because,
    )


def event_item(row: AnyRow) -> EventItem:
    return EventItem(id=row.id, kind=row.kind, data=row.data, created_at=row.created_at)


def bucket_stride(sessions: int) -> int:
    """Sessions per point of the reward curve: a power of two, so that points stay where they are as a run grows."""
    stride = 1
    while sessions > stride * _MAX_BUCKETS:
        stride *= 2
    return stride


def reward_points(buckets: Sequence[tuple[int, float, float]], window: int) -> tuple[RewardPoint, ...]:
    """`buckets` are (sessions, at, sum of rewards), oldest first. The moving mean is over the buckets that reach
    back `window` sessions: all sessions there were at first, one bucket at least."""
    points: list[RewardPoint] = []
    first, inside, total, so_far = 0, 0, 0.0, 0
    for count, at, reward in buckets:
        inside, total, so_far = inside + count, total + reward, so_far + count
        while inside - buckets[first][0] >= window:
            inside, total, first = inside - buckets[first][0], total - buckets[first][2], first + 1
        points.append(RewardPoint(sessions=so_far, at=at, mean=reward / count, moving_mean=total / inside))
    return tuple(points)
