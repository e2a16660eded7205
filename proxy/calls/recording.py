"""Record the turns of a call, one for every choice, and make the answer from them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
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
from proxy.lifecycle.judging import Comparison
from proxy.limits.service import Admission
from proxy.sessions.growing import LonePrompt
from proxy.sessions.identification import SessionContext
from proxy.sessions.service import SessionService
from proxy.tokens.canonical import HASH_BYTES, extend_hash, without_thought
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
    admission: Admission | None = None
    """The admission by the limits that bind the call; None without limits."""


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
        choices = [_ended_choice(context, capture, state, now) for capture, state in ended]
        unrecorded = await self._committed(context, choices)
        answer = choices[0].answer if len(choices) == 1 else _whole_answer(context, choices)
        return answer if unrecorded is None else msgspec.structs.replace(answer, unrecorded=unrecorded)

    async def record_shadow(
        self, context: CallContext, capture: Capture, *, of: TurnId, comparison: Comparison | None
    ) -> None:
        """Commit a shadow answer beside the answer `of` to the same prompt, and with it that judges will compare
        both, if there are such judges."""
        choice = _ended_choice(context, capture, TurnState.SHADOW, self._clock())
        records = [msgspec.structs.replace(_record(context, choice), shadow_of=of)]
        if context.runtime.redactor is not None:
            records = await context.runtime.redactor.redacted(records)
        await self._trajectories.record(*records, comparison=comparison)
        self._observe(context, records[0])

    async def unseen(self, context: CallContext, capture: Capture, *, failed: bool) -> TurnRecord:
        """Return the redacted record of an answer that nobody sees and that is not committed as a turn. A failed one
        has no tokens."""
        state = TurnState.FAILED if failed else TurnState.SHADOW
        record = _record(context, _ended_choice(context, capture, state, self._clock()))
        if context.runtime.redactor is not None:
            (record,) = await context.runtime.redactor.redacted([record])
        return record

    async def _committed(self, context: CallContext, choices: Sequence[_EndedChoice]) -> str | None:
        """Commit the turns. Return None, or the reason why an answer is given although they are not recorded."""
        unrecorded = context.unrecorded
        if unrecorded is None:
            try:
                await self._commit(context, choices)
            except StoreUnavailable:
                if not self._serves_unrecorded:
                    raise
                unrecorded = STORE_UNAVAILABLE
        if unrecorded is not None and self._observer is not None:
            self._observer.call_unrecorded(reason=unrecorded, dialect=context.dialect.name)
        return unrecorded

    async def _commit(self, context: CallContext, choices: Sequence[_EndedChoice]) -> None:
        records = [_record(context, choice) for choice in choices]
        if len(choices) > 1:
            whole, siblings = _whole_answer(context, choices), tuple(choice.turn.id for choice in choices[1:])
            first = msgspec.structs.replace(whole, choices=whole.choices[:1], siblings=siblings)
            records[0] = msgspec.structs.replace(records[0], response=msgspec.to_builtins(first))
        if context.idempotency_key is not None and all(choice.turn.state is TurnState.COMPLETE for choice in choices):
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
        for choice, record in zip(choices, records, strict=True):
            if record.turn.state is not TurnState.FAILED:
                self._sessions.answered(
                    context.session,
                    record.conversation_hash,
                    settled_hash=record.settled_hash,
                    lone_prompt=context.lone_prompt,
                    answer=without_thought(choice.text),
                    turn_id=record.turn.id,
                    seen_open=seen_at if is_open else None,
                )
            self._observe(context, record)

    def _observe(self, context: CallContext, record: TurnRecord) -> None:
        if self._observer is not None:
            self._observer.turn_finished(
                record.turn,
                attributed_by=record.attributed_by,
                prompt_tokens=record.prompt_token_count,
                dialect=context.dialect.name,
            )


class _EndedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice whose generation has ended, its turn, its text, and the answer with this choice alone."""

    capture: Capture
    turn: Turn
    text: str
    answer: Answer


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


