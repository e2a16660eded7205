"""Adapter swaps under load: `python -m benchmarks.pool.adapters`, or `make bench-adapters`.

Agents stream answers from an adapter run while one version after another is committed and served: 500 on the embedded
engine, 50 on the real SGLang. Blocks of swaps and of streams without any alternate, so that other work on the machine
hits both alike. Then blocks with a version every 2 seconds alternate with blocks without any, for the tokens per
second. Afterwards the log-probabilities of every recorded token are computed again by transformers, under
the version that the turn names and under the version before it: the first must agree, the second must not.

Writes `benchmarks/results/adapters.json`, each engine when it is finished; `--engine` measures one alone. The exit
status is 0 if the targets were reached. `--short` makes a few swaps and writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.machine import describe
from benchmarks.pool.installation import CHECKPOINT, HOST, Installation, installed, quoted
from benchmarks.pool.streams import Streamed, stream_chat
from benchmarks.pool.versions import NEVER_ENDS, RANK, Versions
from benchmarks.proxy.measures import quantile
from benchmarks.targets import Target, target_rows
from proxy.cli.addresses import random_free_port
from proxy.cli.supervisor import Part
from proxy.contract.arrays import unpack_ids, unpack_logprobs
from proxy.contract.claim import CommitRequest
from proxy.engines.launch import AdapterBounds, LaunchPlan, embedded_plan, sglang_cpu_plan
from proxy.settings import load_settings
from trainer.proxy_client import ProxyClient

RESULT = Path(__file__).parents[1] / "results" / "adapters.json"
RUN = "policy"
SWAPS = {"embedded": 500, "sglang": 50}
SHORT_SWAPS = 6
BLOCKS = 10
"""Blocks of swaps, each after a block of streams without swaps that takes as long as the swaps before, or a while."""
STREAMS = 8
TOKENS = 64
LOADED = 8
"""Adapters that the engine has in memory: fewer than are committed while the old ones wait to be unloaded."""
SAME = 0.01
"""Largest difference of log-probabilities that rounding makes, in nats; SGLang's is 0.0001 at most."""
RATE_BLOCKS, RATE_BLOCK_S, RATE_EVERY_S = 4, 20.0, 2.0
"""Blocks of each kind in which tokens are counted, their seconds, and the seconds from one version to the next."""
_FIRST_BLOCK_S, _SHORT_BLOCK_S = 15.0, 5.0
_LONGEST_CALM_S = 20.0
_SERVED_S = 120.0


@dataclass
class Agents:
    """Agents that stream one answer after another, each in a session of its own, until `over` is set."""

    port: int
    key: str
    answers: list[tuple[float, Streamed]] = field(default_factory=list)
    """Every answer with the time at which its call was sent."""
    over: bool = False

    async def work(self) -> None:
        async with asyncio.TaskGroup() as agents:
            for number in range(STREAMS):
                agents.create_task(self._agent(number))

    async def _agent(self, number: int) -> None:
        for attempt in itertools.count():
            if self.over:
                return
            began = time.perf_counter()
            question = {"role": "user", "content": f"Agent {number}, task {attempt}: what is {attempt % 97} plus 5?"}
            answer = await stream_chat(
                self.port,
                self.key,
                [question],
                session=f"agent-{number}-{attempt}",
                model=RUN,
                max_tokens=TOKENS,
                logit_bias=NEVER_ENDS,
            )
            self.answers.append((began, answer))


def gaps_between(answers: Sequence[tuple[float, Streamed]], since: float, until: float) -> list[float]:
    """Return the gaps of all streams that ended between two times."""
    return [
        after - before
        for _, answer in answers
        for before, after in itertools.pairwise(answer.times)
        if since <= before and after < until
    ]


async def swap(installation: Installation, client: ProxyClient, request: CommitRequest) -> float:
    """Commit a version; return the seconds until new calls get it. Raise TimeoutError."""
    began = time.perf_counter()
    reply = await asyncio.to_thread(client.commit, request)
    async with asyncio.timeout(_SERVED_S):
        while True:
            answer = await installation.admin.get(f"/api/v1/runs/{RUN}")
            if answer.json()["serving_version"] == reply.version:
                return time.perf_counter() - began
            await asyncio.sleep(0.05)


