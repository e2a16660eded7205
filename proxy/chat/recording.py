"""Turns into the store, one for every choice of a call, and the answer as it was recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.chat.call import Answer, Choice, Dialect, StreamHead
from proxy.chat.capture import CallPlan, Capture
from proxy.chat.models import ServedModel
from proxy.chat.observer import TurnObserver
from proxy.clock import Clock
from proxy.contract.turn import Turn, TurnState
from proxy.errors import Conflict, EngineFailed
from proxy.sessions.identification import SessionContext
from proxy.tokens.canonical import extend_hash
from proxy.trajectories.service import TrajectoryStore, TurnRecord


class CallContext(msgspec.Struct, frozen=True, kw_only=True):
    """What recording the turns of a call needs to know beside their plans."""

    dialect: Dialect
    served: ServedModel
    session: SessionContext
    idempotency_key: str | None


class TurnRecorder:
    """Records what was generated."""

    def __init__(self, trajectories: TrajectoryStore, clock: Clock, observer: TurnObserver | None) -> None:
        self._trajectories = trajectories
        self._clock = clock
        self._observer = observer

    async def record(self, context: CallContext, ended: Sequence[tuple[Capture, TurnState]]) -> Answer:
        """Commits the turns. Raises EngineFailed, the turn recorded as failed, when its tokens are nobody's."""
        if len(ended) == 1:
            choices = [await self._record_choice(context, *ended[0])]
        else:
            choices = await asyncio.gather(*(self._record_choice(context, *one) for one in ended))
        return _answer(stream_head([capture.plan for capture, _ in ended]), context, tuple(choices))

    async def _record_choice(self, context: CallContext, capture: Capture, state: TurnState) -> Choice:
        now = self._clock()
        if state is TurnState.FAILED or capture.finish is None:
            return await self._commit(context, capture, capture.turn_without_tokens(state, now))
        try:
            turn = capture.turn(state, now)
        except EngineFailed:
            await self._commit(context, capture, capture.turn_without_tokens(TurnState.FAILED, now))
            raise
        return await self._commit(context, capture, turn)

    async def _commit(self, context: CallContext, capture: Capture, turn: Turn) -> Choice:
        plan = capture.plan
        choice = _choice(capture, turn)
        conversation_hash = plan.prompt.request_hash
        if turn.output_ids:
            conversation_hash = extend_hash(conversation_hash, _reply(capture))
        keyed = turn.state is TurnState.COMPLETE and plan.choice == 0
        record = TurnRecord(
            turn=turn,
            run_id=plan.run_id,
            attributed_by=context.session.attributed_by.value,
            conversation_hash=conversation_hash,
            tools_hash=plan.prompt.tools_hash,
            idempotency_key=context.idempotency_key if keyed else None,
            prompt_token_count=len(plan.prompt.plan.input_ids),
            messages=plan.prompt.messages,
            request=plan.call.body,
            response=msgspec.to_builtins(_answer(stream_head([plan]), context, (choice,))),
        )
        try:
            await self._trajectories.record(record)
        except Conflict:  # another process answered this Idempotency-Key meanwhile; this turn was generated as well
            await self._trajectories.record(msgspec.structs.replace(record, idempotency_key=None))
        if self._observer is not None:
            self._observer.turn_finished(
                turn,
                attributed_by=context.session.attributed_by.value,
                prompt_tokens=record.prompt_token_count,
                dialect=context.dialect.name,
            )
        return choice


def stream_head(plans: Sequence[CallPlan]) -> StreamHead:
    """What is known of the answer that these plans lead to."""
    first = plans[0]
    return StreamHead(
        turn_id=first.turn_id,
        session_id=first.session_id,
        model=first.call.model,
        created=int(first.started_at),
        prompt_tokens=len(first.prompt.plan.input_ids),
        cached_tokens=first.prompt.plan.prefix_tokens,
        choices=len(plans),
    )


def _reply(capture: Capture) -> dict[str, Any]:
    """The answer as the message that clients send back."""
    calls = [{"function": {"name": made.call.name, "arguments": made.call.arguments}} for made in capture.calls]
    return {"role": "assistant", "content": capture.text, "tool_calls": calls}


def _choice(capture: Capture, turn: Turn) -> Choice:
    return Choice(
        turn_id=turn.id,
        text=capture.text,
        tool_calls=tuple(capture.calls),
        finish_reason=capture.finish_reason(),
        completion_tokens=capture.token_count,
        version=max((span.version for span in turn.spans), default=None),
        logprobs=tuple(capture.token_logprobs) if capture.plan.call.logprobs else None,
    )


def _answer(head: StreamHead, context: CallContext, choices: tuple[Choice, ...]) -> Answer:
    return Answer(
        turn_id=head.turn_id,
        session_id=head.session_id,
        model=head.model,
        run_name=context.served.run.name,
        created=head.created,
        prompt_tokens=head.prompt_tokens,
        cached_tokens=head.cached_tokens,
        choices=choices,
    )
