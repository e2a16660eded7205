"""A candidate's answers to a share of the prompts of live calls, for its gates (`[run.release.shadow]`).

They begin once the call's own answer is recorded, in the spare capacity of the candidate's engine, and end when calls
need it. No caller sees one, none is a turn, none counts in the limits, and what fails or takes long is dropped or
recorded as a failure of the candidate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec

from proxy.calls.call import Answer
from proxy.calls.capture import CallPlan, Capture
from proxy.calls.models import ServingVersions
from proxy.calls.observer import TurnObserver
from proxy.calls.recording import CallContext, TurnRecorder
from proxy.calls.shadows import is_drawn
from proxy.calls.spare_generation import AnswerTasks, SpareAnswer, is_whole
from proxy.clock import Clock
from proxy.contract.identifiers import new_turn_id
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import TurnState
from proxy.engines.faults import EngineFaults
from proxy.engines.place import EnginePlace
from proxy.errors import BaseRlError, EngineFailed, InvalidEngineReply
from proxy.log import logger
from proxy.versions.answer_pairs import AnswerPairs, UnseenAnswer

# Each holds its prompt in memory while it waits. Further ones are dropped: a gate needs some hundred pairs, not all.
_MOST_WAITING = 32

_PURPOSE = b"candidate"

_LOG = logger(__name__)


class _Dropped(Exception):
    """The answer is not recorded. The argument is the reason, a label of the metrics."""


class CandidateAnswers:
    """The answers of candidates that this process generates. Nothing waits for them."""

    def __init__(
        self,
        *,
        swaps: ServingVersions,
        recorder: TurnRecorder,
        pairs: AnswerPairs,
        clock: Clock,
        faults: EngineFaults,
        observer: TurnObserver | None,
    ) -> None:
        self._swaps = swaps
        self._recorder = recorder
        self._pairs = pairs
        self._clock = clock
        self._faults = faults
        self._observer = observer
        self._tasks = AnswerTasks()
        self._complete: dict[str, tuple[int, int]] = {}
        """The candidate and the serving version of which a run has enough pairs: nothing more is generated for them.
        After a restart, one answer more is generated to find that out again."""

    def offer(self, context: CallContext, plans: Collection[CallPlan], answer: Answer) -> None:
        """Let the candidate answer the prompt of a call whose own answer has been recorded, if the call is drawn."""
        run = context.served.run
        version = self._swaps.shadow(run.id)
        # Several choices, or several prompts, have no single answer to compare with.
        if version is None or len(plans) != 1 or not _is_live(context):
            return
        (plan,) = plans
        serving = answer.choices[0].version
        if serving is None or serving != self._swaps.serving(run.id) or serving == version:
            return  # a canary, a held version, or one that was replaced meanwhile
        if plan.call.body.get("store") is False or self._complete.get(run.id) == (version, serving):
            return
        if not is_drawn(plan.turn_id, run.settings.release.shadow.share, purpose=_PURPOSE):
            return
        if len(self._tasks) >= _MOST_WAITING:
            self._count("full")
            return
        self._tasks.begin(
            self._answer(context, plan, version, serving), plan.session_id, name=f"candidate for {plan.turn_id}"
        )

    def forget(self, session_ids: Collection[str]) -> None:
        """Drop the answers to prompts of erased sessions."""
        self._tasks.forget(session_ids)

    async def aclose(self) -> None:
        """Drop all answers."""
        await self._tasks.aclose()

    async def _answer(self, context: CallContext, real: CallPlan, version: int, serving: int) -> None:
        """Generate and record an answer, or drop it."""
        run = context.served.run
        try:
            unseen = await self._generated(context, real, version)
            recorded = await self._pairs.record(run, unseen)
            if not recorded.wants_more:
                self._complete[run.id] = (version, serving)
            if not recorded.is_recorded:
                raise _Dropped("unwanted")
        except _Dropped as dropped:
            self._count(str(dropped))
        except asyncio.CancelledError:
            self._count("ended")
            raise
        except BaseRlError as error:
            # The engine is away, or the version is decided: neither says anything about the candidate's answers.
            _LOG.info("a candidate's answer was dropped", turn=real.turn_id, version=version, error=error.message)
            self._count("unserved")
        except Exception:  # noqa: BLE001  (nobody waits for this task: the error would be seen nowhere)
            _LOG.exception("a candidate's answer was dropped", turn=real.turn_id, version=version)
            self._count("broken")
        else:
            self._count("recorded" if unseen.state is TurnState.COMPLETE else "failed")

    async def _generated(self, context: CallContext, real: CallPlan, version: int) -> UnseenAnswer:
        """Return the candidate's answer, a failed one included. Raise _Dropped without one."""
        run, wait = context.served.run, context.served.run.settings.release.shadow.wait_seconds
        loop = asyncio.get_running_loop()
        due = loop.time() + wait
        limit = asyncio.timeout_at(due)

        async def find_place() -> EnginePlace:
            return await self._swaps.older_place(run, version, real.session_id)

        answer = SpareAnswer(
            context.runtime,
            lambda: msgspec.structs.replace(real, turn_id=new_turn_id()),
            busy_share=run.settings.release.shadow.busy_share,
            clock=self._clock,
            faults=self._faults,
            # The wait for a slot has the limit `due`. An attempt that has a slot gets the same time for itself, or
            # the answers of a candidate that never ends would be dropped instead of counted.
            begins=lambda: limit.reschedule(loop.time() + wait),
            revoked=lambda: limit.reschedule(due),
        )
        failure = None
        try:
            async with limit:
                await answer.generate(find_place)
        except TimeoutError:
            if answer.begun_at is None:
                raise _Dropped("late") from None
            failure = f"no end after {wait:g} seconds"
        except (EngineFailed, InvalidEngineReply) as error:
            if answer.begun_at is None:  # the engine could not load the candidate
                raise
            failure = error.message
        assert answer.capture is not None, "an attempt has begun"
        return await self._unseen(context, real, version, answer, answer.capture, failure)

    async def _unseen(
        self,
        context: CallContext,
        real: CallPlan,
        version: int,
        answer: SpareAnswer,
        capture: Capture,
        failure: str | None,
    ) -> UnseenAnswer:
        begun_at = answer.begun_at
        assert begun_at is not None, "the newest attempt had a slot"
        seconds = max(0.0, self._clock() - begun_at)
        if failure is None and not is_whole(capture):
            raise _Dropped("aborted")
        capture.failure = failure
        record = await self._recorder.unseen(context, capture, failed=failure is not None)
        turn = record.turn
        if {span.version for span in turn.spans} - {version}:
            raise _Dropped("swapped")  # its engine has loaded another version meanwhile
        return UnseenAnswer(
            version=version,
            session_id=real.session_id,
            turn_id=real.turn_id,
            state=TurnState.COMPLETE if failure is None else TurnState.FAILED,
            finish_reason=turn.finish_reason,
            output_tokens=len(turn.output_ids),
            seconds=seconds,
            response=record.response,
        )

    def _count(self, outcome: str) -> None:
        if self._observer is not None:
            self._observer.candidate_answered(outcome=outcome)


def _is_live(context: CallContext) -> bool:
    """Return whether the call is recorded live traffic that left the choice of the version to the proxy."""
    return context.unrecorded is None and context.session.purpose is Purpose.TRAIN and not context.served.is_named
