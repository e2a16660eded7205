"""Further answers to the prompts of calls, which no caller sees: for learning, and for a candidate's gates."""

from __future__ import annotations

from collections.abc import Collection

from proxy.calls.call import Answer
from proxy.calls.candidate_answers import CandidateAnswers
from proxy.calls.capture import CallPlan
from proxy.calls.models import ServingVersions
from proxy.calls.observer import TurnObserver
from proxy.calls.recording import CallContext, TurnRecorder
from proxy.calls.shadows import ShadowAnswers
from proxy.clock import Clock
from proxy.engines.faults import EngineFaults
from proxy.turns.service import TrajectoryStore
from proxy.versions.answer_pairs import AnswerPairs


class UnseenAnswers:
    """The unseen answers that this process generates. No call waits for them."""

    def __init__(
        self,
        *,
        swaps: ServingVersions,
        recorder: TurnRecorder,
        trajectories: TrajectoryStore,
        pairs: AnswerPairs,
        clock: Clock,
        faults: EngineFaults,
        observer: TurnObserver | None,
    ) -> None:
        self._shadows = ShadowAnswers(
            swaps=swaps, recorder=recorder, trajectories=trajectories, clock=clock, faults=faults, observer=observer
        )
        self._candidates = CandidateAnswers(
            swaps=swaps, recorder=recorder, pairs=pairs, clock=clock, faults=faults, observer=observer
        )

    def offer(self, context: CallContext, plans: Collection[CallPlan], answer: Answer) -> None:
        """Begin the further answers of a call whose own answer has been recorded, if the call is drawn."""
        self._shadows.offer(context, plans)
        self._candidates.offer(context, plans, answer)

    def forget(self, session_ids: Collection[str]) -> None:
        """Drop the answers to prompts of erased sessions."""
        self._shadows.forget(session_ids)
        self._candidates.forget(session_ids)

    async def aclose(self) -> None:
        """Drop all answers."""
        await self._shadows.aclose()
        await self._candidates.aclose()
