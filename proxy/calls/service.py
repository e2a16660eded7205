"""The life of one model call, top to bottom: run, runtime, body, session, prompt, generation, commit.

A dialect's endpoint makes the steps in this order:

    caller = await caller_of(request)                         # who: the API key, and what the headers say
    model = await calls.model_of(caller.principal, body)      # run, and the runtime of its base model
    call = await calls.read(body, parse, model.runtime)       # the dialect parses the body for this model
    call = await calls.adapt(call, model)                     # without options that the model or engine ignores
    begun = await calls.begin(call, caller, model, dialect)   # session, prompt; generates; commits; or a replay
    await begun.wait()                                        # the answer as it was recorded
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec

from proxy.auth.access import Principal
from proxy.calls.asking import call_warnings, understood
from proxy.calls.bodies import BodyReader, Parse
from proxy.calls.bounds import HUGE_BYTES
from proxy.calls.call import STORE_UNAVAILABLE, Caller, Dialect, ModelCall
from proxy.calls.capture import CallPlan, Capture
from proxy.calls.constraints import PromisedAnswer
from proxy.calls.conversation import ReadConversation
from proxy.calls.generation import Generation
from proxy.calls.models import ModelCatalog, ServedModel, ServingVersions
from proxy.calls.observer import TurnObserver
from proxy.calls.prompts import PlannedPrompt
from proxy.calls.raw_prompts import ReadPrompts
from proxy.calls.recording import CallContext, TurnRecorder, stream_head
from proxy.calls.remembered import Remembered
from proxy.calls.replay import Replayed, ReplayIndex, RequestMarks
from proxy.calls.runtime import LoadTemplate, ModelRuntime, RunModel, Runtimes
from proxy.calls.unseen_answers import UnseenAnswers
from proxy.clock import Clock
from proxy.engines.fair_queue import FairShare
from proxy.engines.faults import EngineFaults
from proxy.errors import BaseRlError, NotFound, RateLimited, StoreUnavailable, Unavailable
from proxy.http.workers import Workers
from proxy.limits.service import Admission, Limits
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
from proxy.tokens.template import ChatTemplate
from proxy.turns.service import TrajectoryStore
from proxy.versions.answer_pairs import AnswerPairs

_TEXT_CALLS = "tool calls stay text: the model's chat template writes none that is known (run.tool_parser)"
_UNUSED_SEED = "seed has no effect: the engine draws by seeds only with --enable-deterministic-inference"


class _NewCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call with everything that its steps need: its sender, its dialect, its model, and the marks of a
    repetition."""

    call: ModelCall
    caller: Caller
    dialect: Dialect
    served: ServedModel
    runtime: ModelRuntime
    hints: SessionHints
    marks: RequestMarks


