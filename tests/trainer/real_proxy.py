"""The real proxy on a port, in a thread, with an engine without a model, and trainers of its run in this process.

Sessions are written directly into its store (`tests.proxy.turns.world`); all other traffic goes over HTTP.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import torch
import uvicorn
from pydantic import SecretStr
from sqlalchemy import update

from proxy.app import create_app
from proxy.clock import system_clock
from proxy.contract.identifiers import GroupId, SessionId
from proxy.contract.turn import FinishReason
from proxy.database.tables import Base, SessionRow
from proxy.runs.service import RunView
from proxy.settings import BootstrapSettings, EngineSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.tokens.models import write_model
from tests.proxy.turns.world import World
from tests.trainer.tiny import ALONE, VOCABULARY, InProcess, save_tiny_model, settings
from trainer.algorithm.logprobs import token_logprobs
from trainer.assembly import Shared, assemble, connect
from trainer.config import Precision, TrainerSettings
from trainer.models.archon.weights import load_archon
from trainer.models.passes import Rows
from trainer.proxy_client import ProxyClient

ADMIN, TRAINER, RUN = "rl-admin-real", "rl-trainer-real", "policy"

_Result = TypeVar("_Result")


class ScoringEngine(FakeEngine):
    """An engine whose answers are made up, but which scores with the weights that it was given: the proxy compares
    its scores of every version's probe with the trainer's."""

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> tuple[float, ...]:
        if adapter is not None or (Path(self.model_path) / "adapter_config.json").exists():
            return await super().score(ids, adapter)
        return await asyncio.to_thread(_logprobs, self.model_path, list(ids))


def _logprobs(directory: str, ids: list[int]) -> tuple[float, ...]:
    """Score on a thread. The model is not loaded by transformers, which replaces functions of its classes meanwhile:
    beside a load on the main thread, they would stay replaced for the rest of the process."""
    model = load_archon(Path(directory), Precision.FLOAT32, token_logprobs, activation_checkpointing=False)
    ids_T = torch.tensor(ids)
    places_T = torch.arange(len(ids))
    rows = Rows(ids_T[None], places_T[None], places_T[:-1], ids_T[1:], torch.ones(len(ids) - 1))
    (scores,) = model.score([rows])
    return tuple(scores.logprobs_N.tolist())


def write_real_model(directory: Path) -> Path:
    """Write a tiny model with a tokenizer that the proxy can load. Its embeddings cover only the first ids."""
    write_model(directory)
    save_tiny_model(directory)
    return directory


class RealProxy:
    """A running proxy. `base` is the base model's directory, `weights` the directory that trainers publish to, and
    `memory` the one in the place of shared memory.

    `engine_url` is the address of a running engine, in place of one without a model; `kind` is the runs' kind of
    weights, and `weights_url` an object store.
    """

    def __init__(
        self,
        directory: Path,
        base: Path,
        engine_url: str | None = None,
        kind: Literal["full", "adapter"] = "full",
        weights_url: str | None = None,
    ) -> None:
        self.base = base
        self._kind = kind
        self.weights, self.memory = directory / "weights", directory / "memory"
        self._worlds: dict[str, World] = {}
        self._numbers: dict[str, torch.Generator] = {}
        configured = Settings(
            server=ServerSettings(
                data_dir=directory / "data",
                weights_dir=self.weights,
                weights_memory_dir=self.memory,
                weights_url=weights_url,
            ),
            bootstrap=BootstrapSettings(admin_key=SecretStr(ADMIN), trainer_key=SecretStr(TRAINER)),
            engine=EngineSettings(health_interval_seconds=0.05, url=engine_url),
            run=RunSettings(name=RUN, model=str(base), weights=kind, group_timeout_seconds=0.01),
        )
        engine = ScoringEngine(lambda _request: [40, 41, 2], model_path=str(base)) if engine_url is None else None
        self.app = create_app(configured, engine=engine)
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, port=0, log_config=None, access_log=False, lifespan="on")
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="real-proxy")

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve())
        finally:
            self._loop.close()

    def start(self) -> None:
        self._thread.start()
        self.do(self._started())
        (server,) = self._server.servers
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._know(self.app.services.served.first_run)
        self.world = self._worlds[RUN]

    def _know(self, run: RunView) -> None:
        self._worlds[run.name] = World(self.app.services.database, system_clock, run)  # type: ignore[arg-type]
        self._numbers[run.name] = torch.Generator().manual_seed(len(self._numbers))

    def add_run(self, name: str, begin_from: str | None = None) -> None:
        """Add a run besides the one that is served, as an earlier start would have."""
        settings = {"name": name, "model": str(self.base), "group_timeout_seconds": 0.01, "from": begin_from}
        settings["weights"] = self._kind
        wanted = RunSettings.model_validate(settings)

        async def ensured() -> RunView:
            return await self.app.services.runs.ensure(wanted)

        self._know(self.do(ensured()))

    async def _started(self) -> None:
        async with asyncio.timeout(60):
            while not self._server.started:
                await asyncio.sleep(0.01)

    def stop(self) -> None:
        self.app.begin_stop()
        self._server.should_exit = True
        self._thread.join(60)

    def do(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the proxy's event loop."""
        while not self._loop.is_running():
            threading.Event().wait(0.01)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def get(self, path: str, run: str = RUN) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/runs/{run}{path}", headers={"authorization": f"Bearer {ADMIN}"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get_when(self, path: str, condition: Callable[[Any], bool]) -> Any:
        """Return the answer once it meets the condition, within 10 seconds: figures of a run are up to half a second
        old."""
        deadline = time.monotonic() + 10.0
        while not condition(answer := self.get(path)):
            assert time.monotonic() < deadline, answer
            threading.Event().wait(0.02)
        return answer

    def post(self, path: str) -> None:
        """Send a POST request with the admin key."""
        answer = httpx.post(f"{self.url}/api/v1/runs/{RUN}{path}", headers={"authorization": f"Bearer {ADMIN}"})
        assert answer.status_code == 200, answer.text

    def health(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/api/v1/health", headers={"authorization": f"Bearer {ADMIN}"})
        found: dict[str, Any] = answer.json()
        return found

    def problems(self) -> list[str]:
        found: list[str] = self.health()["problems"]
        return found

    def wait_for_version(self, version: int, going_on: Callable[[], bool]) -> None:
        """Wait until the head is that version. With `going_on` false, fail at once if no trainer is left to make
        it."""

        async def wait() -> None:
            signal = self.app.services.signals.versions
            while True:
                seen = signal.count
                if (await self.app.services.versions.head(self.app.services.served.first_run)).version >= version:
                    return
                assert going_on()
                await signal.wait(1.0, since=seen)

        self.do(wait())

    # What agents do

    def group(self, rewards: Sequence[float | None], *, version: int = 0, run: str = RUN) -> list[SessionId]:
        """Write a group of sessions of two turns each, by a policy of `version`, with random tokens."""
        group_id = self.do(self._worlds[run].group(size=len(rewards)))
        return [self.session(reward, version=version, group=group_id, run=run) for reward in rewards]

    def session(
        self,
        reward: float | None,
        *,
        version: int = 0,
        group: GroupId | None = None,
        turn_reward: float | None = None,
        highest: int = VOCABULARY,
        run: str = RUN,
        ends: tuple[FinishReason, FinishReason] = (FinishReason.STOP, FinishReason.STOP),
    ) -> SessionId:
        world, numbers = self._worlds[run], self._numbers[run]

        def ids(count: int, highest: int = VOCABULARY) -> list[int]:
            drawn: list[int] = torch.randint(highest - 32, highest, (count,), generator=numbers).tolist()
            return drawn

        async def make() -> SessionId:
            session = await world.session(group=group)
            first = await world.turn(
                session,
                prompt_ids=ids(3),
                output_ids=ids(4, highest),
                version=version,
                conversation="a",
                finish_reason=ends[0],
            )
            second = await world.turn(
                session,
                parent=first,
                prefix_tokens=7,
                prompt_ids=ids(2),
                output_ids=ids(5, highest),
                version=version,
                conversation="b",
                finish_reason=ends[1],
            )
            if turn_reward is not None:
                await world.reward(session, turn_reward, turn_id=second.turn.id, final=False)
            if reward is not None:
                await world.reward(session, reward)
            else:
                await world.end(session)
            return session

        return self.do(make())

    def set_session(self, session: SessionId, **values: Any) -> None:
        self.change(SessionRow, SessionRow.id == session, **values)

    def change(self, table: type[Base], condition: Any, **values: Any) -> None:
        """Change the store in a way that no client could."""

        async def write() -> None:
            await self.world.database.commit(
                lambda connection: connection.execute(update(table).where(condition).values(**values))
            )

        self.do(write())

    # Trainers

    def settings(self, **changes: Any) -> TrainerSettings:
        """Return settings of a trainer: the defaults, with small steps of visible effect."""
        given: dict[str, Any] = {
            "proxy_url": self.url,
            "api_key": TRAINER,
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 4, "weight_decay": 0.1},
            "batch": {"max_tokens_per_microbatch": 64},
        }
        for key, value in changes.items():
            given[key] = {**given.get(key, {}), **value} if isinstance(value, dict) else value
        return settings(self.weights, **given)

    @contextmanager
    def trainer(
        self, process: str = "a-process", run: str = RUN, shared: Shared | None = None, **changes: Any
    ) -> Iterator[InProcess]:
        """Start a trainer of a run that has resumed from the head; runs with one `shared` are of one process. At the
        end it just stops, like a killed one.

        The processor is in the mode of `parallel.mesh.join`: denormal numbers count as zero.
        """
        configured = self.settings(**changes)
        client = ProxyClient(self.url, configured.api_key.get_secret_value(), run)
        with ExitStack() as ending:
            connection = connect(client, configured, process, ending)
            shared = shared or Shared(torch.device("cpu"))
            parts = assemble(run, configured, ALONE, connection, client.head(), shared, ending)
            torch.set_flush_denormal(True)
            ending.callback(torch.set_flush_denormal, False)
            parts.loop.resume()
            yield InProcess(parts=parts, pauses=[])


@contextmanager
def real_proxy(
    directory: Path,
    base: Path,
    engine_url: str | None = None,
    kind: Literal["full", "adapter"] = "full",
    weights_url: str | None = None,
) -> Iterator[RealProxy]:
    proxy = RealProxy(directory, base, engine_url, kind, weights_url)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
