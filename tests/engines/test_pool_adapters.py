"""Adapter runs of one trainer on one engine behind the whole proxy: swaps, proofs, more runs than adapters fit."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch

from proxy.contract.policy import Probe, weight_label
from proxy.database.tables import PolicyVersionRow
from proxy.engines.sglang import SglangEngine
from proxy.serving.proof import TOLERANCE
from proxy.settings import EngineSettings
from tests.engines.conftest import ADAPTERS, Models, Server
from tests.trainer.real_proxy import ADMIN, RUN, RealProxy, real_proxy
from trainer.assembly import Shared

_SECONDS = 60
_SWAPS = 3
# Steps large enough that each version's probe differs from the others' by more than the proof's bound.
_TRAINER: dict[str, Any] = {
    "api_key": ADMIN,
    "adapter": {"rank": 4, "publish": "adapter"},
    "optimizer": {"learning_rate": 3e-2, "warmup_steps": 0, "weight_decay": 0.0},
    # The model's context bounds what the fixtures write.
    "batch": {"max_tokens_per_microbatch": 64},
}


class Caller:
    """Calls a run with a key of its own, as its agents do."""

    def __init__(self, proxy: RealProxy, run: str) -> None:
        self._proxy = proxy
        self.run = run
        made = httpx.post(
            f"{proxy.url}/api/v1/keys",
            json={"kind": "run", "run": run},
            headers={"authorization": f"Bearer {ADMIN}"},
        )
        self._headers = {"authorization": f"Bearer {made.json()['key']}"}

    def call(self, model: str | None = None) -> httpx.Response:
        body = {
            "model": model or self.run,
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 4,
        }
        return httpx.post(
            f"{self._proxy.url}/v1/chat/completions", json=body, headers=self._headers, timeout=_SECONDS
        )

    def served_as(self, version: int) -> None:
        """Call until the answer comes from this version. Fail after a minute."""
        deadline = time.monotonic() + _SECONDS
        while True:
            answer = self.call()
            if answer.status_code == 200 and answer.json()["system_fingerprint"] == f"{self.run}@{version}":
                return
            assert time.monotonic() < deadline, (answer.text, self._proxy.problems())
            threading.Event().wait(0.05)


def probes(proxy: RealProxy) -> dict[str, Probe]:
    """Return the trainer's probe of every version, by the version's label."""

    async def read() -> dict[str, Probe]:
        rows = await proxy.world.rows(PolicyVersionRow)
        return {weight_label(row.run_id, row.version): msgspec.convert(row.probe, Probe) for row in rows if row.probe}

    return proxy.do(read())


async def difference(engine: SglangEngine, probe: Probe, adapter: str | None) -> float:
    """Return the mean difference between engine and trainer, in nats per token."""
    scored = await engine.score(probe.ids, adapter=adapter)
    pairs = zip(probe.logprobs, scored, strict=True)
    return sum(abs(one - other) for one, other in pairs) / len(probe.logprobs)


def test_two_runs_of_one_trainer_swap_on_one_engine(server: Server, models: Models, tmp_path: Path) -> None:
    shared = Shared(torch.device("cpu"))
    with real_proxy(tmp_path, models.a, server.url, "adapter") as proxy, ExitStack() as trainers:
        proxy.add_run("second")
        callers = [Caller(proxy, RUN), Caller(proxy, "second")]
        trained = {
            each.run: trainers.enter_context(proxy.trainer(run=each.run, shared=shared, **_TRAINER))
            for each in callers
        }
        for version in range(_SWAPS + 1):
            for caller in callers:
                caller.served_as(version)
                proxy.group([0.0, 1.0], version=version, run=caller.run)
                if version < _SWAPS:
                    trained[caller.run].loop.step()
        own, others = asyncio.run(measured(server, probes(proxy), heads(proxy, callers)))
        # Figures of both engines are in decision 0087: an engine in float32 differs by less than a thousandth.
        assert max(own) < 1e-3 < TOLERANCE < min(others), (own, others)
        more_runs_than_fit(proxy, callers)
        names = [
            weight_label(proxy.get("", run=each.run)["id"], version)
            for each in callers
            for version in range(_SWAPS + 1)
        ]
    asyncio.run(unload(server, names))


async def unload(server: Server, names: list[str]) -> None:
    """Unload the adapters, because other tests load whole weights into the same engine. Those that the engine has put
    aside are not in its list, so they are named."""
    engine = SglangEngine(server.url, EngineSettings(url=server.url))
    try:
        for name in names:
            await engine.unload_adapter(name)
    finally:
        await engine.aclose()


def heads(proxy: RealProxy, callers: list[Caller]) -> list[str]:
    return [weight_label(proxy.get("", run=each.run)["id"], _SWAPS) for each in callers]


async def measured(server: Server, known: dict[str, Probe], served: list[str]) -> tuple[list[float], list[float]]:
    """Return the differences of the served versions from their own probes, and from all other versions' and the base
    model's."""
    engine = SglangEngine(server.url, EngineSettings(url=server.url))
    try:
        own = [await difference(engine, known[label], label) for label in served]
        wrong = [None, *served]
        others = [
            await difference(engine, known[label], adapter)
            for label in served
            for adapter in wrong
            if adapter != label
        ]
    finally:
        await engine.aclose()
    return own, others


def more_runs_than_fit(proxy: RealProxy, callers: list[Caller]) -> None:
    """Runs that begin from a version of another one are all served, although their adapters do not fit together."""
    for number in range(ADAPTERS.loaded + 1):
        name = f"more-{number}"
        proxy.add_run(name, begin_from=f"{RUN}@{_SWAPS}")
        callers.append(Caller(proxy, name))
    for _ in range(2):
        for caller in callers:
            caller.served_as(_SWAPS if caller.run in (RUN, "second") else 0)
    assert not [problem for problem in proxy.problems() if "engine" in problem]
