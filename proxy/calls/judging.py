"""Answers of runs to judges: in the engines' spare capacity, and recorded nowhere.

No session and no turn is made of a judge's request, so nothing of it can be trained, exported or judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from proxy.calls.asking import understood
from proxy.calls.call import AnswerFormat, ModelCall, RequestedSampling
from proxy.calls.capture import CallPlan, Capture
from proxy.calls.conversation import ReadConversation
from proxy.calls.models import ModelCatalog, ServedModel, ServingVersions
from proxy.calls.runtime import ModelRuntime, Runtimes
from proxy.calls.spare_generation import CapacityRevoked, generate_in_spare, others_use
from proxy.clock import Clock
from proxy.contract.identifiers import new_turn_id
from proxy.engines.faults import EngineFaults
from proxy.engines.protocol import EngineFinish
from proxy.engines.spare import SpareSlot
from proxy.errors import (
    BaseRlError,
    EngineUnavailable,
    InvalidEngineReply,
    InvalidRequest,
    NotFound,
    RunArchived,
    UnsupportedParameter,
)
from proxy.jobs.kinds import JobFailure, JobPostponed, JobRefused
from proxy.judges.provider import ModelAnswer
from proxy.judges.subjects import Subject
from proxy.runs.service import RunDirectory, RunView
from proxy.sessions.identification import SessionContext, unrecorded_session

# How long a job waits before it tries again to find spare capacity, or an engine. Meanwhile judges with providers
# have its place among the judging jobs.
_PAUSE_SECONDS = 20.0


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """A judge's request to a run. The session exists in memory only."""

    served: ServedModel
    runtime: ModelRuntime
    session: SessionContext
    plan: CallPlan


class _Progress:
    """The slot of the request's newest generation."""

    def __init__(self) -> None:
        self.slot: SpareSlot | None = None

    @property
    def is_generating(self) -> bool:
        return self.slot is not None and self.slot.is_running


