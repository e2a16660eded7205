"""Swaps of whole weights under load: `python -m benchmarks.pool.swap`, or `make bench-swap`.

On one engine after the other, a proxy serves a run while versions are committed:

1. *Swaps.* Agents stream long answers, while one version after another is committed and served: 1,000 on the embedded
   engine, 100 on the real SGLang, in blocks that alternate with blocks of streams alone. Then blocks with a version
   every 2 seconds alternate with blocks without any, for the tokens per second.
2. *Shared prompts.* 64 callers share a prompt of about 700 tokens, and a version is committed every 2 seconds.
3. *Prompts in parts.* 64 callers have long prompts of their own, which SGLang computes in parts of 64 tokens, and a
   version is committed every 0.3 seconds.
4. *Bad versions* of every kind are committed, and the run is rolled back.

Afterwards the log-probabilities of every recorded token are computed again by transformers: each span by its version,
over the keys and values of the spans before it. A prompt is stale if its first token differs.

Writes `benchmarks/results/swap.json`, each engine when it is finished; `--engine` measures one alone. The exit
status is 0 if the targets were reached. `--short` makes a few swaps on the embedded engine and writes nothing; only
its counts of failures are judged. `--counts` leaves out the figures that depend on what else the machine does.
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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.machine import describe
from benchmarks.pool.bad_versions import roll_back, seconds_to_the_last_call, spans_of, try_bad_versions
from benchmarks.pool.installation import CHECKPOINT, HOST, Installation, installed, quoted
from benchmarks.pool.streams import Streamed, stream_chat
from benchmarks.pool.versions import NEVER_ENDS
from benchmarks.pool.whole_versions import WholeVersions
from benchmarks.proxy.measures import quantile
from benchmarks.targets import Target, target_rows
from proxy.cli.addresses import random_free_port
from proxy.cli.supervisor import Part
from proxy.contract.arrays import unpack_ids, unpack_logprobs
from proxy.engines.launch import LaunchPlan, embedded_plan, sglang_cpu_plan
from proxy.settings import load_settings
from trainer.proxy_client import ProxyClient

RESULT = Path(__file__).parents[1] / "results" / "swap.json"
RUN = "policy"
STREAMS = 8
CALLERS = 64
CHUNK = 64
"""Tokens of a prompt that SGLang computes at once."""
SAME = 1e-3
"""Largest difference of log-probabilities that rounding makes, in nats."""
WORDS = 350
"""Words of a long prompt: about 700 tokens of the checkpoint's tokenizer."""
SWAP_EVERY_S, SHARED_EVERY_S, PARTS_EVERY_S = 2.0, 2.0, 0.3
_SERVED_S = 120.0
_SHOWN = 3


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. `blocks` of swaps alternate with calm ones; seconds are those of one block or part."""

    swaps: int
    blocks: int
    calm_s: float
    rate_blocks: int
    rate_s: float
    shared_s: float
    parts_s: float
    tokens: int = 256
    callers: int = CALLERS


SIZES = {
    "embedded": Size(swaps=1000, blocks=10, calm_s=15, rate_blocks=4, rate_s=20, shared_s=30, parts_s=20),
    "sglang": Size(swaps=100, blocks=5, calm_s=15, rate_blocks=4, rate_s=20, shared_s=40, parts_s=30),
}
SHORT = Size(swaps=8, blocks=1, calm_s=1, rate_blocks=1, rate_s=2, shared_s=3, parts_s=2, tokens=64, callers=16)


@dataclass
class Callers:
    """Callers that stream one answer after another, each in a session of its own, until `over` is set."""

    port: int
    key: str
    name: str
    count: int
    tokens: int
    text: Callable[[int, int], str]
    """The question of a caller from its number and the number of its call."""
    answers: list[Streamed] = field(default_factory=list)
    over: bool = False

    async def work(self) -> None:
        async with asyncio.TaskGroup() as callers:
            for number in range(self.count):
                callers.create_task(self._call(number))

    async def _call(self, number: int) -> None:
        for attempt in itertools.count():
            if self.over:
                return
            answer = await stream_chat(
                self.port,
                self.key,
                [{"role": "user", "content": self.text(number, attempt)}],
                session=f"{self.name}-{number}-{attempt}",
                model=RUN,
                max_tokens=self.tokens,
                logit_bias=NEVER_ENDS,
            )
            self.answers.append(answer)


class Swapping:
    """An installation whose versions are committed one after another."""

    def __init__(self, installation: Installation, versions: WholeVersions, key: str) -> None:
        self.installation = installation
        self.versions = versions
        self.client = ProxyClient(installation.url, installation.trainer_key, RUN)
        self.key = key
        self.head = 0
        self.answers: list[Streamed] = []

    async def commit(self) -> int:
        request = self.versions.commit(self.head, weights=self.head + 1)
        number = self.versions.set_number(self.head + 1)
        self.head = (await asyncio.to_thread(self.client.commit, request)).version
        self.versions.set_of[self.head] = number
        return self.head

    async def swap(self) -> tuple[float, float, float]:
        """Commit a version. Return when it was committed and served, and the seconds between."""
        began = time.perf_counter()
        version = await self.commit()
        async with asyncio.timeout(_SERVED_S):
            while await self._serving() != version:  # noqa: ASYNC110  (by another process)
                await asyncio.sleep(0.01)
        served = time.perf_counter()
        return began, served, served - began

    async def commit_every(self, seconds: float, until: float) -> None:
        """Commit a version at a fixed rate, whether the one before is served or not."""
        due = time.perf_counter()
        while (due := due + seconds) < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await self.commit()

    async def under(self, callers: Callers, work: Awaitable[Any]) -> Any:
        """Return the result of `work`, which runs while the callers call."""
        working = asyncio.create_task(callers.work())
        try:
            found = await work
        finally:
            callers.over = True
            await working
        self.answers += callers.answers
        return found

    async def _serving(self) -> int:
        answer = await self.installation.admin.get(f"/api/v1/runs/{RUN}")
        return int(answer.json()["serving_version"])


def streaming(swapping: Swapping, size: Size, name: str) -> Callers:
    def text(number: int, attempt: int) -> str:
        return f"Agent {number}, task {attempt}: what is {attempt % 97} plus 5?"

    return Callers(swapping.installation.port, swapping.key, name, STREAMS, size.tokens, text)


def gaps_between(answers: Sequence[Streamed], since: float, until: float) -> list[tuple[float, float]]:
    """Return (begin, end) of the pauses between neighbouring events that ended between two times."""
    return [
        (before, after)
        for answer in answers
        for before, after in itertools.pairwise(answer.times)
        if since <= after < until
    ]


async def measure_swaps(swapping: Swapping, size: Size) -> dict[str, Any]:
    """Swap in blocks that alternate with blocks of streams alone."""
    callers = streaming(swapping, size, "swaps")
    calm: list[tuple[float, float]] = []
    swaps: list[tuple[float, float, float]] = []

    async def work() -> None:
        await asyncio.sleep(1.0)  # the first answers warm up caches
        for block in range(size.blocks):
            began = time.perf_counter()
            await asyncio.sleep(size.calm_s)
            calm.append((began, time.perf_counter()))
            for _ in range(size.swaps // size.blocks):
                swaps.append(await swapping.swap())
            print(f"  {len(swaps)} swaps, {block + 1} of {size.blocks} blocks", flush=True)

    await swapping.under(callers, work())
    normal = [after - before for block in calm for before, after in gaps_between(callers.answers, *block)]
    during = [
        [after - before for before, after in gaps_between(callers.answers, began, served + 0.1)]
        for began, served, _ in swaps
    ]
    usual = statistics.median(normal)
    longest = [max(gaps) - usual for gaps in during if gaps]
    every = [gap for gaps in during for gap in gaps]
    return {
        "swaps": len(swaps),
        "gap_added_p50_ms": round(statistics.median(longest) * 1000, 1),
        "gap_added_p99_ms": round(quantile(longest, 0.99) * 1000, 1),
        "gap_p99_ms_without": round(quantile(normal, 0.99) * 1000, 1),
        "gap_p99_vs_normal": round(quantile(every, 0.99) / quantile(normal, 0.99), 2),
        "commit_to_served_p50_ms": round(statistics.median([each for *_, each in swaps]) * 1000),
    }


async def measure_rate(swapping: Swapping, size: Size) -> dict[str, Any]:
    """Compare the tokens per second with a version every 2 seconds to those without any, in blocks by turns."""
    callers = streaming(swapping, size, "rate")
    blocks: dict[bool, list[tuple[float, float]]] = {False: [], True: []}

    async def work() -> None:
        await asyncio.sleep(1.0)
        for _ in range(size.rate_blocks):
            for swaps in (False, True):
                began = time.perf_counter()
                until = began + size.rate_s
                if swaps:
                    await swapping.commit_every(SWAP_EVERY_S, until)
                await asyncio.sleep(max(0.0, until - time.perf_counter()))
                blocks[swaps].append((began, time.perf_counter()))

    await swapping.under(callers, work())
    rates = {
        swaps: sum(len(gaps_between(callers.answers, *block)) for block in found)
        / sum(until - since for since, until in found)
        for swaps, found in blocks.items()
    }
    return {"tokens_per_s_vs_none": round(rates[True] / rates[False], 3)}


async def ask_long_prompts(swapping: Swapping, size: Size, *, shared: bool) -> None:
    """Let many callers ask with long prompts while versions come at a fixed rate."""
    common = " ".join(str(number % 97) for number in range(WORDS))

    def text(number: int, attempt: int) -> str:
        own = f"caller {number} asks {attempt}"
        return f"{common} {own}" if shared else f"{own} {common}"

    name = "shared" if shared else "parts"
    callers = Callers(swapping.installation.port, swapping.key, name, size.callers, 4, text)
    every, seconds = (SHARED_EVERY_S, size.shared_s) if shared else (PARTS_EVERY_S, size.parts_s)
    await swapping.under(callers, swapping.commit_every(every, time.perf_counter() + seconds))
    print(f"  {len(callers.answers)} answers to long prompts ({name})", flush=True)


async def measure_badness(swapping: Swapping, size: Size) -> dict[str, Any]:
    """Commit bad versions and roll back, while agents stream."""
    callers = streaming(swapping, msgspec.structs.replace(size, tokens=32), "bad")
    installation = swapping.installation

    async def work() -> tuple[dict[str, str], float, int]:
        reasons = await try_bad_versions(installation, swapping.client, swapping.versions, RUN)
        swapping.head = (await asyncio.to_thread(swapping.client.head)).version
        await swapping.swap()
        at, version = await roll_back(installation, RUN)
        await asyncio.sleep(1.0)  # calls that begin now must not be answered by the version that was left
        return reasons, at, version

    reasons, at, version = await swapping.under(callers, work())
    return {
        "bad_versions": reasons,
        "bad_versions_failed_calls": sum(not answer.succeeded for answer in callers.answers),
        "rollback_s": round(seconds_to_the_last_call(installation, at, version), 3),
    }


def check_tokens(installation: Installation, versions: WholeVersions) -> dict[str, Any]:
    """Compute the log-probabilities of every recorded token again."""
    rows = installation.rows(
        "SELECT prompt_ids, output_ids, output_logprobs, spans FROM turns WHERE state <> 'failed'"
    )
    tokens = wrong = stale = several = 0
    worst = 0.0
    longest = 0
    for prompt, output, said, spans in rows:
        found = spans_of(spans)
        ids, answer = unpack_ids(bytes(prompt)), unpack_ids(bytes(output))
        if not found:
            continue
        computed = versions.logprobs(ids, answer, found)
        differences = [abs(one - two) for one, two in zip(computed, unpack_logprobs(bytes(said)), strict=True)]
        stale += differences[0] > SAME
        wrong += sum(each > SAME for each in differences[1:])
        tokens += len(differences)
        several += len(found) > 1
        worst = max(worst, *differences)
        longest = max(longest, len(ids))
    return {
        "turns": len(rows),
        "turns_of_several_versions": several,
        "longest_prompt_tokens": longest,
        "tokens": tokens,
        "stale_prompts": stale,
        "wrong_labels": wrong,
        "largest_difference": float(f"{worst:.2g}"),
    }


def plan_of(engine: str, port: int) -> LaunchPlan:
    if engine == "embedded":
        return embedded_plan(model=str(CHECKPOINT), port=port)
    flags = (f"--chunked-prefill-size={CHUNK}",)
    return sglang_cpu_plan(model=str(CHECKPOINT), port=port, venv=load_settings().engine.sglang_venv, flags=flags)


async def run(engine: str, folder: Path, size: Size) -> dict[str, Any]:
    """Measure one engine. Raise ConfigurationError if it is not installed."""
    plan = plan_of(engine, random_free_port(HOST))
    part = Part(name="engine", argv=plan.argv, env=plan.env, stop_seconds=5.0)
    config = f"[run]\nname = {quoted(RUN)}\nmodel = {quoted(CHECKPOINT)}\n"
    async with installed(folder, [part], [plan.url], config, verbose=True) as installation:
        versions = WholeVersions(installation.weights)
        swapping = Swapping(installation, versions, await installation.key_of(RUN))
        found = await measure_swaps(swapping, size)
        found |= await measure_rate(swapping, size)
        await ask_long_prompts(swapping, size, shared=True)
        await ask_long_prompts(swapping, size, shared=False)
        found |= await measure_badness(swapping, size)
        states = dict(installation.rows("SELECT id, state FROM turns"))
        checked = await asyncio.to_thread(check_tokens, installation, versions)
    failed = [answer for answer in swapping.answers if not answer.succeeded]
    for answer in failed[:_SHOWN]:
        print(f"  failed: {answer.status} {answer.error!r}")
    return {
        "swaps": found.pop("swaps"),
        "calls": len(swapping.answers),
        "failed": len(failed),
        "truncated": sum(state == "truncated" for state in states.values()),
        **checked,
        **found,
    }


COUNTS = ("failed", "truncated", "wrong_labels", "stale_prompts", "bad_versions_failed_calls")
TIMES = (
    "gap_added_p50_ms",
    "gap_added_p99_ms",
    "gap_p99_ms_without",
    "gap_p99_vs_normal",
    "commit_to_served_p50_ms",
    "tokens_per_s_vs_none",
)
"""Figures that other work on the machine changes."""


def judged(engine: str, result: dict[str, Any], *, times: bool) -> list[Target]:
    """Return the targets of one engine."""
    targets = [Target(what=what, measured=result[what], bound=0) for what in COUNTS]
    targets.append(Target(what="rollback_s", measured=result["rollback_s"], bound=5))
    if not times:
        return targets
    if engine == "embedded":
        targets.append(Target(what="gap_added_p99_ms", measured=result["gap_added_p99_ms"], bound=100))
    else:
        targets.append(Target(what="gap_p99_vs_normal", measured=result["gap_p99_vs_normal"], bound=2))
    rate = result["tokens_per_s_vs_none"]
    return [*targets, Target(what="tokens_per_s_vs_none", measured=rate, bound=0.9, at_least=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(SIZES), action="append", help="default: both")
    parser.add_argument("--short", action="store_true", help="a few swaps on the embedded engine; writes nothing")
    parser.add_argument("--counts", action="store_true", help="neither write nor judge figures of time")
    options = parser.parse_args()
    reached = True
    for engine in options.engine or (("embedded",) if options.short else tuple(SIZES)):
        print(f"{engine}:", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="base-rl-swap-"))
        began = time.monotonic()
        try:
            found = uvloop.run(run(engine, folder / "run", SHORT if options.short else SIZES[engine]))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        targets = judged(engine, found, times=not (options.short or options.counts))
        if options.counts:
            found = {name: value for name, value in found.items() if name not in TIMES}
        print(json.dumps(found, indent=2), f"\n{time.monotonic() - began:.0f} s")
        for what, bound, measured in target_rows(targets):
            print(f"{what}: {measured} ({bound})")
        reached = reached and all(target.reached for target in targets)
        if not options.short:
            before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
            RESULT.write_text(json.dumps({**before, "machine": describe(), engine: found}, indent=2) + "\n")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
