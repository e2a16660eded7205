"""Builds views of sessions and turns from rows, without I/O."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.contract.arrays import unpack_ids, unpack_logprobs
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import SamplingParameters, TurnPlace, TurnState, VersionSpan
from proxy.database.rows import AnyRow
from proxy.lifecycle.audits import SessionAudit
from proxy.lifecycle.outcomes import TurnFacts, explanation, standing_of, untrained_turns
from proxy.overview.sessions.views import JudgementView, SessionItem, Trained, TurnTokens, TurnView
from proxy.turns.answers import answer_message

# Returns the text of a token id.
TokenText = Callable[[int], str]
# Returns the text of a token id by the tokenizer of a run; None if that cannot be loaded.
TokenTextOf = Callable[[str], Awaitable[TokenText | None]]


async def decoder_of(token_text: TokenTextOf | None, run_id: str) -> TokenText | None:
    """Return what decodes the tokens of a run; None without a tokenizer."""
    return None if token_text is None else await token_text(run_id)


def session_item(row: AnyRow, *, teaches: bool, skipped: str | None = None) -> SessionItem:
    """Build the view of a session. `teaches`: at least one of its turns can be trained. `skipped` is the reason why
    the step that consumed it learnt nothing from it."""
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
        answer=answer_message(row.response),
        request=row.request,
        tokens=tokens,
        masked=tuple((start, end) for start, end in row.masked or ()),
        failure=_failure_of(row.response),
    )


def _sampling(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters, including those that the store omits because they have the default value."""
    parameters = msgspec.convert(stored, SamplingParameters)
    return {name: msgspec.to_builtins(getattr(parameters, name)) for name in SamplingParameters.__struct_fields__}


def _failure_of(response: Mapping[str, Any]) -> str | None:
    match response:
        case {"choices": [{"failure": str() as failure}, *_]}:
            return failure
    return None


def trained(session: SessionItem, trainings: Sequence[AnyRow]) -> Trained | None:
    """Return the reward that the consuming step trained on; None for a session that was not consumed."""
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
    """Return by turn id why turns are not trained. `audit` is the session's audit in the step that consumed it."""
    facts = [
        TurnFacts(
            place=TurnPlace(turn.id, turn.parent_id, turn.prefix_tokens, turn.prompt_tokens, TurnState(turn.state)),
            is_greedy=turn.sampling["temperature"] == 0.0,
        )
        for turn in turns
    ]
    return untrained_turns(facts, Purpose(purpose), audit.reasons if audit is not None else {})


def judgement_view(row: AnyRow) -> JudgementView:
    return JudgementView(
        judge=row.judge,
        fingerprint=row.fingerprint,
        turn_id=row.turn_id,
        reward_id=row.reward_id,
        score=row.score,
        spread=row.spread,
        votes=tuple(row.votes or ()),
        invalid_votes=row.invalid_votes,
        is_cut=row.is_cut,
        error=row.error,
        created_at=row.created_at,
    )
