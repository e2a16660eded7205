"""A run whose candidates answer prompts unseen, with a judge at a real server, on a store without engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection

from proxy.contract.turn import FinishReason, TurnState
from proxy.database.tables import AnswerPairRow
from proxy.gates.preferences import PreferenceJudge
from proxy.jobs.kinds import JobKind, JobKinds
from proxy.jobs.leasing import find_due
from proxy.jobs.running import JobRunner
from proxy.jobs.running import Outcome as JobOutcome
from proxy.judges.functions import Functions
from proxy.judges.models import JudgeModels
from proxy.judges.prompts import Prompts
from proxy.judges.tools import Tools
from proxy.outbound.client import Client
from proxy.outbound.secrets import SigningSecrets
from proxy.settings import JudgingSettings, OutboundSettings, ProviderSettings
from proxy.versions.answer_pairs import PREFERRING, AnswerPairs, UnseenAnswer
from tests.proxy.gates.conftest import Gated
from tests.proxy.jobs.world import Seen
from tests.proxy.judges.model_server import ModelServer, serving_model
from tests.proxy.judges.test_comparisons import longer
from tests.proxy.judges.world import Judged
from tests.proxy.turns.world import open_world

TASTE = {"kind": "pairwise", "model": "local/critic"}
ANSWERS = 20
SHADOW = {"policy": "gated", "shadow": {"share": 1.0, "answers": ANSWERS}, "preference": {"judge": "taste"}}


class Shadowed(Gated):
    """A run with its keeper and the judge `taste`, which prefers the longer answer and else the first one."""

    def __init__(self, *arguments: Any, judge: PreferenceJudge, model: ModelServer, judged: Judged) -> None:
        super().__init__(*arguments)
        self.model = model
        self.judged = judged
        world = self.world
        self.pairs = AnswerPairs(database=world.database, signals=world.signals, clock=world.clock)
        self._kinds = JobKinds([JobKind(name=PREFERRING, handler=judge.run, timeout_seconds=10)])

    async def candidate(self, parent: int = 0) -> int:
        """Commit a version and let it begin to answer prompts."""
        version = await self.commit(parent)
        await self.tend()
        return version

    async def pair(self, version: int, unseen: str, seen: str = "good", *, against: int = 0, **answer: Any) -> bool:
        """Record a pair of answers, and return whether further ones are wanted."""
        world = self.world
        world.clock.now += 0.01
        session_id = await world.session()
        record = world.record(session_id, version=against)
        record = msgspec.structs.replace(record, response={"choices": [{"text": seen}]})
        await world.store.record(record)
        values = {"state": TurnState.COMPLETE, "finish_reason": FinishReason.STOP, "output_tokens": 4, "seconds": 0.2}
        recorded = await self.pairs.record(
            await world.current_run(),
            UnseenAnswer(
                version=version,
                session_id=session_id,
                turn_id=record.turn.id,
                response={"choices": [{"text": unseen}]},
                **{**values, **answer},
            ),
        )
        return recorded.wants_more

    async def run_jobs(self) -> list[JobOutcome]:
        """Run the judge's jobs that are due, once, by a worker that knows nothing of those before."""
        world = self.world
        runner = JobRunner(
            world.database,
            self._kinds,
            world.signals,
            world.clock,
            worker="one",
            concurrency=8,
            lease_seconds=30,
            observer=Seen(),
        )
        ended: list[JobOutcome] = []
        while leases := await runner.lease(await world.database.read(partial(self._due, runner))):
            ended += await asyncio.gather(*(runner.start(lease) for lease in leases))
        return ended

    def _due(self, runner: JobRunner, connection: Connection) -> Any:
        now = self.world.clock()
        return find_due(connection, self._kinds, before=now, want=8, last_runs=runner.last_runs)

    async def rows(self) -> list[Any]:
        return await self.world.rows(AnswerPairRow)

    async def use(self, release: dict[str, Any], **judge: Any) -> None:
        config = {**self.world.run.settings.stored, "release": release, "judges": {"taste": {**TASTE, **judge}}}
        await self.world.set_run(config=config)


@asynccontextmanager
async def open_shadowed(database_url: str, directory: Path) -> AsyncIterator[Shadowed]:
    async with serving_model() as model, open_world(database_url) as world:
        model.answers = [longer]
        provider = {"base_url": model.url, "prompt_price": 1.0, "completion_price": 2.0}
        models = JudgeModels({"local": ProviderSettings.model_validate(provider)})
        client, judging, judged = Client(OutboundSettings()), JudgingSettings(), Judged()
        tools = Tools(
            models=models,
            client=client,
            secrets=SigningSecrets(b"i" * 32),
            functions=Functions(judging, in_proxy=True),
        )
        judge = PreferenceJudge(
            world.database, tools, Prompts(judging.prompts_dir), world.signals, world.clock, judged
        )
        try:
            here = Shadowed(world, directory, judge=judge, model=model, judged=judged)
            await here.use(SHADOW)
            yield here
        finally:
            await models.aclose()
            await client.aclose()
