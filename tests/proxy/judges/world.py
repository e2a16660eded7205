"""Judges on a real store, with a model at a real server and jobs that run when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import select, update

from proxy.contract.states import Outcome
from proxy.database.rows import AnyRow
from proxy.database.tables import JobRow, JudgementRow, RewardRow, RunRow, TurnRow
from proxy.jobs.kinds import JobKind, JobKinds
from proxy.jobs.leasing import find_due
from proxy.jobs.running import JobRunner
from proxy.jobs.running import Outcome as JobOutcome
from proxy.jobs.sweeping import JobSweeper
from proxy.judges.directory import JudgeDirectory
from proxy.judges.functions import Functions
from proxy.judges.models import JudgeModels
from proxy.judges.prompts import Prompts
from proxy.judges.service import JudgingService
from proxy.judges.tools import Tools
from proxy.judges.trials import JudgeTrials
from proxy.judges.views import Rejudging
from proxy.lifecycle.judging import JUDGING, enqueue_judging
from proxy.outbound.client import Client
from proxy.outbound.secrets import SigningSecrets
from proxy.runs.service import RunView
from proxy.sessions.opening import SessionSpec
from proxy.settings import JudgingSettings, OutboundSettings, ProviderSettings, RunSettings
from tests.proxy.jobs.world import Seen
from tests.proxy.judges.model_server import ModelServer, serving_model
from tests.proxy.store import Store, open_store

KEY = "sk-judge"
SECRET = b"i" * 32


class Judged:
    """An observer that collects outcomes of judgements."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.tokens = 0

    def session_judged(self, *, outcome: str, prompt_tokens: int, completion_tokens: int) -> None:
        self.outcomes.append(outcome)
        self.tokens += prompt_tokens + completion_tokens

    def rewards_recorded(self, entries: int, *, effect: str) -> None:
        assert entries >= 1
        assert effect


class World:
    def __init__(self, store: Store, model: ModelServer, tools: Tools, prompts: Prompts) -> None:
        self.store = store
        self.model = model
        self.judged = Judged()
        self.service = JudgingService(store.database, tools, prompts, store.signals, store.clock, self.judged)
        self.judges = JudgeDirectory(store.database, prompts, store.signals, store.clock)
        self.trials = JudgeTrials(store.database, tools, prompts, tools.secrets, store.clock)
        self.kinds = JobKinds([JobKind(name=JUDGING, handler=self.service.run, timeout_seconds=10)])
        self.sweeper = JobSweeper(store.database, self.kinds, store.signals, store.clock)
        self.runner = JobRunner(
            store.database,
            self.kinds,
            store.signals,
            store.clock,
            worker="one",
            concurrency=8,
            lease_seconds=30,
            observer=Seen(),
        )

    async def session(self, *texts: str, answer: str = "It is 4.", end: bool = True, **spec: Any) -> str:
        """Make a session with one turn, and end it."""
        (opened,) = await self.store.sessions.create(self.store.run, SessionSpec(**spec))
        turn_id = await self.store.add_turn(opened.id)
        messages = [{"role": "user", "content": text} for text in texts or ("What is 2 + 2?",)]
        values = {"messages": messages, "response": {"choices": [{"text": answer}]}}
        statement = update(TurnRow).where(TurnRow.id == turn_id).values(**values)
        await self.store.database.commit(lambda connection: connection.execute(statement))
        if end:
            await self.end(opened.id)
        return opened.id

    async def turn(
        self,
        session_id: str,
        messages: list[dict[str, Any]],
        answer: str,
        *,
        parent: str | None = None,
        state: str = "complete",
    ) -> str:
        """Add a turn with this answer to `messages`, which continues the turn `parent`."""
        turn_id = await self.store.add_turn(session_id, state=state)
        values = {"messages": messages, "response": {"choices": [{"text": answer}]}}
        if parent is not None:
            values |= {"parent_id": parent, "continuation": "exact"}
        statement = update(TurnRow).where(TurnRow.id == turn_id).values(**values)
        await self.store.database.commit(lambda connection: connection.execute(statement))
        return turn_id

    async def end(self, session_id: str, outcome: Outcome = Outcome.COMPLETED) -> None:
        await self.store.sessions.end(self.store.owner, session_id, outcome)

    async def again(self, session_id: str, mark: str) -> None:
        """Enqueue another judging of a session."""
        now = self.store.clock()
        await self.store.database.commit(
            lambda connection: enqueue_judging(
                connection, self.store.run.id, ["taste"], session_id, now=now, again=mark
            )
        )

    async def run(self) -> RunView:
        return await self.store.runs.by_id(self.store.run.id)

    async def rejudge(self, session_ids: list[str] | None = None) -> Rejudging:
        return await self.judges.rejudge(await self.run(), "taste", session_ids)

    async def run_jobs(self) -> list[JobOutcome]:
        """Run the jobs that are due, once, and return how they ended."""
        found = await self.store.database.read(
            lambda connection: find_due(
                connection, self.kinds, before=self.store.clock(), want=100, last_runs=self.runner.last_runs
            )
        )
        leases = await self.runner.lease(found)
        return list(await asyncio.gather(*(self.runner.start(lease) for lease in leases)))

    async def rows(self, table: type[Any]) -> list[AnyRow]:
        columns = table.__table__.columns
        order = table.__table__.c["sequence" if table is RewardRow else "id"]
        return await self.store.database.read(
            lambda connection: list(connection.execute(select(*columns).order_by(order)))
        )

    async def jobs(self) -> list[AnyRow]:
        return await self.rows(JobRow)

    async def rewards(self) -> list[AnyRow]:
        return await self.rows(RewardRow)

    async def judgements(self) -> list[AnyRow]:
        return await self.rows(JudgementRow)

    async def configure(self, **changes: Any) -> None:
        """Change the settings of the judge `taste`; `None` removes the judge."""
        run = await self.store.runs.by_id(self.store.run.id)
        config = run.settings.stored
        config["judges"]["taste"] |= changes
        if changes.get("model", "") is None:
            del config["judges"]["taste"]
        statement = update(RunRow).values(config=config)
        await self.store.database.commit(lambda connection: connection.execute(statement))


@asynccontextmanager
async def open_world(
    database_url: str,
    /,
    *,
    run: dict[str, Any] | None = None,
    judging: JudgingSettings | None = None,
    in_proxy: bool = False,
    provider: str = "local",
    structured: bool = True,
    **judge: Any,
) -> AsyncIterator[World]:
    """Open a store whose run has the judge `taste`, as a worker or as a proxy sees it."""
    judging = judging or JudgingSettings()
    async with serving_model() as model:
        taste = judge if judge.get("kind") else {"rubric": "Is the answer right?", **judge}
        if not {"url", "function"} & set(judge):
            taste = {"model": "local/critic", **taste}
        settings = RunSettings.model_validate(
            {"name": "policy", "model": "base/model", "judges": {"taste": taste}, **(run or {})}
        )
        address = (
            {"base_url": model.url, "prompt_price": 1.0, "completion_price": 2.0}
            if provider == "local"
            else {"api_base": model.url}
        )
        models = JudgeModels(
            {provider: ProviderSettings.model_validate({"api_key": KEY, "structured": structured, **address})}
        )
        client = Client(OutboundSettings(allow=("127.0.0.1",)))
        tools = Tools(
            models=models,
            client=client,
            secrets=SigningSecrets(SECRET),
            functions=Functions(judging, in_proxy=in_proxy),
        )
        async with open_store(database_url, settings) as store:
            try:
                yield World(store, model, tools, Prompts(judging.prompts_dir))
            finally:
                await models.aclose()
                await client.aclose()