def _ended_choice(context: CallContext, capture: Capture, state: TurnState, now: float) -> _EndedChoice:
    if state is TurnState.FAILED or capture.finish is None:
        turn = capture.turn_without_tokens(state, now)
    else:
        turn = capture.turn(state, now)
    text = capture.text
    choice = Choice(
        turn_id=turn.id,
        text=text,
        reasoning=capture.reasoning,
        reasoning_tokens=capture.reasoning_tokens,
        tool_calls=tuple(capture.calls),
        finish_reason=capture.finish_reason(),
        completion_tokens=capture.token_count,
        version=max([span.version for span in turn.spans], default=None),
        stopped_by=capture.stopped_by,
        completed=int(turn.finished_at),
        logprobs=tuple(capture.token_logprobs) if capture.plan.call.logprobs else None,
        failure=capture.failure,
    )
    return _EndedChoice(capture=capture, turn=turn, text=text, answer=_answer(context, [capture.plan], (choice,)))


def _whole_answer(context: CallContext, choices: Sequence[_EndedChoice]) -> Answer:
    """Return the answer with the choices of all these answers."""
    plans = [choice.capture.plan for choice in choices]
    return _answer(context, plans, tuple(choice.answer.choices[0] for choice in choices))


def _answer(context: CallContext, plans: Sequence[CallPlan], choices: tuple[Choice, ...]) -> Answer:
    head = stream_head(plans, context)
    return Answer(
        turn_id=head.turn_id,
        session_id=head.session_id,
        model=head.model,
        run_name=context.served.run.name,
        created=head.created,
        prompt_tokens=head.prompt_tokens,
        cached_tokens=head.cached_tokens,
        choices=choices,
        attempt=context.session.attempt,
        warnings=context.warnings,
    )


def _record(context: CallContext, choice: _EndedChoice) -> TurnRecord:
    plan, prompt = choice.capture.plan, choice.capture.plan.prompt
    return TurnRecord(
        turn=choice.turn,
        run_id=plan.run_id,
        attributed_by=context.session.attributed_by.value,
        conversation_hash=_ending(context, choice),
        settled_hash=_settled(choice),
        tools_hash=prompt.tools_hash,
        idempotency_key=None,
        prompt_token_count=len(prompt.plan.input_ids),
        prompt_ids=prompt.plan.input_ids,
        messages=prompt.messages,
        request=plan.call.body,
        response=msgspec.to_builtins(choice.answer),
        users=context.users,
    )


def _ending(context: CallContext, choice: _EndedChoice) -> bytes:
    """Return the conversation hash by which a call that continues this turn is recognised."""
    prompt, turn = choice.capture.plan.prompt, choice.turn
    if turn.state is TurnState.SHADOW:
        # No client has the answer, so that a call with the same conversation continues another turn.
        return blake2b(b"shadow " + turn.id.encode(), digest_size=HASH_BYTES).digest()
    if not turn.output_ids:
        return prompt.request_hash
    if prompt.raw is None:
        return extend_hash(prompt.request_hash, _reply(choice))
    completion = prompt.raw.answered(choice.text, turn.output_ids, turn.sampling.stop_token_ids)
    context.runtime.completions.keep(completion)
    return completion.digest


def _settled(choice: _EndedChoice) -> bytes | None:
    """Return the conversation hash without the last message, if the next request may leave that message out."""
    settled, turn = choice.capture.plan.prompt.settled_hash, choice.turn
    if settled is None or not turn.output_ids or turn.state is TurnState.SHADOW:
        return None
    return extend_hash(settled, _reply(choice))


def _reply(choice: _EndedChoice) -> dict[str, Any]:
    """Return the answer as the message that clients send back, including its prefill."""
    capture = choice.capture
    calls = [{"function": {"name": made.call.name, "arguments": made.call.arguments}} for made in capture.calls]
    return {"role": "assistant", "content": capture.plan.call.prefill + choice.text, "tool_calls": calls}