@dataclass
class Rate:
    """Blocks with a version every few seconds, and as many without any. `requests` are the versions of all blocks."""

    requests: Sequence[CommitRequest]
    blocks: int
    block_s: float
    phases: dict[bool, list[tuple[float, float]]] = field(default_factory=lambda: {False: [], True: []})
    """Begin and end of each block, by whether it has versions."""

    @staticmethod
    def versions(blocks: int, block_s: float) -> int:
        """Return how many versions the blocks take."""
        return blocks * int(block_s / RATE_EVERY_S)

    async def measure(self, installation: Installation, client: ProxyClient) -> None:
        requests = iter(self.requests)
        for _ in range(self.blocks):
            for swaps in (False, True):
                began = time.perf_counter()
                until = began + self.block_s
                while swaps and (due := time.perf_counter() + RATE_EVERY_S) <= until:
                    await swap(installation, client, next(requests))
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await asyncio.sleep(max(0.0, until - time.perf_counter()))
                self.phases[swaps].append((began, time.perf_counter()))

    def ratio(self, answers: Sequence[tuple[float, Streamed]]) -> float:
        """Return the tokens per second with versions, compared with those without."""
        without, with_versions = (
            sum(len(gaps_between(answers, *block)) for block in blocks) / sum(end - begin for begin, end in blocks)
            for blocks in (self.phases[False], self.phases[True])
        )
        return round(with_versions / without, 3)


