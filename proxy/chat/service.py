"""The way of one model call: which run, which session, prompt ids, generation, text, commit, answer.

Wiring (proxy/app.py):

    template = ChatTemplate.load(settings.run.model)          # proxy.tokens.template; ConfigurationError at start
    app.state.chat = ChatService(
        settings=settings, template=template, runs=runs, sessions=sessions, trajectories=trajectories,
        swaps=swaps, engine=engine, clock=system_clock, observer=observer,
    )
    app.include_router(proxy.chat.endpoints.router)
    ...
    await app.state.chat.aclose()                             # at shutdown: ends what still generates, records it
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import msgspec

from proxy.chat.call import Answer, Caller, Choice, Dialect, ModelCall, StreamHead
from proxy.chat.capture import CallPlan, Capture
from proxy.chat.generation import Generation
from proxy.chat.models import ModelCatalog, ServedModel, ServingVersions
from proxy.chat.observer import TurnObserver
from proxy.chat.retries import RecentAnswers, Replayed
from proxy.chat.sampling import resolve_sampling
from proxy.clock import Clock
from proxy.contract.identifiers import new_turn_id
from proxy.contract.turn import Continuation, Turn, TurnState
from proxy.engines.interface import Engine
from proxy.errors import Conflict, EngineFailed
from proxy.runs.service import RunDirectory
from proxy.sessions.identification import AttributedBy, SessionContext, SessionHints
from proxy.sessions.service import SessionService
from proxy.settings import Settings
from proxy.tokens.canonical import answered_hashes, conversation_hashes, extend_hash, normalise, tools_hash
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.prefix import Conversation, KnownTurn, PromptPlan, plan_branch, plan_continuation
from proxy.tokens.template import ChatTemplate
from proxy.tokens.tool_calls import CLOSE, OPEN
from proxy.trajectories.service import ParentTurn, TrajectoryStore, TurnRecord

_RECENT_TURNS = 8
"""Where a call extends no recorded conversation, this many latest turns are looked at for common tokens."""


class _Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """`covered` messages are already recorded along the parent's path."""

    plan: PromptPlan
    covered: int
    request_hash: bytes
    tools_hash: bytes


class _Context(msgspec.Struct, frozen=True, kw_only=True):
    """What recording a turn needs to know beside the generation."""

    dialect: Dialect
    served: ServedModel
    session: SessionContext
    prompt: _Prompt
    idempotency_key: str | None