class JudgesByRuns:
    """Answers judges whose model is a run (`proxy.judges.models.RunModels`)."""

    def __init__(
        self,
        *,
        runs: RunDirectory,
        catalog: ModelCatalog,
        runtimes: Runtimes,
        swaps: ServingVersions,
        clock: Clock,
        faults: EngineFaults,
        busy_share: float,
    ) -> None:
        """`busy_share` is the share of an engine's slots that calls may hold while it answers judges."""
        self._runs = runs
        self._catalog = catalog
        self._runtimes = runtimes
        self._swaps = swaps
        self._clock = clock
        self._faults = faults
        self._busy_share = busy_share

    async def ask(self, subject: Subject, messages: Sequence[Mapping[str, Any]], form: dict[str, Any]) -> ModelAnswer:
        """Return one answer, which matches the JSON schema `form` if the engine has grammars.

        The judge's `timeout_seconds` bounds the wait for spare capacity and the answer together. Raise JobRefused for
        a run or version that cannot be asked and a prompt that does not fit, JobPostponed while no engine serves the
        run or has spare capacity, JobFailure if the engine fails or takes too long.
        """
        judge, progress = subject.judge, _Progress()
        limit = asyncio.timeout(judge.timeout_seconds)
        try:
            async with limit:
                request = await self._request(subject, messages, form)
                capture = await self._answered(request, progress)
        except TimeoutError as error:
            if progress.is_generating or not limit.expired():
                raise JobFailure(
                    f"the judge's model did not answer within {judge.timeout_seconds:g} seconds"
                ) from error
            reason = f"no engine of {judge.model} had spare capacity for {judge.timeout_seconds:g} seconds"
            raise JobPostponed(reason, seconds=_PAUSE_SECONDS) from error
        except BaseRlError as error:
            raise _failure(error, judge.model) from error
        if capture.finish is EngineFinish.ABORT or capture.finish is None:
            raise JobFailure(f"the answer of {judge.model} broke off")
        return ModelAnswer(
            text=capture.text,
            is_cut=capture.finish is EngineFinish.LENGTH,
            prompt_tokens=len(capture.plan.prompt.plan.input_ids),
            completion_tokens=capture.token_count,
        )

    async def _request(
        self, subject: Subject, messages: Sequence[Mapping[str, Any]], form: dict[str, Any]
    ) -> _Request:
        """Find the run and plan the answer. Raise NotFound, RunArchived, EngineUnavailable, InvalidRequest."""
        judge, name = subject.judge, subject.judge.run_model or ""
        run = await self._runs.by_name(name.partition("@")[0])
        judged = await self._runs.by_id(subject.run_id)
        if run.project_id != judged.project_id:
            # As for an unknown one: whoever may change a run must not learn which runs other projects have.
            raise NotFound(f"there is no run called {run.name!r}")
        served = await self._catalog.served(run, name)
        runtime = await self._runtimes.of(run)
        call = ModelCall(
            model=name,
            messages=[dict(message) for message in messages],
            sampling=RequestedSampling(max_new_tokens=judge.max_tokens, temperature=judge.temperature),
            body={},
            answer_format=AnswerFormat(schema=form),
            body_bytes=sum(len(str(message.get("content"))) for message in messages),
        )
        session = unrecorded_session(run.id)
        plan = await self._planned(call, _with_longer_answers(run, judge.max_tokens), session, runtime)
        return _Request(served=served, runtime=runtime, session=session, plan=plan)

    async def _planned(
        self, call: ModelCall, run: RunView, session: SessionContext, runtime: ModelRuntime
    ) -> CallPlan:
        # On a thread: the conversations that judges read are often longer than those of agents.
        promised, asked = await asyncio.to_thread(partial(understood, call, runtime))
        assert isinstance(asked, ReadConversation), "the call has messages"
        prompt = await runtime.prompts.plan(call, asked, session)
        (plan,) = runtime.choices.plans(call, run, session, (prompt,), promised)
        return plan

    async def _answered(self, request: _Request, progress: _Progress) -> Capture:
        """Return the whole answer. It begins again, with no tokens, whenever calls have needed the engine."""
        plan, runtime = request.plan, request.runtime
        while True:
            place = (await self._catalog.place(request.served, request.session, "")).place
            if await others_use(place, self._busy_share):
                continue
            plan = msgspec.structs.replace(plan, turn_id=new_turn_id())
            capture = Capture(plan, runtime.decoder, runtime.choices.read_as(plan.call))
            slot = progress.slot = place.load.slots.spare(self._busy_share)
            try:
                await generate_in_spare(slot, place, capture, runtime.vocabulary_size, self._clock)
            except CapacityRevoked:
                continue
            except UnsupportedParameter:
                if plan.sampling.constraint is None:
                    raise
                # An engine without grammars: the score is then read from the text.
                free = msgspec.structs.replace(plan.sampling, constraint=None)
                plan = msgspec.structs.replace(plan, sampling=free)
                continue
            except InvalidEngineReply as error:
                self._faults.note(place.engine.name, error.reason)
                raise
            except EngineUnavailable:
                self._swaps.recheck_engine(place.engine)
                raise
            capture.flush()
            return capture


def _with_longer_answers(run: RunView, most: int) -> RunView:
    """Return the run with the judge's bound on answers: its own is for its agents."""
    return msgspec.structs.replace(run, settings=run.settings.model_copy(update={"max_new_tokens": most}))


def _failure(error: BaseRlError, model: str | None) -> Exception:
    """Return the error by which the job ends its attempt."""
    message = f"the judge's model {model!r} cannot be asked: {error.message}"
    if isinstance(error, EngineUnavailable):
        return JobPostponed(message, seconds=_PAUSE_SECONDS)
    if isinstance(error, NotFound | RunArchived | InvalidRequest):
        return JobRefused(f"{message}; correct the judge, then retry the job")
    return JobFailure(message)
