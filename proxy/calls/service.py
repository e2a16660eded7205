"""The way of one model call: which run, which session, prompt ids, generation, text, commit, answer.

Wiring (proxy/app.py):

    template = ChatTemplate.load(settings.run.model)          # proxy.tokens.template; ConfigurationError at start
    chat = ChatService(
        settings=settings, template=template, runs=runs, sessions=sessions, trajectories=trajectories,
        swaps=swaps, engine=engine, clock=system_clock, observer=observer, limits=limits,
    )
    app.include_router(proxy.dialects.endpoints.router)
    ...
    await chat.aclose()                   # at shutdown: ends what still generates, records it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec

from proxy.auth.service import Principal
from proxy.calls import images
from proxy.calls.bounds import (
    HUGE_BYTES,
    LARGE_MESSAGES,
    LARGE_TOOLS,
    check_arguments,
    check_body,
    has_much_to_read,
)
from proxy.calls.call import STORE_UNAVAILABLE, Caller, Dialect, ModelCall
from proxy.calls.capture import CallPlan, Capture
from proxy.calls.choices import ChoicePlanner
from proxy.calls.constraints import PromisedAnswer
from proxy.calls.conversation import ReadConversation
from proxy.calls.generation import Generation
from proxy.calls.models import ModelCatalog, ServedModel, ServingVersions
from proxy.calls.observer import TurnObserver
from proxy.calls.prompts import PlannedPrompt, PromptPlanner
from proxy.calls.raw_prompts import RawPromptPlanner, ReadPrompts
from proxy.calls.recording import CallContext, TurnRecorder, stream_head
from proxy.calls.redacting import TurnRedactor
from proxy.calls.remembered import Remembered
from proxy.calls.retries import RecentAnswers, Replayed, UnnamedCalls
from proxy.calls.sampling import changes
from proxy.clock import Clock
from proxy.engines.activity import EngineActivity, EngineSlots
from proxy.engines.faults import EngineFaults
from proxy.engines.protocol import Engine
from proxy.errors import BaseRlError, RateLimited, StoreUnavailable
from proxy.http.workers import Workers
from proxy.limits.service import RunLimits
from proxy.redaction.rules import load_rules
from proxy.runs.service import RunDirectory, RunView
from proxy.sessions.identification import (
    AttributedBy,
    SessionContext,
    SessionHints,
    session_hints,
    unrecorded_session,
)
from proxy.sessions.service import SessionService
from proxy.settings import Settings
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.output import output_format
from proxy.tokens.raw import CompletionIndex
from proxy.tokens.template import ChatTemplate
from proxy.turns.service import TrajectoryStore

_UNREAD_CALLS = "tool calls stay text: the model's chat template writes none that is known (run.tool_parser)"
_ENDED = "the session has ended: this call is recorded in it and not trained"
_UNUSED_SEED = "seed has no effect: the engine draws by seeds only with --enable-deterministic-inference"


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
        limits: RunLimits | None = None,
        activity: EngineActivity | None = None,
        faults: EngineFaults | None = None,
    ) -> None:
        """Without `limits` none are kept. `activity` hears of every generation, `faults` of every invalid reply."""
        self.bounds = settings.requests
        self._workers = Workers(self.bounds.threads)
        self._serves_unrecorded = settings.database.when_unavailable == "serve"
        self.models = ModelCatalog(runs, swaps, clock, outlives_store=self._serves_unrecorded)
        self._swaps = swaps
        self._template = template
        self._sessions = sessions
        self._limits = limits
        self._trajectories = trajectories
        self._engine = engine
        self._clock = clock
        self._faults = faults or EngineFaults(clock)
        self._slots = EngineSlots(settings.engine.max_concurrency, activity or EngineActivity())
        self.remembered: Remembered[Any] = Remembered()
        self._recent = RecentAnswers(clock)
        self._unnamed = UnnamedCalls(clock)
        self._running: set[Generation] = set()
        self._names_images = settings.run.images == "name"
        output = output_format(
            template, tool_parser=settings.run.tool_parser, reasoning_parser=settings.run.reasoning_parser
        )
        self._decoder = TokenDecoder(
            template.tokenizer, hidden=template.special_ids - template.added_ids(output.kept_texts)
        )
        self._choices = ChoicePlanner(template, output, clock)
        completions = CompletionIndex()
        self._prompts = PromptPlanner(template, trajectories, self._workers)
        self._raw_prompts = RawPromptPlanner(template, self._decoder, trajectories, completions, self._workers)
        redactor = None
        if settings.run.redaction.is_on:
            redactor = TurnRedactor(load_rules(settings.run.redaction), template, self._decoder, observer)
        self._recorder = TurnRecorder(
            trajectories,
            sessions,
            completions,
            clock,
            observer,
            redactor,
            serves_unrecorded=self._serves_unrecorded,
        )

    async def start(self, call: ModelCall, caller: Caller, dialect: Dialect) -> Generation | Replayed:
        """Begins to answer a call, or finds the answer of the same request sent before.

        A generation comes held: `release` it. Raises what is wrong with the call before anything is generated.
        """
        served = await self.models.resolve(caller.principal, call.model)
        hints = session_hints(path=caller.path_session, headers=caller.session_headers, body=call.body)
        key = _caller_key(caller, hints)
        if key is None:
            return await self._start(call, caller, hints, dialect, served)
        async with self._recent.turnstile(key):
            repeated = self._recent.find(key, caller.body_digest)
            return repeated or await self._start(call, caller, hints, dialect, served)

    async def honoured(self, call: ModelCall) -> ModelCall:
        """The call without what model and engine have no use for, of which it warns."""
        if call.calls_allowed and not self._choices.reads_calls:
            call = call.warned((_UNREAD_CALLS,))
        if call.sampling.seed is not None and not await self._engine.draws_by_seed():
            unseeded = msgspec.structs.replace(call.sampling, seed=None)
            call = msgspec.structs.replace(call, sampling=unseeded).warned((_UNUSED_SEED,))
        return call

    async def read(self, raw: bytes, parse: Callable[[bytes], ModelCall], *, prompt_ids: bool = False) -> ModelCall:
        """The call in a body, by its dialect's `parse`; on a worker thread where the body is large. `prompt_ids`: it
        may hold prompts of token ids. Raises what `parse` raises, InvalidRequest for a body beyond the bounds."""
        parsed = partial(self._parsed, raw, parse, prompt_ids=prompt_ids)
        if not has_much_to_read(raw):
            return parsed()
        try:
            return msgspec.structs.replace(await self._workers.run(parsed), is_large=True)
        finally:
            if len(raw) > HUGE_BYTES:
                self._workers.trim_soon()

    def _parsed(self, raw: bytes, parse: Callable[[bytes], ModelCall], *, prompt_ids: bool) -> ModelCall:
        check_body(raw, self.bounds, prompt_ids=prompt_ids)
        body, warnings = self._readable(raw)
        call = parse(body).warned(warnings)
        if len(raw) > HUGE_BYTES:
            check_arguments(call.messages, self.bounds)
        is_large = len(call.messages) > LARGE_MESSAGES or len(call.tools or ()) > LARGE_TOOLS
        return msgspec.structs.replace(call, is_large=is_large, body_bytes=len(raw))

    async def digest(self, body: bytes) -> bytes:
        """What tells equal bodies."""
        if len(body) > HUGE_BYTES:
            return await self._workers.run(lambda: sha256(body).digest())
        return sha256(body).digest()

    def _readable(self, raw: bytes) -> tuple[bytes, tuple[str, ...]]:
        """A body as the model can be told of it, and a warning of what it cannot."""
        if not self._names_images:
            return raw, ()
        body, count = images.named(raw)
        if not count:
            return body, ()
        what = "an image" if count == 1 else f"each of {count} images"
        return body, (f"the model reads text only: it was told [image] in the place of {what}",)

    @property
    def context_length(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self._template.context_length

    @property
    def system_anywhere(self) -> bool:
        """Whether the model's template takes messages of role system behind the first."""
        return self._template.system_anywhere

    @property
    def template_arguments(self) -> frozenset[str]:
        """What can be said to the model's template."""
        return self._template.known_arguments

    def text_of(self, ids: Sequence[int]) -> str:
        """What clients are shown of these tokens."""
        return self._decoder.text(ids)

    async def count_tokens(self, call: ModelCall, principal: Principal) -> int:
        """Of the prompt of `call`, were it the first of its session; nothing is generated or recorded."""
        await self.models.resolve(principal, call.model)
        return await self._prompts.count(call)

    def forget(self, session_ids: Collection[str]) -> None:
        """Of erased sessions nothing is said again."""
        self._recent.forget(session_ids)
        self._unnamed.forget(session_ids)
        for generation in self._running:
            if generation.head.session_id in session_ids:
                generation.abandon()

    def forget_texts(self, _session_ids: Collection[str]) -> None:
        """What was read of messages does not say whose they were: all of it goes."""
        self.remembered.clear()

    async def aclose(self) -> None:
        """Ends what still generates; each turn is recorded with what it has."""
        running = list(self._running)
        for generation in running:
            generation.abandon()
        await asyncio.gather(*(generation.wait() for generation in running), return_exceptions=True)
        self._workers.close()

    async def _start(
        self, call: ModelCall, caller: Caller, hints: SessionHints, dialect: Dialect, served: ServedModel
    ) -> Generation | Replayed:
        try:
            return await self._start_recorded(call, caller, hints, dialect, served)
        except StoreUnavailable:
            if not self._serves_unrecorded:
                raise
        context = CallContext(
            dialect=dialect,
            served=served,
            session=unrecorded_session(served.run.id),
            idempotency_key=None,
            unrecorded=STORE_UNAVAILABLE,
        )
        promised, asked = await self._understood(call)
        prompts = await self._planned(call, asked, context.session)
        return await self._generate(call, caller, hints, context, prompts, promised)

    async def _start_recorded(
        self, call: ModelCall, caller: Caller, hints: SessionHints, dialect: Dialect, served: ServedModel
    ) -> Generation | Replayed:
        if call.prompts:
            await self._raw_prompts.recall(served.run.id)
        promised, asked = await self._understood(call)
        previous = () if call.previous is None else (call.previous.turn_id,)
        lone_prompt = await self._prompts.lone_prompt(call, asked) if isinstance(asked, ReadConversation) else None
        hints = msgspec.structs.replace(
            hints,
            conversation_hashes=asked.answered,
            lone_prompt=lone_prompt,
            turns=(*previous, *asked.named),
            by_previous=bool(previous),
            idempotency_key=caller.idempotency_key,
            repeats=partial(self._recent.knows, caller.body_digest) if caller.retry_count else None,
        )
        session = await self._admitted(caller, served.run, hints)
        if isinstance(session, Generation | Replayed):
            return session
        try:
            prompts = await self._planned(call, asked, session)
            context = CallContext(
                dialect=dialect,
                served=served,
                session=session,
                idempotency_key=caller.idempotency_key,
                users=self._sessions.users_of(call.body),
                lone_prompt=lone_prompt,
            )
            return await self._generate(call, caller, hints, context, prompts, promised)
        except BaseException as error:  # also when the client leaves meanwhile: the call does not count
            self._sessions.call_ended(session, recorded=False)
            if isinstance(error, BaseRlError):
                await self._vacate(session)
            raise

    async def _admitted(
        self, caller: Caller, run: RunView, hints: SessionHints
    ) -> SessionContext | Generation | Replayed:
        """The session in which a call may begin, or the answer that it was given before, which costs nothing."""
        unnamed = _unnamed_key(caller, hints)
        repeated = self._unnamed.find(unnamed, caller.retry_count) if unnamed and caller.retry_count else None
        if isinstance(repeated, Generation | Replayed):
            return repeated
        admission = self._limits.admission(run) if self._limits is not None else None
        session = repeated
        begins = False
        try:
            if session is not None:
                self._sessions.begun_again(session)
            session = session or await self._sessions.identify(caller.principal, run, hints, admission)
            found = await self._answered_before(session, caller)
            if found is not None:
                return found
            if admission is not None:
                await admission.to_begin()
            begins = True
        except RateLimited:
            if session is not None and await self._vacate(session):
                session = None
            self._keep_refused(caller, unnamed, session)
            raise
        finally:
            if session is not None and not begins:
                self._sessions.call_ended(session, recorded=False)
        return session

    async def _vacate(self, session: SessionContext) -> bool:
        """Remove the session that this call opened without a name, as nothing came of the call.

        Returns whether it is gone. One with a name stays: other calls may be in it.
        """
        if not session.is_new or session.attributed_by is not AttributedBy.NEW:
            return False
        return self._unnamed.give_up(session.id) and await self._sessions.discard(session)

    async def _understood(self, call: ModelCall) -> tuple[PromisedAnswer | None, ReadConversation | ReadPrompts]:
        """What the answer is held to, and the conversation or the prompts."""
        if call.is_large:
            return await self._workers.run(lambda: (self._choices.promised(call), self._conversation(call)))
        return self._choices.promised(call), self._conversation(call)

    def _conversation(self, call: ModelCall) -> ReadConversation | ReadPrompts:
        return self._raw_prompts.read(call) if call.prompts else self._prompts.read(call)

    async def _planned(
        self, call: ModelCall, asked: ReadConversation | ReadPrompts, session: SessionContext
    ) -> Sequence[PlannedPrompt]:
        if isinstance(asked, ReadPrompts):
            return await self._raw_prompts.plan(call, asked, session)
        return (await self._prompts.plan(call, asked, session),)

    async def _answered_before(self, session: SessionContext, caller: Caller) -> Generation | Replayed | None:
        if caller.idempotency_key is not None:
            recorded = await self._recorder.recorded(session.id, caller.idempotency_key)
            return Replayed(answer=recorded) if recorded is not None else None
        if not caller.retry_count:
            return None
        return self._recent.find((session.id, caller.body_digest), caller.body_digest)

    def _keep_refused(self, caller: Caller, unnamed: Hashable, session: SessionContext | None) -> None:
        """So that the call, sent again, does not get the answer of an equal one."""
        if caller.retry_count is not None and unnamed is not None:
            self._unnamed.keep_refused(unnamed, session, caller.retry_count)
        if caller.retry_count is not None and session is not None:
            self._recent.drop((session.id, caller.body_digest))

    async def _generate(
        self,
        call: ModelCall,
        caller: Caller,
        hints: SessionHints,
        context: CallContext,
        prompts: Sequence[PlannedPrompt],
        promised: PromisedAnswer | None,
    ) -> Generation:
        planned = partial(self._choices.plans, call, context, prompts, promised)
        plans = await self._workers.run(planned) if call.is_large else planned()
        run = context.served.run
        context = msgspec.structs.replace(context, warnings=_warnings(call, context, plans))
        head = msgspec.structs.replace(
            stream_head(plans, context.unrecorded), attempt=context.session.attempt, warnings=context.warnings
        )
        if self._limits is not None and run.settings.limits.bound_calls and context.unrecorded is None:
            head = msgspec.structs.replace(head, standings=self._limits.standings(run))
        generation = Generation(
            head,
            [Capture(plan, self._decoder, self._choices.read_as(call)) for plan in plans],
            engine=self._engine,
            slots=self._slots,
            clock=self._clock,
            record=partial(self._recorder.record, context),
            vacate=partial(self._vacated, context),
            faults=self._faults,
            vocabulary_size=self._template.model_vocabulary_size,
            engine_lost=self._swaps.recheck_engine,
            ended=partial(self._ended, context),
        )
        generation.hold()
        self._running.add(generation)
        if caller.retry_count is not None and context.unrecorded is None:
            self._recent.keep((context.session.id, caller.body_digest), caller.body_digest, generation)
            unnamed = _unnamed_key(caller, hints)
            if unnamed is not None:
                self._unnamed.keep(unnamed, context.session, caller.retry_count, generation)
        key = _caller_key(caller, hints)
        if key is not None:
            self._recent.keep(key, caller.body_digest, generation)
        return generation

    async def _vacated(self, context: CallContext) -> None:
        if context.unrecorded is None:
            await self._vacate(context.session)

    def _ended(self, context: CallContext, generation: Generation) -> None:
        run = context.served.run
        self._sessions.call_ended(
            context.session, recorded=generation.answer is not None and not generation.abandoned
        )
        if self._limits is not None and run.settings.limits.bound_calls and generation.head.unrecorded is None:
            self._limits.used(run, generation.tokens_used)
        if generation.call.body_bytes > HUGE_BYTES:
            self._workers.trim_soon()
        self._running.discard(generation)
        self._recent.finished(generation)
        self._unnamed.finished(generation)


def _warnings(call: ModelCall, context: CallContext, plans: Sequence[CallPlan]) -> tuple[str, ...]:
    """Name what of the call's sampling is changed, each change once, and say that its session has ended."""
    run = context.served.run.settings
    changed = [told for plan in plans[:: call.n] for told in changes(call.sampling, plan.sampling, run)]
    return tuple(dict.fromkeys((_ENDED, *changed) if context.session.has_ended else changed))


def _unnamed_key(caller: Caller, hints: SessionHints) -> Hashable:
    """Return what equal calls that name no session have in common; None for a call that names one."""
    if hints.name is not None or hints.by_previous or caller.principal.session_id is not None:
        return None
    return (caller.principal.key_id, caller.body_digest)


def _caller_key(caller: Caller, hints: SessionHints) -> Hashable:
    """Under which an explicit Idempotency-Key is known before the session is; None without one."""
    if caller.idempotency_key is None:
        return None
    return (caller.principal.key_id, hints.name, caller.idempotency_key)
