"""Shadow answers: further answers to a prompt, in the spare capacity of engines, which its client does not see.

They begin once the call's own answer is recorded, and end when calls need the engine (`engines.spare`). Each is
recorded as a turn with the prompt of that answer, or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from hashlib import blake2b

import msgspec

from proxy.calls.capture import CallPlan, Capture
from proxy.calls.models import ServingVersions
from proxy.calls.observer import TurnObserver
from proxy.calls.recording import CallContext, TurnRecorder
from proxy.calls.sampling import for_choice
from proxy.calls.spare_generation import AnswerTasks, SpareAnswer, is_whole
from proxy.clock import Clock
from proxy.contract.identifiers import TurnId, new_turn_id
from proxy.contract.trajectory import Purpose
from proxy.engines.faults import EngineFaults
from proxy.engines.place import EnginePlace
from proxy.errors import BaseRlError, RateLimited
from proxy.lifecycle.judging import Comparison
from proxy.limits.service import Admission
from proxy.log import logger
from proxy.settings import JudgeKind
from proxy.turns.service import TrajectoryStore

# Each holds its prompt in memory while it waits.
_MOST_WAITING = 256

# Longer than the store may take to record an answer that came just in time.
_RECORDING_SECONDS = 15.0

_COMPARING = (JudgeKind.RELATIVE, JudgeKind.PAIRWISE)
"""Kinds of judges that compare answers to one prompt."""

_LOG = logger(__name__)


class _Dropped(Exception):
    """The shadow answer is not recorded. The argument is the reason, a label of the metrics."""


class ShadowAnswers:
    """The shadow answers that this process generates. Nothing waits for them."""

    def __init__(
        self,
        *,
        swaps: ServingVersions,
        recorder: TurnRecorder,
        trajectories: TrajectoryStore,
        clock: Clock,
        faults: EngineFaults,
        observer: TurnObserver | None,
    ) -> None:
        self._swaps = swaps
        self._recorder = recorder
        self._trajectories = trajectories
        self._clock = clock
        self._faults = faults
        self._observer = observer
        self._tasks = AnswerTasks()

    def offer(self, context: CallContext, plans: Collection[CallPlan]) -> None:
        """Begin the shadow answers of a call whose own answer has been recorded, if it is to have any."""
        settings = context.served.run.settings.shadow
        # Several choices, or several prompts, have siblings or no single prompt.
        if not settings.share or len(plans) != 1:
            return
        (plan,) = plans
        if not is_drawn(plan.turn_id, settings.share) or not _teaches(context, plan):
            return
        if len(self._tasks) >= _MOST_WAITING:
            self._drop("full", settings.samples)
            return
        group = _Group(settings.samples, self._comparison(context, plan))
        for number in range(1, settings.samples + 1):
            answer = self._answer(context, plan, number, group)
            self._tasks.begin(answer, plan.session_id, name=f"shadow of {plan.turn_id}")

    def forget(self, session_ids: Collection[str]) -> None:
        """Drop the shadow answers of erased sessions."""
        self._tasks.forget(session_ids)

    async def aclose(self) -> None:
        """Drop all shadow answers."""
        await self._tasks.aclose()

    async def _answer(self, context: CallContext, real: CallPlan, number: int, group: _Group) -> None:
        """Generate and record a shadow answer. The last one of its call lets judges compare them."""
        is_recorded = await self._recorded(context, real, number, group.comparison)
        group.recorded += is_recorded
        group.under_way -= 1
        if group.under_way or not group.recorded or group.comparison is None:
            return
        try:
            await self._trajectories.compare(group.comparison, context.session.id)
        except BaseRlError as error:
            _LOG.warning("shadow answers are compared late", turn=real.turn_id, error=error.message)

    def _comparison(self, context: CallContext, real: CallPlan) -> Comparison | None:
        """Return how the answers of a call are compared; None if its run has no judge that compares answers."""
        settings = context.served.run.settings
        judges = tuple(name for name, judge in settings.judges.items() if judge.kind in _COMPARING)
        # The end of the last answer hastens it. This time is for a process that dies before.
        due_at = self._clock() + settings.shadow.wait_seconds + _RECORDING_SECONDS
        return Comparison(judges=judges, of=real.turn_id, due_at=due_at) if judges else None

    async def _recorded(
        self, context: CallContext, real: CallPlan, number: int, comparison: Comparison | None
    ) -> bool:
        """Return whether the answer is recorded: it may be dropped."""
        run = context.served.run
        admission = None if context.admission is None else context.admission.again()
        try:
            async with asyncio.timeout(run.settings.shadow.wait_seconds):
                if admission is not None:
                    await _admit(admission)
                capture = await self._generated(context, real, number)
            await self._recorder.record_shadow(context, capture, of=real.turn_id, comparison=comparison)
        except TimeoutError:
            self._drop("late")
        except _Dropped as dropped:
            self._drop(str(dropped))
        except RateLimited:
            self._drop("limited")
        except asyncio.CancelledError:
            self._drop("ended")
            raise
        except BaseRlError as error:
            _LOG.info("a shadow answer failed", turn=real.turn_id, error=error.message)
            self._drop("failed")
        except Exception:  # noqa: BLE001  (nobody waits for this task: the error would be seen nowhere)
            _LOG.exception("a shadow answer failed", turn=real.turn_id)
            self._drop("failed")
        else:
            if admission is not None:
                admission.used(len(real.prompt.plan.input_ids) + capture.token_count)
            return True
        return False

    async def _generated(self, context: CallContext, real: CallPlan, number: int) -> Capture:
        """Return the whole answer."""
        run_id, session_id = context.served.run.id, context.session.id

        async def find_place() -> EnginePlace:
            place = self._swaps.find_place(run_id, session_id)
            if place is None:
                raise _Dropped("unserved")
            return place

        answer = SpareAnswer(
            context.runtime,
            lambda: msgspec.structs.replace(
                real, turn_id=new_turn_id(), choice=0, sampling=for_choice(real.sampling, number)
            ),
            busy_share=context.served.run.settings.shadow.busy_share,
            clock=self._clock,
            faults=self._faults,
        )
        capture = await answer.generate(find_place)
        if not is_whole(capture):
            raise _Dropped("aborted")
        return capture

    def _drop(self, reason: str, count: int = 1) -> None:
        if self._observer is not None:
            for _ in range(count):
                self._observer.shadow_dropped(reason=reason)


class _Group:
    """The shadow answers of one call: how many are under way, how many are recorded, and how they are compared."""

    def __init__(self, under_way: int, comparison: Comparison | None) -> None:
        self.under_way = under_way
        self.recorded = 0
        self.comparison = comparison


def is_drawn(turn_id: TurnId, share: float, *, purpose: bytes = b"") -> bool:
    """Return whether a call is among a share of all. It depends on nothing but its id and the purpose (16 bytes at
    most); calls are drawn for different purposes independently."""
    drawn = int.from_bytes(blake2b(turn_id.encode(), digest_size=8, person=purpose).digest())
    return drawn < share * 2**64


def _teaches(context: CallContext, plan: CallPlan) -> bool:
    """Return whether the trainer may learn from other answers to the call's prompt."""
    session = context.session
    return (
        context.unrecorded is None
        and session.purpose is Purpose.TRAIN
        and not session.has_ended
        and not context.served.is_older
        and not plan.sampling.is_greedy
        and plan.call.body.get("store") is not False
    )


async def _admit(admission: Admission) -> None:
    """Count a shadow answer in the limits. Raise RateLimited, or _Dropped if agents have used half of one already:
    what shadow answers use must not be missing for them."""
    if any(standing.left * 2 < standing.limit for standing in admission.standings()):
        raise _Dropped("limited")
    await admission.to_begin()