async def measure(
    installation: Installation, requests: Sequence[CommitRequest], rate: Rate, blocks: int, first_s: float
) -> dict[str, Any]:
    """Serve all versions under load, and return the figures that the agents see."""
    client = ProxyClient(installation.url, installation.trainer_key, RUN)
    agents = Agents(installation.port, await installation.key_of(RUN))
    working = asyncio.create_task(agents.work())
    calm: list[tuple[float, float]] = []
    swapping: list[tuple[float, float]] = []
    seconds: list[float] = []
    await asyncio.sleep(2.0)  # the first answers warm up caches
    block_s = first_s
    size = -(-len(requests) // blocks)
    for first in range(0, len(requests), size):
        began = time.perf_counter()
        await asyncio.sleep(block_s)
        calm.append((began, time.perf_counter()))
        began = time.perf_counter()
        seconds += [await swap(installation, client, request) for request in requests[first : first + size]]
        swapping.append((began, time.perf_counter()))
        block_s = min(_LONGEST_CALM_S, swapping[-1][1] - began)
        print(f"  {min(first + size, len(requests))} swaps, the last {block_s:.0f} s", flush=True)
    await rate.measure(installation, client)
    agents.over = True
    await working
    normal, during = (
        [gap for since, until in phases for gap in gaps_between(agents.answers, since, until)]
        for phases in (calm, swapping)
    )
    failed = [answer for _, answer in agents.answers if not answer.succeeded]
    for answer in failed[:3]:
        print(f"  failed: {answer.status} {answer.error!r}")
    return {
        "swaps": len(seconds),
        "swap_seconds": round(statistics.median(seconds), 2),
        "calls": len(agents.answers),
        "failed_calls": len(failed),
        "gap_p99_ms": round(quantile(normal, 0.99) * 1000, 1),
        "gap_p99_ms_during_swaps": round(quantile(during, 0.99) * 1000, 1),
        "gap_ratio": round(quantile(during, 0.99) / quantile(normal, 0.99), 2),
        "tokens_per_s_vs_none": rate.ratio(agents.answers),
    }


def check_labels(installation: Installation, versions: Versions) -> dict[str, Any]:
    """Compute the log-probabilities of every recorded token again, and count those that other weights produced."""
    rows = installation.rows(
        "SELECT prompt_ids, output_ids, output_logprobs, spans FROM turns WHERE state <> 'failed'"
    )
    tokens = wrong = alike = served = 0
    worst = 0.0
    found = sorted((_spans(spans), prompt, output, said) for prompt, output, said, spans in rows)
    labels: set[int] = set()
    several = sum(len(spans) > 1 for spans, *_ in found)
    before: list[float] = []
    for spans, prompt, output, said in found:
        ids = [*unpack_ids(bytes(prompt)), *unpack_ids(bytes(output))]
        recorded = unpack_logprobs(bytes(said))
        for version, start, end in spans:
            labels.add(version)
            computed = versions.logprobs(version, ids, len(recorded))[start:end]
            differences = [abs(one - two) for one, two in zip(computed, recorded[start:end], strict=True)]
            tokens += len(differences)
            wrong += sum(difference > SAME for difference in differences)
            worst = max(worst, *differences)
            served += 1
            other = versions.logprobs(version - 1 if version else 1, ids, len(recorded))[start:end]
            mean = statistics.mean(abs(one - two) for one, two in zip(other, recorded[start:end], strict=True))
            before.append(mean)
            alike += mean <= SAME
    return {
        "versions_that_answered": len(labels),
        "answers_of_several_versions": several,
        "tokens": tokens,
        "tokens_with_a_wrong_label": wrong,
        "largest_difference": float(f"{worst:.2g}"),
        "difference_under_the_version_before": round(statistics.median(before), 3),
        "answers_that_fit_the_version_before": alike,
    }


def _spans(text: str | bytes) -> list[tuple[int, int, int]]:
    """Return (version, start, end) of every span of a turn."""
    return [(version, start, end) for version, start, end in json.loads(text)]


def plan_of(engine: str, port: int) -> LaunchPlan:
    bounds = AdapterBounds(loaded=LOADED, rank=RANK)
    if engine == "embedded":
        return embedded_plan(model=str(CHECKPOINT), port=port, adapters=bounds)
    return sglang_cpu_plan(model=str(CHECKPOINT), port=port, venv=load_settings().engine.sglang_venv, adapters=bounds)


async def run(engine: str, folder: Path, swaps: int, *, short: bool) -> dict[str, Any]:
    """Measure one engine. Raise ConfigurationError if it is not installed."""
    plan = plan_of(engine, random_free_port(HOST))
    part = Part(name="engine", argv=plan.argv, env=plan.env, stop_seconds=5.0)
    config = f'[run]\nname = {quoted(RUN)}\nmodel = {quoted(CHECKPOINT)}\nweights = "adapter"\n'
    async with installed(folder, [part], [plan.url], config, verbose=True) as installation:
        versions = Versions(installation.weights)
        blocks, first_s = (1, _SHORT_BLOCK_S) if short else (BLOCKS, _FIRST_BLOCK_S)
        rate_blocks, block_s = (1, _SHORT_BLOCK_S) if short else (RATE_BLOCKS, RATE_BLOCK_S)
        count = swaps + Rate.versions(rate_blocks, block_s)
        requests = [await asyncio.to_thread(versions.write, number) for number in range(1, count + 1)]
        rate = Rate(requests[swaps:], rate_blocks, block_s)
        found = await measure(installation, requests[:swaps], rate, blocks, first_s)
        labels = await asyncio.to_thread(partial(check_labels, installation, versions))
    return {**found, **labels}


def judged(result: dict[str, Any]) -> list[Target]:
    """Return the targets of one engine."""
    return [
        Target(what="failed calls", measured=result["failed_calls"], bound=0),
        Target(what="p99 of gaps in streams during swaps, over p99 without", measured=result["gap_ratio"], bound=2.0),
        Target(what="tokens whose label is not true", measured=result["tokens_with_a_wrong_label"], bound=0),
        Target(
            what="answers that fit the version before as well",
            measured=result["answers_that_fit_the_version_before"],
            bound=0,
        ),
        Target(
            what="tokens per second with a version every 2 s, over those without",
            measured=result["tokens_per_s_vs_none"],
            bound=0.97,
            at_least=True,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(SWAPS), action="append", help="default: both")
    parser.add_argument("--short", action="store_true", help="a few swaps; gaps are not judged, nothing is written")
    options = parser.parse_args()
    reached = True
    for engine in options.engine or tuple(SWAPS):
        print(f"{engine}:", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="base-rl-adapters-"))
        swaps = SHORT_SWAPS if options.short else SWAPS[engine]
        try:
            found = uvloop.run(run(engine, folder / "run", swaps, short=options.short))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(found, indent=2))
        targets = judged(found)
        for what, bound, measured in target_rows(targets):
            print(f"{what}: {measured} ({bound})")
        reached = reached and all(target.reached for target in targets if not options.short or target.bound == 0)
        if not options.short:
            before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
            RESULT.write_text(json.dumps({**before, "machine": describe(), engine: found}, indent=2) + "\n")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
