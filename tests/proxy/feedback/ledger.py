"""Short methods for feedback and a trainer on a world's store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.auth.service import Principal, PrincipalKind
from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimedBatch, ClaimRequest
from proxy.contract.identifiers import KeyId, SessionId
from proxy.feedback.service import FeedbackItem, FeedbackService
from proxy.settings import RunSettings
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, publish, versions_of


class Ledger:
    """Feedback of the world's run, and a trainer of it."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        self.feedback = FeedbackService(world.database, world.signals, world.clock)
        self.claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
        self.versions = versions_of(world)
        self._admin = Principal(kind=PrincipalKind.ADMIN, key_id=KeyId("key"), run_id=None, session_id=None)

    async def session(self, **entries: float) -> SessionId:
        """Create a session with one turn, rewarded by name."""
        session_id = await self.world.session()
        await self.world.turn(session_id)
        if entries:
            await self.say(session_id, **entries)
        return session_id

    async def say(self, session_id: SessionId, turn: str | None = None, /, **entries: float) -> None:
        self.world.clock.now += 1
        item = FeedbackItem(entries=tuple(entries.items()), session_id=session_id, turn_id=turn, final=turn is None)
        await self.feedback.record(self._admin, [item])

    async def reconfigure(self, **settings: Any) -> None:
        """Change the rules as a start with another configuration does."""
        await self.world.runs.ensure(RunSettings(name="policy", model="base/model", **settings))
        await self.feedback.apply_changed_rules()

    async def claim(self, want: int = 1) -> ClaimedBatch:
        run = await self.world.current_run()
        return await self.claims.claim(run, ClaimRequest(trainer="t", want=want))

    async def commit(self, batch: ClaimedBatch) -> None:
        assert batch.claim_id is not None
        head = (await self.world.current_run()).head_version
        request = commit_request([batch.claim_id], head, publish(self.directory))
        await self.versions.commit(self.world.run, request)

    async def of(self, session_id: SessionId) -> tuple[str, float | None, float | None]:
        """Return training state, reward, and time of revision."""
        row = await self.world.session_row(session_id)
        return row.training, row.reward, row.revised_at