class ChatService:
    """Answers model calls of every dialect."""

    def __init__(
        self,
        *,
        settings: Settings,
        template: ChatTemplate,
        runs: RunDirectory,
        sessions: SessionService,
        trajectories: TrajectoryStore,
        swaps: ServingVersions,
        engine: Engine,
        clock: Clock,
        observer: TurnObserver | None = None,
    ) -> None:
        self.models = ModelCatalog(runs, swaps, clock)
        self._swaps = swaps
        self._template = template
        self._sessions = sessions
        self._trajectories = trajectories
        self._engine = engine
        self._clock = clock
        self._observer = observer
        self._slots = asyncio.Semaphore(settings.engine.max_concurrency)
        self._recent = RecentAnswers(clock)
        self._running: set[Generation] = set()
        self._decoder = TokenDecoder(
            template.tokenizer, hidden=template.special_ids - template.added_ids((OPEN, CLOSE))
        )

    async def start(self, call: ModelCall, caller: Caller, dialect: Dialect) -> Generation | Replayed:
        """Begins to answer a call, or finds the answer of the same request sent before.

        A generation comes held: `release` it. Raises what is wrong with the call before anything is generated.
        """
        served = await self.models.resolve(caller.principal, call.model)
        key = _caller_key(caller)
        if key is None:
            return await self._start(call, caller, dialect, served)
        async with self._recent.turnstile(key):
            repeated = self._recent.find(key, caller.body_digest)
            return repeated or await self._start(call, caller, dialect, served)

    async def aclose(self) -> None:
        """Ends what still generates; each turn is recorded with what it has."""
        running = list(self._running)
        for generation in running:
            generation.abandon()
        await asyncio.gather(*(generation.wait() for generation in running), return_exceptions=True)

    async def _start(
        self, call: ModelCall, caller: Caller, dialect: Dialect, served: ServedModel
    ) -> Generation | Replayed:
        hashes = conversation_hashes(call.messages)
        answered = answered_hashes(call.messages, hashes)
        session = await self._sessions.identify(
            caller.principal,
            served.run,
            SessionHints(
                path_id=caller.path_session,
                header_id=caller.header_session,
                group=caller.group,
                conversation_hashes=answered,
            ),
        )
        found = await self._answered_before(session, caller)
        if found is not None:
            return found
        prompt = await self._prompt(call, session, hashes, answered)
        return self._generate(
            call,
            caller,
            _Context(
                dialect=dialect, served=served, session=session, prompt=prompt, idempotency_key=caller.idempotency_key
            ),
        )

    async def _answered_before(self, session: SessionContext, caller: Caller) -> Generation | Replayed | None:
        if caller.idempotency_key is not None:
            recorded = await self._trajectories.answered(session.id, caller.idempotency_key)
            return Replayed(answer=msgspec.convert(recorded, Answer)) if recorded is not None else None
        if not caller.retry_count:
            return None
        return self._recent.find((session.id, caller.body_digest), caller.body_digest)

    async def _prompt(
        self, call: ModelCall, session: SessionContext, hashes: list[bytes], answered: tuple[bytes, ...]
    ) -> _Prompt:
        """Prompt ids: those of the recorded turn that the call extends, and what is new."""
        conversation = Conversation(
            messages=[normalise(message) for message in call.messages],
            tools=call.tools,
            tools_hash=tools_hash(call.tools),
        )
        opened = session.attributed_by is AttributedBy.NEW
        parent = None if opened else await self._trajectories.find_parent(session.id, answered)
        covered = 0
        if parent is not None:
            extended = hashes.index(parent.conversation_hash) + 1
            plan = plan_continuation(self._template, conversation, _known(parent), extended)
            if plan.continuation in (Continuation.EXACT, Continuation.RETEMPLATED):
                covered = extended
        else:
            recent = [] if opened else await self._trajectories.recent_turns(session.id, _RECENT_TURNS)
            plan = plan_branch(self._template, conversation, [_known(turn) for turn in recent])
        return _Prompt(plan=plan, covered=covered, request_hash=hashes[-1], tools_hash=conversation.tools_hash)

    def _generate(self, call: ModelCall, caller: Caller, context: _Context) -> Generation:
        plans = self._plans(call, context)
        generation = Generation(
            _head(context, plans),
            [Capture(plan, self._decoder) for plan in plans],
            engine=self._engine,
            slots=self._slots,
            clock=self._clock,
            record=partial(self._record, context),
            engine_lost=self._swaps.doubt,
            ended=self._ended,
        )
        generation.hold()
        self._running.add(generation)
        if caller.retry_count is not None:
            self._recent.keep((context.session.id, caller.body_digest), caller.body_digest, generation)
        key = _caller_key(caller)
        if key is not None:
            self._recent.keep(key, caller.body_digest, generation)
        return generation

    def _plans(self, call: ModelCall, context: _Context) -> list[CallPlan]:
        """One for every choice."""
        sampling = resolve_sampling(
            call.sampling,
            run=context.served.run.settings,
            purpose=context.session.purpose,
            template=self._template,
            prompt_tokens=len(context.prompt.plan.input_ids),
            one_call_only=call.calls_allowed and not call.parallel_calls,
        )
        now = self._clock()
        return [
            CallPlan(
                turn_id=new_turn_id(),
                session_id=context.session.id,
                run_id=context.served.run.id,
                call=call,
                prompt=context.prompt.plan,
                sampling=sampling,
                started_at=now,
                choice=index,
            )
            for index in range(call.n)
        ]

    def _ended(self, generation: Generation) -> None:
        self._running.discard(generation)
        self._recent.finished(generation)

    async def _record(self, context: _Context, ended: Sequence[tuple[Capture, TurnState]]) -> Answer:
        """Commits the turns. Raises EngineFailed, the turn recorded as failed, when its tokens are nobody's."""
        if len(ended) == 1:
            choices = [await self._record_choice(context, *ended[0])]
        else:
            choices = await asyncio.gather(*(self._record_choice(context, *one) for one in ended))
        return _answer(_head(context, [capture.plan for capture, _ in ended]), context, tuple(choices))

    async def _record_choice(self, context: _Context, capture: Capture, state: TurnState) -> Choice:
        now = self._clock()
        if state is TurnState.FAILED or capture.finish is None:
            return await self._commit(context, capture, capture.turn_without_tokens(state, now))
        try:
            turn = capture.turn(state, now)
        except EngineFailed:
            await self._commit(context, capture, capture.turn_without_tokens(TurnState.FAILED, now))
            raise
        return await self._commit(context, capture, turn)

    async def _commit(self, context: _Context, capture: Capture, turn: Turn) -> Choice:
        prompt, plan = context.prompt, capture.plan
        choice = _choice(capture, turn)
        conversation_hash = prompt.request_hash
        if turn.output_ids:
            conversation_hash = extend_hash(conversation_hash, _reply(capture))
        keyed = turn.state is TurnState.COMPLETE and plan.choice == 0
        record = TurnRecord(
            turn=turn,
            run_id=plan.run_id,
            attributed_by=context.session.attributed_by.value,
            conversation_hash=conversation_hash,
            tools_hash=prompt.tools_hash,
            idempotency_key=context.idempotency_key if keyed else None,
            prompt_token_count=len(plan.prompt.input_ids),
            messages=plan.call.messages[prompt.covered :],
            request=plan.call.body,
            response=msgspec.to_builtins(_answer(_head(context, [plan]), context, (choice,))),
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


def _caller_key(caller: Caller) -> Hashable:
    """Under which an explicit Idempotency-Key is known before the session is; None without one."""
    if caller.idempotency_key is None:
        return None
    return (caller.principal.key_id, caller.path_session, caller.header_session, caller.idempotency_key)


def _known(turn: ParentTurn) -> KnownTurn:
    return KnownTurn(id=turn.id, path_ids=turn.path_ids, tools_hash=turn.tools_hash)


def _reply(capture: Capture) -> dict[str, Any]:
    """The answer as the message that clients send back."""
    calls = [{"function": {"name": made.call.name, "arguments": made.call.arguments}} for made in capture.calls]
    return {"role": "assistant", "content": capture.text, "tool_calls": calls}


def _head(context: _Context, plans: Sequence[CallPlan]) -> StreamHead:
    first = plans[0]
    return StreamHead(
        turn_id=first.turn_id,
        session_id=first.session_id,
        model=first.call.model,
        created=int(first.started_at),
        prompt_tokens=len(first.prompt.input_ids),
        cached_tokens=first.prompt.prefix_tokens,
        choices=len(plans),
    )


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


def _answer(head: StreamHead, context: _Context, choices: tuple[Choice, ...]) -> Answer:
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
