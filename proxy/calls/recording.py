"""Record the turns of a call, one for every choice, and make the answer from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.calls.call import STORE_UNAVAILABLE, Answer, Choice, Dialect, StreamHead
from proxy.calls.capture import CallPlan, Capture
from proxy.calls.models import ServedModel
from proxy.calls.observer import TurnObserver
from proxy.calls.runtime import ModelRuntime
from proxy.clock import Clock
from proxy.contract.identifiers import TurnId
from proxy.contract.turn import Turn, TurnState
from proxy.errors import Conflict, StoreUnavailable
from proxy.sessions.growing import LonePrompt
from proxy.sessions.identification import SessionContext
from proxy.sessions.service import SessionService
from proxy.tokens.canonical import extend_hash, without_thought
from proxy.turns.service import TrajectoryStore, TurnRecord


class CallContext(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a call that its turns are recorded with, in addition to their plans."""

    dialect: Dialect
    served: ServedModel
    runtime: ModelRuntime
    session: SessionContext
    idempotency_key: str | None
    users: tuple[bytes, ...] = ()
    lone_prompt: LonePrompt | None = None
    unrecorded: str | None = None
    """The reason to record nothing of the call, if that was decided before it began."""
    warnings: tuple[str, ...] = ()
    """Warnings for the client that do not follow from its request alone: they are recorded with the answer."""


class TurnRecorder:
    """Commits the turns of a call before its answer is sent."""

    def __init__(
        self,
        trajectories: TrajectoryStore,
        sessions: SessionService,
        clock: Clock,
        observer: TurnObserver | None,
        *,
        serves_unrecorded: bool = False,
    ) -> None:
        """`serves_unrecorded`: answer also when the store cannot record the turns."""
        self._serves_unrecorded = serves_unrecorded
        self._trajectories = trajectories
        self._sessions = sessions
        self._clock = clock
        self._observer = observer

    async def record(self, context: CallContext, ended: Sequence[tuple[Capture, TurnState]]) -> Answer:
        """Commit the turns, all or none, and return the answer as it was recorded."""
        now = self._clock()
        turns = [_turn(capture, state, now) for capture, state in ended]
        captures = [capture for capture, _ in ended]
        choices = [_choice(capture, turn) for capture, turn in zip(captures, turns, strict=True)]
        answers = [_answer(context, [capture], [choice]) for capture, choice in zip(captures, choices, strict=True)]
        unrecorded = await self._committed(context, captures, turns, answers)
        answer = answers[0] if len(answers) == 1 else _answer(context, captures, choices)
        return answer if unrecorded is None else msgspec.structs.replace(answer, unrecorded=unrecorded)

    async def _committed(
        self, context: CallContext, captures: Sequence[Capture], turns: Sequence[Turn], answers: Sequence[Answer]
    ) -> str | None:
        """Commit the turns. Return None, or the reason why an answer is given although they are not recorded."""
        unrecorded = context.unrecorded
        if unrecorded is None:
            try:
                await self._commit(context, captures, turns, answers)
            except StoreUnavailable:
                if not self._serves_unrecorded:
                    raise
                unrecorded = STORE_UNAVAILABLE
        if unrecorded is not None and self._observer is not None:
            self._observer.call_unrecorded(reason=unrecorded, dialect=context.dialect.name)
        return unrecorded

    async def _commit(
        self, context: CallContext, captures: Sequence[Capture], turns: Sequence[Turn], answers: Sequence[Answer]
    ) -> None:
        siblings = tuple(turn.id for turn in turns[1:])
        records = [
            _record(context, capture, turn, _ending(context.runtime, capture, turn), answer)
            for capture, turn, answer in zip(captures, turns, answers, strict=True)
        ]
        if siblings:
            answer = _answer(context, captures, answers[0].choices, siblings)
            records[0] = msgspec.structs.replace(records[0], response=msgspec.to_builtins(answer))
        if all(turn.state is TurnState.COMPLETE for turn in turns):
            records[0] = msgspec.structs.replace(records[0], idempotency_key=context.idempotency_key)
        if context.runtime.redactor is not None:
            records = await context.runtime.redactor.redacted(records)
        seen_at = self._sessions.as_of_now()
        try:
            is_open = await self._trajectories.record(*records)
        except Conflict:
            # Another process answered this Idempotency-Key meanwhile. These turns were generated too, so they are
            # recorded, without the key.
            records[0] = msgspec.structs.replace(records[0], idempotency_key=None)
            is_open = await self._trajectories.record(*records)
        for capture, record in zip(captures, records, strict=True):
            if record.turn.state is not TurnState.FAILED:
                self._sessions.answered(
                    context.session,
                    record.conversation_hash,
                    settled_hash=record.settled_hash,
                    lone_prompt=context.lone_prompt,
                    answer=without_thought(capture.text),
                    turn_id=record.turn.id,
                    seen_open=seen_at if is_open else None,
                )
            if self._observer is not None:
                self._observer.turn_finished(
                    record.turn,
                    attributed_by=record.attributed_by,
                    prompt_tokens=record.prompt_token_count,
                    dialect=context.dialect.name,
                )


