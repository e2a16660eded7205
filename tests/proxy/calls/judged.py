"""A run whose judge asks another run, on a real store with scripted engines and jobs that run when a test says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from proxy.calls.judging import JudgesByRuns
from proxy.calls.models import ModelCatalog
from proxy.calls.runtime import Runtimes
from proxy.contract.policy import weight_label
from proxy.engines.faults import EngineFaults
from proxy.engines.protocol import GenerateRequest
from proxy.http.workers import Workers
from proxy.judges.functions import Functions
from proxy.judges.models import JudgeModels
from proxy.judges.prompts import Prompts
from proxy.judges.tools import Tools
from proxy.outbound.client import Client
from proxy.outbound.secrets import SigningSecrets
from proxy.runs.service import RunView
from proxy.settings import JudgingSettings, OutboundSettings, RunSettings
from proxy.tokens.template import ChatTemplate
from tests.fakes.engine import FakeEngine
from tests.proxy.calls.world import World, open_world
from tests.proxy.judges import world as judges
from tests.proxy.judges.model_server import ModelServer, grade


class JudgedWorld:
    """`calls` are the agents' calls of the run `policy`, `judging` the judging jobs. The run `critic` is served by
    `engine`, which says `answer`."""

    def __init__(
        self, calls: World, judging: judges.World, critic: RunView, engine: FakeEngine, faults: EngineFaults
    ) -> None:
        self.calls = calls
        self.judging = judging
        self.critic = critic
        self.engine = engine
        self.faults = faults

    def prompt(self) -> str:
        """Return the text of the last prompt that the critic's engine got."""
        return self.calls.template.decode(list(self.engine.requests[-1].input_ids))


@asynccontextmanager
async def open_judged(
    directory: Path,
    template: ChatTemplate,
    url: str,
    *,
    model: str = "run:critic",
    busy_share: float = 0.0,
    answer: str = grade(0.75, "right, and short"),
    **judge: Any,
) -> AsyncIterator[JudgedWorld]:
    taste = {"model": model, "rubric": "Is the answer right?", **judge}
    async with open_world(directory, template, {"judges": {"taste": taste}}, url=url) as calls:
        store = calls.store
        # One that bounds its agents' answers more than the judge does.
        critic = await store.runs.ensure(RunSettings(name="critic", model="base/model", max_new_tokens=1))
        ids = [*template.encode(answer), template.stop_ids[0]]

        def script(_: GenerateRequest) -> list[int]:
            return ids

        engine = FakeEngine(script, label=weight_label(critic.id, 0), address="fake://critic")
        calls.swaps.engines[critic.id] = engine
        faults, workers = EngineFaults(store.clock), Workers(1)
        runtimes = Runtimes(
            trajectories=calls.trajectories,
            workers=workers,
            clock=store.clock,
            load_template=lambda _model, *, allow_control_tokens: template,
        )
        by_runs = JudgesByRuns(
            runs=store.runs,
            catalog=ModelCatalog(store.runs, calls.swaps, store.clock),
            runtimes=runtimes,
            swaps=calls.swaps,
            clock=store.clock,
            faults=faults,
            busy_share=busy_share,
        )
        client = Client(OutboundSettings())
        tools = Tools(
            models=JudgeModels({}, by_runs),
            client=client,
            secrets=SigningSecrets(judges.SECRET),
            functions=Functions(JudgingSettings(), in_proxy=True),
        )
        try:
            yield JudgedWorld(calls, judges.World(store, ModelServer(), tools, Prompts(None)), critic, engine, faults)
        finally:
            await runtimes.aclose()
            workers.close()
            await client.aclose()
