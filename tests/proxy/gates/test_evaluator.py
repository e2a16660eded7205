"""A user's evaluator is called about the versions that the gate `evaluation` compares."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.gates.evaluator import Evaluator
from proxy.jobs.kinds import JobKinds
from proxy.jobs.leasing import find_due
from proxy.jobs.running import JobRunner
from proxy.outbound.client import Client
from proxy.outbound.secrets import SigningSecrets
from proxy.outbound.signing import signature
from proxy.settings import OutboundSettings, ReleaseSettings
from proxy.versions.steering import Decision
from tests.proxy.gates.conftest import Gated
from tests.proxy.jobs.world import Seen
from tests.proxy.outbound.targets import target
from tests.proxy.versions.publishing import steering_of

SECRETS = SigningSecrets(b"i" * 32)


def http(body: Any, status: str = "200 OK") -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status.encode(), len(text)) + text


def results(reward: float, tasks: int = 30) -> dict[str, Any]:
    return {"results": [{"task": f"t{task}", "reward": reward} for task in range(tasks)]}


class Called:
    """A run whose gate calls an evaluator on loopback, with the jobs that call it."""

    def __init__(self, gated: Gated, evaluator: Evaluator) -> None:
        self.gated = gated
        self.evaluator = evaluator
        self._kinds = JobKinds([evaluator.kind()])
        world = gated.world
        self._runner = JobRunner(
            world.database,
            self._kinds,
            world.signals,
            world.clock,
            worker="one",
            concurrency=8,
            lease_seconds=30,
            observer=Seen(),
        )

    async def run_jobs(self) -> list[str]:
        """Run the jobs that are due, once, and return how they ended."""
        world = self.gated.world
        found = await world.database.read(
            lambda connection: find_due(
                connection, self._kinds, before=world.clock(), want=100, last_runs=self._runner.last_runs
            )
        )
        leases = await self._runner.lease(found)
        return list(await asyncio.gather(*(self._runner.start(lease) for lease in leases)))

    async def waits_for(self) -> str:
        text: str = (await self.gated.finding(1, "evaluation")).text
        return text


@asynccontextmanager
async def called(gated: Gated, port: int, secrets: SigningSecrets = SECRETS) -> AsyncIterator[Called]:
    world = gated.world
    evaluation = {"suite": "held-out", "tasks": 30, "url": f"http://127.0.0.1:{port}/evaluate"}
    await gated.configure({"policy": "gated", "evaluation": evaluation, "timeout_seconds": 600})
    client = Client(OutboundSettings(allow=("127.0.0.1",)))
    evaluator = Evaluator(
        database=world.database,
        runs=world.runs,
        client=client,
        secrets=secrets,
        signals=world.signals,
        clock=world.clock,
    )
    try:
        yield Called(gated, evaluator)
    finally:
        await client.aclose()


async def test_the_evaluator_is_called_once_about_both_versions_and_its_results_decide(gated: Gated) -> None:
    async def evaluate(writer: asyncio.StreamWriter) -> None:
        # The last request is this one: nothing was awaited since it was recorded.
        version = json.loads(served.requests[-1].body)["version"]
        writer.write(http(results(1.0 if version == 0 else 0.2)))
        await writer.drain()

    async with target(evaluate) as served, called(gated, served.port) as here:
        await gated.commit(0)
        await gated.tend()
        await gated.tend()
        assert "the evaluator is being called about version 1; the evaluator is being" in await here.waits_for()
        assert await here.run_jobs() == ["done", "done"]
        bodies = {json.loads(request.body)["version"]: json.loads(request.body) for request in served.requests}
        assert bodies[1] == {
            "type": "version.evaluate",
            "run": "policy",
            "version": 1,
            "model": "policy@1",
            "suite": "held-out",
            "tasks": 30,
        }
        secret = here.evaluator.secret(gated.world.run)
        for request in served.requests:
            headers = request.headers
            assert headers["webhook-signature"] == signature(
                secret,
                event_id=headers["webhook-id"],
                timestamp=int(headers["webhook-timestamp"]),
                body=request.body,
            )
        await gated.tend()
        assert await gated.states() == ["serving", "rejected"]
        assert len(served.requests) == 2


async def test_an_evaluator_that_answers_later_posts_its_results(gated: Gated) -> None:
    async with target(http({}, "202 Accepted")) as served, called(gated, served.port) as here:
        await gated.commit(0)
        await gated.tend()
        assert await here.run_jobs() == ["done", "done"]
        await gated.tend()
        assert "the evaluator has answered about version 1" in await here.waits_for()
        assert await here.run_jobs() == [], "it is not asked again"
        run = await gated.world.current_run()
        for version in (0, 1):
            rows = [{"attempt": 0, "session_id": None, **one} for one in results(0.5)["results"]]
            await gated.gates.add_results(run, version, "held-out", rows)
        await gated.tend()
        assert await gated.serve() == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http({"results": []}), "results: List should have at least 1 item"),
        (http({"results": [{"task": "t0", "reward": "high"}]}), "results.0.reward"),
        (http("fine"), "the body"),
        (http(results(1.0), "500 Internal Server Error"), "the evaluator: it answered 500"),
        (http("x" * (1 << 20)), "more than 1 MiB"),
    ],
    ids=range(5),
)
async def test_the_gate_says_why_the_evaluator_gave_no_results_and_times_out_by_rule(
    gated: Gated, answer: bytes, message: str
) -> None:
    async with target(answer) as served, called(gated, served.port) as here:
        await gated.commit(0)
        await gated.tend()
        assert await here.run_jobs() == ["failed", "failed"]
        await gated.tend()
        assert "the evaluator is called again about version 1" in await here.waits_for()
        assert message in await here.waits_for()
        gated.world.clock.now += 600
        await gated.tend()
        assert await gated.states() == ["serving", "rejected"]
        (event,) = await gated.world.events("version.rejected")
        assert message in event["reason"]


async def test_a_refused_address_and_a_version_that_was_withdrawn(gated: Gated) -> None:
    async with called(gated, 1) as here:
        evaluation = {"suite": "held-out", "tasks": 30, "url": "http://127.0.0.2/"}
        await gated.configure({"policy": "gated", "evaluation": evaluation})
        await gated.commit(0)
        await gated.tend()
        run = await gated.world.current_run()
        await steering_of(gated.world).reject(run, 1, Decision(reason="no", by="key_1"))
        assert sorted(await here.run_jobs()) == ["dead", "done"]
        await gated.commit(0)
        await gated.tend()
        text = (await gated.finding(2, "evaluation")).text
        assert "the call of the evaluator about version 0 failed for good ('127.0.0.2' is a private" in text


async def test_a_worker_without_the_secret_leaves_the_call_to_another(gated: Gated) -> None:
    async with target() as served, called(gated, served.port, SigningSecrets(None)) as here:
        await gated.commit(0)
        await gated.tend()
        assert await here.run_jobs() == ["postponed", "postponed"]
        assert served.requests == []


def test_an_evaluator_needs_a_suite() -> None:
    with pytest.raises(ValueError, match=r"set evaluation\.suite as well"):
        ReleaseSettings.model_validate({"evaluation": {"url": "http://example.com/"}})