def stream_head(plans: Sequence[CallPlan], context: CallContext) -> StreamHead:
    """Return the part of the answer that is known before anything is generated."""
    first = plans[0]
    prompt_tokens, cached_tokens = len(first.prompt.plan.input_ids), first.prompt.plan.prefix_tokens
    if len(plans) > 1:
        # Choices of one prompt share it, and it is counted once.
        prompts = {id(plan.prompt): plan.prompt.plan for plan in plans}.values()
        prompt_tokens = sum(len(prompt.input_ids) for prompt in prompts)
        cached_tokens = sum(prompt.prefix_tokens for prompt in prompts)
    return StreamHead(
        turn_id=first.turn_id,
        session_id=first.session_id,
        model=first.call.model,
        created=int(first.started_at),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        choices=len(plans),
        unrecorded=context.unrecorded,
        attempt=context.session.attempt,
        warnings=context.warnings,
    )


def _ending(runtime: ModelRuntime, capture: Capture, turn: Turn) -> bytes:
    """Return the conversation hash by which a call that continues this turn is recognised."""
    prompt = capture.plan.prompt
    if not turn.output_ids:
        return prompt.request_hash
    if prompt.raw is None:
        return extend_hash(prompt.request_hash, _reply(capture))
    completion = prompt.raw.answered(capture.text, turn.output_ids, turn.sampling.stop_token_ids)
    runtime.completions.keep(completion)
    return completion.digest


def _turn(capture: Capture, state: TurnState, now: float) -> Turn:
    if state is TurnState.FAILED or capture.finish is None:
        return capture.turn_without_tokens(state, now)
    return capture.turn(state, now)


def _record(context: CallContext, capture: Capture, turn: Turn, ending: bytes, answer: Answer) -> TurnRecord:
    plan, prompt = capture.plan, capture.plan.prompt
    return TurnRecord(
        turn=turn,
        run_id=plan.run_id,
        attributed_by=context.session.attributed_by.value,
        conversation_hash=ending,
        settled_hash=_settled(capture, turn),
        tools_hash=prompt.tools_hash,
        idempotency_key=None,
        prompt_token_count=len(prompt.plan.input_ids),
        prompt_ids=prompt.plan.input_ids,
        messages=prompt.messages,
        request=plan.call.body,
        response=msgspec.to_builtins(answer),
        users=context.users,
    )


def _settled(capture: Capture, turn: Turn) -> bytes | None:
    """Return the conversation hash without the last message, if the next request may leave that message out."""
    settled = capture.plan.prompt.settled_hash
    return extend_hash(settled, _reply(capture)) if settled is not None and turn.output_ids else None


def _reply(capture: Capture) -> dict[str, Any]:
    """Return the answer as the message that clients send back, including its prefill."""
    calls = [{"function": {"name": made.call.name, "arguments": made.call.arguments}} for made in capture.calls]
    return {"role": "assistant", "content": capture.plan.call.prefill + capture.text, "tool_calls": calls}


def _choice(capture: Capture, turn: Turn) -> Choice:
    return Choice(
        turn_id=turn.id,
        text=capture.text,
        reasoning=capture.reasoning,
        reasoning_tokens=capture.reasoning_tokens,
        tool_calls=tuple(capture.calls),
        finish_reason=capture.finish_reason(),
        completion_tokens=capture.token_count,
        version=max((span.version for span in turn.spans), default=None),
        stopped_by=capture.stopped_by,
        completed=int(turn.finished_at),
        logprobs=tuple(capture.token_logprobs) if capture.plan.call.logprobs else None,
        failure=capture.failure,
    )


def _answer(
    context: CallContext,
    captures: Sequence[Capture],
    choices: Sequence[Choice],
    siblings: tuple[TurnId, ...] = (),
) -> Answer:
    head = stream_head([capture.plan for capture in captures], context)
    return Answer(
        turn_id=head.turn_id,
        session_id=head.session_id,
        model=head.model,
        run_name=context.served.run.name,
        created=head.created,
        prompt_tokens=head.prompt_tokens,
        cached_tokens=head.cached_tokens,
        choices=tuple(choices),
        siblings=siblings,
        attempt=context.session.attempt,
        warnings=context.warnings,
    )