class CallService:
    """Answers model calls of every dialect, for every run that the engines serve."""

    def __init__(
        self,
        *,
        settings: Settings,
        runs: RunDirectory,
        sessions: SessionService,
        trajectories: TrajectoryStore,
        pairs: AnswerPairs,
        swaps: ServingVersions,
        clock: Clock,
        observer: TurnObserver | None = None,
        limits: Limits | None = None,
        faults: EngineFaults | None = None,
        load_template: LoadTemplate = ChatTemplate.load,
    ) -> None:
        """Without `limits`, runs' limits are not enforced. `faults` counts invalid replies. `load_template` is for
        tests."""
        self.bounds = settings.requests
        self._serves_unrecorded = settings.database.when_unavailable == "serve"
        self._workers = Workers(self.bounds.threads)
        self._bodies = BodyReader(self.bounds, self._workers)
        self.models = ModelCatalog(runs, swaps, clock, outlives_store=self._serves_unrecorded)
        self.runtimes = Runtimes(
            trajectories=trajectories,
            workers=self._workers,
            clock=clock,
            observer=observer,
            load_template=load_template,
        )
        self.remembered: Remembered[Any] = Remembered()
        self.running: set[Generation] = set()
        """Calls that still generate, or commit."""
        self._swaps = swaps
        self._runs = runs
        self._sessions = sessions
        self._limits = limits
        self._clock = clock
        self._faults = faults or EngineFaults(clock)
        self._replays = ReplayIndex(clock, trajectories)
        self._recorder = TurnRecorder(
            trajectories, sessions, clock, observer, serves_unrecorded=self._serves_unrecorded
        )
        self._unseen = UnseenAnswers(
            swaps=swaps,
            recorder=self._recorder,
            trajectories=trajectories,
            pairs=pairs,
            clock=clock,
            faults=self._faults,
            observer=observer,
        )

    async def model_of(self, principal: Principal, body: bytes = b"") -> RunModel:
        """Return the run that a call is for, with the runtime of its base model.

        `body` is read only with the key of a project. Raise ModelNotFound for a key without a model, InvalidRequest
        for a body that names none, Unavailable for a model that cannot be loaded.
        """
        run = await self.models.run_of(principal, body)
        return RunModel(run, await self.runtimes.of(run))

    async def read(self, body: bytes, parse: Parse, runtime: ModelRuntime, *, prompt_ids: bool = False) -> ModelCall:
        """Return the call that a body holds (`BodyReader.read`)."""
        return await self._bodies.read(body, parse, runtime, prompt_ids=prompt_ids)

    async def digest(self, body: bytes) -> bytes:
        """Return the digest by which equal bodies are recognised."""
        return await self._bodies.digest(body)

    async def adapt(self, call: ModelCall, model: RunModel) -> ModelCall:
        """Return the call without the options that the model or its engine ignores, and with a warning for each."""
        if call.calls_allowed and not model.runtime.choices.reads_calls:
            call = call.warned((_TEXT_CALLS,))
        if call.sampling.seed is not None:
            place = self._swaps.find_place(model.run.id)
            if place is not None and not await place.engine.draws_by_seed():
                unseeded = msgspec.structs.replace(call.sampling, seed=None)
                call = msgspec.structs.replace(call, sampling=unseeded).warned((_UNUSED_SEED,))
        return call

    async def begin(
        self, call: ModelCall, caller: Caller, model: RunModel, dialect: Dialect
    ) -> Generation | Replayed:
        """Begin to answer a call, or find the answer that the same request got before.

        A generation is returned held: `release` it. Every error of the call is raised before generation begins.
        """
        hints = session_hints(path=caller.path_session, headers=caller.session_headers, body=call.body)
        new = _NewCall(
            call=call,
            caller=caller,
            dialect=dialect,
            served=await self.models.served(model.run, call.model),
            runtime=model.runtime,
            hints=hints,
            marks=RequestMarks.of(caller, hints, names_answer=call.previous is not None),
        )
        async with self._replays.turnstile(new.marks):
            try:
                return self._replays.find_by_key(new.marks) or await self._begin_in_session(new)
            except StoreUnavailable:
                if not self._serves_unrecorded:
                    raise
            return await self._begin_unrecorded(new)

    async def count_tokens(self, call: ModelCall, model: RunModel) -> int:
        """Count the tokens of the call's prompt, as the first of its session. Nothing is generated or recorded."""
        await self.models.served(model.run, call.model)
        return await model.runtime.prompts.count(call)

    async def context_length(self, run: RunView) -> int | None:
        """Return the context length of the run's model in tokens; None if the model cannot be loaded."""
        try:
            return (await self.runtimes.of(run)).context_length
        except Unavailable:
            return None

    async def template(self, run: RunView) -> ChatTemplate | None:
        """Return the chat template of the run's model; None if the model cannot be loaded."""
        try:
            return (await self.runtimes.of(run)).template
        except Unavailable:
            return None

    async def token_text(self, run_id: str) -> Callable[[int], str] | None:
        """Return what decodes the run's tokens one by one; None if its model cannot be loaded."""
        try:
            return (await self.runtimes.of(await self._runs.by_id(run_id))).template.readable_token
        except (NotFound, Unavailable):
            return None

    def forget(self, session_ids: Collection[str]) -> None:
        """Forget the answers of erased sessions, and abort what still generates in them."""
        self._replays.forget(session_ids)
        self._unseen.forget(session_ids)
        for generation in self.running:
            if generation.head.session_id in session_ids:
                generation.abandon()

    def forget_texts(self, _session_ids: Collection[str]) -> None:
        """Forget the remembered texts of all sessions: an entry does not record which session it came from."""
        self.remembered.clear()
        self.runtimes.forget_texts()

    async def aclose(self) -> None:
        """End everything that still generates, and record each turn with the tokens it has."""
        await self._unseen.aclose()
        running = list(self.running)
        for generation in running:
            generation.abandon()
        await asyncio.gather(*(generation.wait() for generation in running), return_exceptions=True)
        await self.runtimes.aclose()
        self._workers.close()

    async def _begin_in_session(self, new: _NewCall) -> Generation | Replayed:
        call, runtime = new.call, new.runtime
        if call.prompts:
            await runtime.raw_prompts.recall(new.served.run.id)
        # Before the session is known: a request that the model cannot take must not open one.
        promised, asked = await self._understand(call, runtime)
        lone_prompt = await runtime.prompts.lone_prompt(call, asked) if isinstance(asked, ReadConversation) else None
        previous = () if call.previous is None else (call.previous.turn_id,)
        hints = msgspec.structs.replace(
            new.hints,
            conversation_hashes=asked.answered,
            lone_prompt=lone_prompt,
            turns=(*previous, *asked.named),
            by_previous=bool(previous),
            idempotency_key=new.marks.idempotency_key,
            repeats=self._replays.answered_in(new.marks),
        )
        admission = self._limits.admission(new.served.run, new.caller.principal) if self._limits is not None else None
        session = await self._admit(new, hints, admission)
        if isinstance(session, Generation | Replayed):
            return session
        try:
            prompts = await self._plan(new, asked, session)
            context = CallContext(
                dialect=new.dialect,
                served=new.served,
                runtime=runtime,
                session=session,
                idempotency_key=new.marks.idempotency_key,
                users=self._sessions.users_of(call.body),
                lone_prompt=lone_prompt,
                admission=admission,
            )
            return await self._generate(new, context, prompts, promised)
        except BaseException as error:  # also a cancellation, when the client disconnects: the call does not count
            self._sessions.call_ended(session, recorded=False)
            if isinstance(error, BaseRlError):
                await self._vacate(session)
            raise

    async def _begin_unrecorded(self, new: _NewCall) -> Generation:
        """Answer while the store is away, if the operator wants that: outside of any session, recording nothing."""
        session = unrecorded_session(new.served.run.id)
        context = CallContext(
            dialect=new.dialect,
            served=new.served,
            runtime=new.runtime,
            session=session,
            idempotency_key=None,
            unrecorded=STORE_UNAVAILABLE,
        )
        promised, asked = await self._understand(new.call, new.runtime)
        return await self._generate(new, context, await self._plan(new, asked, session), promised)

    async def _understand(
        self, call: ModelCall, runtime: ModelRuntime
    ) -> tuple[PromisedAnswer | None, ReadConversation | ReadPrompts]:
        """Return the form that the answer must have, and the conversation or the prompts that it is to continue."""
        if call.is_large:
            return await self._workers.run(partial(understood, call, runtime))
        return understood(call, runtime)

    async def _admit(
        self, new: _NewCall, hints: SessionHints, admission: Admission | None
    ) -> SessionContext | Generation | Replayed:
        """Return the session in which the call may begin, or the answer of an equal call, which counts for no limit.

        Raise RateLimited.
        """
        run, marks = new.served.run, new.marks
        repeated = self._replays.find_unnamed(marks)
        if isinstance(repeated, Generation | Replayed):
            return repeated
        session = repeated
        begins = False
        try:
            if session is None:
                session = await self._sessions.identify(new.caller.principal, run, hints, admission)
            else:
                self._sessions.begun_again(session)
            # Before the limits: an answer that is repeated costs the engine nothing.
            found = await self._replays.find_in_session(marks, session.id)
            if found is not None:
                return found
            if admission is not None:
                await admission.to_begin()
            begins = True
        except RateLimited:
            if session is not None and await self._vacate(session):
                session = None
            self._replays.keep_refused(marks, session)
            raise
        finally:
            if session is not None and not begins:
                self._sessions.call_ended(session, recorded=False)
        return session

    async def _plan(
        self, new: _NewCall, asked: ReadConversation | ReadPrompts, session: SessionContext
    ) -> Sequence[PlannedPrompt]:
        if isinstance(asked, ReadPrompts):
            return await new.runtime.raw_prompts.plan(new.call, asked, session)
        return (await new.runtime.prompts.plan(new.call, asked, session),)

    async def _generate(
        self,
        new: _NewCall,
        context: CallContext,
        prompts: Sequence[PlannedPrompt],
        promised: PromisedAnswer | None,
    ) -> Generation:
        """Start the generation, which commits its turns at its end (`TurnRecorder.record`)."""
        call, runtime, run = new.call, new.runtime, new.served.run
        planned = partial(runtime.choices.plans, call, run, context.session, prompts, promised)
        plans = await self._workers.run(planned) if call.is_large else planned()
        context = msgspec.structs.replace(context, warnings=call_warnings(call, context, plans))
        head = stream_head(plans, context)
        if context.admission is not None:
            head = msgspec.structs.replace(head, standings=context.admission.standings())
        output = runtime.choices.read_as(call)
        placed = await self.models.place(new.served, context.session, new.caller.principal.key_id)
        generation = Generation(
            head,
            [Capture(plan, runtime.decoder, output) for plan in plans],
            place=placed.place,
            share=FairShare(run.id, run.settings.limits.share),
            # Another engine would have to load an older version first, for which this call cannot wait again.
            another_place=partial(self._swaps.another_place, run.id) if placed.may_move else lambda _lost: None,
            clock=self._clock,
            record=partial(self._recorder.record, context),
            vacate=partial(self._vacate, context.session) if context.unrecorded is None else None,
            faults=self._faults,
            vocabulary_size=runtime.vocabulary_size,
            engine_lost=self._swaps.recheck_engine,
            ended=partial(self._ended, context, plans),
        )
        generation.hold()  # for the request that began it, before anything else can release it
        self.running.add(generation)
        self._replays.keep(new.marks, context.session, generation)
        return generation

    async def _vacate(self, session: SessionContext) -> bool:
        """Remove the session that a call opened without a name, after nothing came of the call.

        Return whether it is gone. A session with a name stays: other calls may be in it.
        """
        if not session.is_new or session.attributed_by is not AttributedBy.NEW:
            return False
        return self._replays.withdraw(session.id) and await self._sessions.discard(session)

    def _ended(self, context: CallContext, plans: Sequence[CallPlan], generation: Generation) -> None:
        # Called once, when the generation's task is done, so that nothing of the call stays in memory.
        self._sessions.call_ended(
            context.session, recorded=generation.answer is not None and not generation.abandoned
        )
        if context.admission is not None:
            context.admission.used(generation.tokens_used)
        if generation.call.body_bytes > HUGE_BYTES:
            self._workers.trim_soon()
        self.running.discard(generation)
        self._replays.finished(generation)
        if generation.is_complete and generation.answer is not None:
            self._unseen.offer(context, plans, generation.answer)
