"""Both engines as processes, started by the launch plans. Every test begins with model `a` loaded and idle."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import uvloop
from transformers import AutoModelForCausalLM

from proxy.cli.addresses import random_free_port
from proxy.engines.launch import AdapterBounds, LaunchPlan, embedded_plan, sglang_cpu_plan, wait_until_ready
from proxy.engines.protocol import PauseMode
from proxy.engines.sglang import SglangEngine
from proxy.settings import ConfigurationError, EngineSettings, load_settings
from tests.engines.generating import END_ID, NEVER_END
from tests.engines.tiny_model import make_model

SGLANG_TIMEOUT = 400
STOP_SECONDS = 30
CHUNK = 64
"""Tokens of a prompt that SGLang computes at once: so few that a swap comes in the middle of long prompts."""
NOBODY = "http://127.0.0.1:9"
"""An address where nothing listens: systems do not assign this port."""
ADAPTERS = AdapterBounds(loaded=4, rank=8)
IDLE_SECONDS = 40
"""On a busy machine an engine may check only every few seconds whether a client is still connected."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the tests of connections on both event loops: their transports differ, and the proxy uses uvloop."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name == "test_connections.py":
        factories["uvloop"] = uvloop.new_event_loop
    return factories


def pytest_itemcollected(item: pytest.Item) -> None:
    """Group the tests of one engine, so that one worker runs them with one process."""
    if isinstance(item, pytest.Function) and "server" in item.fixturenames:
        kind = item.callspec.params.get("server", "scripted") if hasattr(item, "callspec") else "scripted"
        item.add_marker(pytest.mark.xdist_group(f"engine-{kind}"))


class Models(NamedTuple):
    """Two models of one shape, and one with a different shape."""

    a: Path
    b: Path
    broken: Path


class Server(NamedTuple):
    """A running engine. `exactness` bounds the difference to transformers' log-probabilities."""

    kind: str
    url: str
    exactness: float
    log: Path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    broken = root / "broken"
    make_model(broken, seed=3, hidden=32)
    return Models(make_model(root / "a", seed=1), make_model(root / "b", seed=2), broken)


class Reference:
    """Log-probabilities by one whole forward pass of transformers, without any cache, for requests made by `ask`:
    its bias against the end token belongs to the distribution that is sampled from."""

    def __init__(self, path: Path) -> None:
        network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.network = network.eval()

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """`[len(ids), vocabulary]`, row i for the token after `ids[: i + 1]`."""
        with torch.no_grad():
            logits = self.network(input_ids=torch.tensor([ids])).logits[0].float()
        logits[:, END_ID] += NEVER_END[str(END_ID)]
        return torch.log_softmax(logits / temperature, dim=-1)

    def of_output(self, prompt: tuple[int, ...], output: tuple[int, ...], temperature: float = 1.0) -> list[float]:
        rows = self.logprobs([*prompt, *output], temperature)[len(prompt) - 1 : -1]
        values: list[float] = rows.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
        return values

    def plain(self, ids: tuple[int, ...]) -> list[float]:
        """Return the log-probability of every id after the first, without the bias of `ask`."""
        with torch.no_grad():
            rows = self.network(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        values: list[float] = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return values

    def greedy(self, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logprobs(ids)[-1].argmax()))
        return tuple(ids[len(prompt) :])

    def greedy_after(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> tuple[int, ...]:
        """Return the most probable token after each beginning of `output`, by a single pass: these are `output`
        itself if and only if it is the greedy answer."""
        rows = self.logprobs([*prompt, *output])[len(prompt) - 1 : -1]
        return tuple(rows.argmax(dim=-1).tolist())


@pytest.fixture(scope="session")
def reference(models: Models) -> Reference:
    return Reference(models.a)


@pytest.fixture(scope="session")
def reference_b(models: Models) -> Reference:
    return Reference(models.b)


def sglang_venv() -> Path:
    return load_settings().engine.sglang_venv


def plan_of(kind: str, model: Path, *flags: str) -> LaunchPlan:
    """Return the plan for an engine of model `a`; `flags` are further ones for SGLang."""
    port = random_free_port("127.0.0.1")
    if kind == "embedded":
        return embedded_plan(model=str(model), port=port, weight_label="a", adapters=ADAPTERS)
    try:
        return sglang_cpu_plan(
            model=str(model),
            port=port,
            venv=sglang_venv(),
            weight_label="a",
            adapters=ADAPTERS,
            flags=(f"--chunked-prefill-size={CHUNK}", *flags),
        )
    except ConfigurationError as error:
        if os.environ.get("BASE_RL_REQUIRE_SGLANG") == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(SGLANG_TIMEOUT)]),
    ],
)
def server(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    plan = plan_of(request.param, models.a)
    log = tmp_path_factory.mktemp("engine") / f"{request.param}.log"
    with started(plan, log):
        yield Server(request.param, plan.url, 1e-4 if request.param == "embedded" else 1e-3, log)


@contextmanager
def started(plan: LaunchPlan, log: Path) -> Iterator[None]:
    """Run an engine, which is ready within this block."""
    with log.open("wb") as output:
        process = subprocess.Popen(plan.argv, env={**os.environ, **plan.env}, stdout=output, stderr=subprocess.STDOUT)
    try:
        ready = wait_until_ready(plan.url, timeout=300, process_alive=lambda: process.poll() is None)
        asyncio.run(ready)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
async def engine(server: Server, models: Models) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(server.url, EngineSettings(url=server.url))
    await _as_started(engine, models)
    yield engine
    # Tests with a proxy of their own do not use this fixture, and take an engine by its path for one with that model.
    await _as_started(engine, models)
    await engine.aclose()


async def _as_started(engine: SglangEngine, models: Models) -> None:
    await engine.pause(PauseMode.ABORT)
    await engine.resume()
    info = await engine.info()
    for name in info.adapter_names:
        await engine.unload_adapter(name)
    if info.weight_label != "a":
        await engine.load_weights(str(models.a), "a")


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


async def becomes_idle(http: httpx.AsyncClient) -> bool:
    """Return True once the engine flushes its cache, which it does only while no request runs or waits."""
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            while (await http.post("/flush_cache")).status_code != httpx.codes.OK:
                await asyncio.sleep(0.05)
    except TimeoutError:
        return False
    return True
