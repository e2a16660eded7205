"""Kill one of two engines every 20 seconds under 64 streaming sessions: `python -m benchmarks.pool.engines`.

Two embedded engines serve one run. 64 agents each work through one conversation after another, all streamed, in
sessions with names. First nothing is killed for a minute, then one engine after the other gets a kill -9 for three
minutes, and the supervisor starts it again. A relay before each engine notes which streams were open on it, and which
part of every prompt a prefix cache that holds everything since the engine's start would have had. An agent whose
stream ended with an error sends the call again.

Writes `benchmarks/results/engines.json` (`make bench-engines`); the exit status is 0 if the targets were reached.
`--short` kills twice and writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.machine import describe
from benchmarks.pool.installation import CHECKPOINT, END_TOKEN, HOST, Installation, installed, quoted
from benchmarks.pool.relay import Notes, Relay
from benchmarks.pool.streams import Streamed, stream_chat
from benchmarks.targets import Target, target_rows
from proxy.cli.addresses import random_free_port
from proxy.cli.supervisor import Part
from proxy.engines.launch import embedded_plan
from proxy.lifecycle.check import check

RESULT = Path(__file__).parents[1] / "results" / "engines.json"
RUN = "policy"
NAMES = ("engine", "engine-2")
SESSIONS = 64
TURNS = 12
"""Turns of a conversation."""
TOKENS = 16
"""Tokens of an answer. The end token is forbidden, so that they are exact."""
KILL_EVERY_S = 20.0
UNDISTURBED_S, KILLING_S = 60.0, 180.0
SHORT_UNDISTURBED_S, SHORT_KILLING_S = 10.0, 45.0
WARM_S = 10.0
_BACK_S = 300.0
"""Longest wait for an engine to serve again before the next kill: one engine must be left."""
_NOTICED_S = 2.0
"""Seconds after a kill in which a lost connection counts as lost by it, because this process may notice it late."""
SYSTEM = "You are a careful assistant for arithmetic. Work step by step, and say how you came to the result. " * 2


@dataclass
class Agents:
    """64 agents at work until `over` is set. `answers` are all streams, in the order in which they ended."""

    port: int
    key: str
    answers: list[Streamed] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    over: bool = False

    async def work(self) -> None:
        async with asyncio.TaskGroup() as agents:
            for number in range(SESSIONS):
                agents.create_task(self._agent(number))

    async def _agent(self, number: int) -> None:
        chance = random.Random(number)
        conversation = 0
        while not self.over:
            conversation += 1
            name = f"agent-{number}-{conversation}"
            self.names.add(name)
            await self._converse(name, chance, turns=chance.randrange(1, TURNS) if conversation == 1 else TURNS)

    async def _converse(self, name: str, chance: random.Random, turns: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        for turn in range(turns):
            asked = f"Part {turn} of {name}: what is {chance.randrange(100)} plus {chance.randrange(100)}?"
            messages.append({"role": "user", "content": asked})
            answer = await self._asked(name, messages)
            while not answer.succeeded and not self.over:
                answer = await self._asked(name, messages)
            if self.over:
                return
            messages.append({"role": "assistant", "content": answer.text})

    async def _asked(self, name: str, messages: list[dict[str, Any]]) -> Streamed:
        answer = await stream_chat(
            self.port,
            self.key,
            messages,
            session=name,
            model=RUN,
            max_tokens=TOKENS,
            logit_bias={END_TOKEN: -100},
            tool_choice="none",
        )
        self.answers.append(answer)
        if not answer.succeeded:
            await asyncio.sleep(0.1)
        return answer


async def kill_in_turn(
    installation: Installation, relays: dict[str, Relay], seconds: float
) -> list[tuple[str, float, float]]:
    """Kill the engines in turn. Return the engine of each kill with the times right before and after it.

    On a busy machine an engine may need longer than the time between two kills; the next kill then comes later.
    """
    kills: list[tuple[str, float, float]] = []
    began = time.perf_counter()
    for number in range(int(seconds // KILL_EVERY_S)):
        await asyncio.sleep(KILL_EVERY_S)
        async with asyncio.timeout(_BACK_S):
            while set((await installation.engine_states()).values()) != {"ready"}:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        name = NAMES[number % len(NAMES)]
        pid = installation.supervisor.pid(name)
        assert pid is not None
        before = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        relays[name].clear()
        kills.append((name, before, time.perf_counter()))
        print(f"  killed {name} after {before - began:.0f} s", flush=True)
    return kills


def accounts(
    installation: Installation, agents: Agents, notes: Notes, kills: list[tuple[str, float, float]]
) -> dict[str, Any]:
    """Compare what agents received with what the engines did and what the store has."""
    visits: dict[str, list[Any]] = {}
    for visit in notes.visits:
        visits.setdefault(visit.turn_id, []).append(visit)
    failed = [answer for answer in agents.answers if not answer.succeeded]

    def was_cut_by_a_kill(answer: Streamed) -> bool:
        # Open: text had come, so that the call could not move to the other engine.
        return bool(answer.times) and any(
            visit.engine == engine and visit.lost_at is not None and before <= visit.lost_at <= after + _NOTICED_S
            for visit in visits.get(answer.turn_id, [])
            for engine, before, after in kills
        )

    cut = [answer for answer in failed if was_cut_by_a_kill(answer)]
    others = [answer for answer in failed if not was_cut_by_a_kill(answer)]
    for answer in others[:3]:
        print(f"  failed without a kill: {answer.status} {answer.error!r}, {len(answer.times)} pieces")
    states = dict(installation.rows("SELECT id, state FROM turns"))
    doubled = installation.rows(
        "SELECT external_id FROM sessions GROUP BY external_id HAVING count(*) > 1 OR external_id IS NULL"
    )
    sessions = {row[0] for row in installation.rows("SELECT external_id FROM sessions")}
    answered = {answer.turn_id for answer in agents.answers if answer.succeeded}
    received = answered | {answer.turn_id for answer in failed if answer.times}
    return {
        "calls": len(agents.answers),
        "streams_cut": len(cut),
        "cut_without_error_event": sum(not answer.has_error_event for answer in cut),
        "cut_not_marked": sum(states.get(answer.turn_id) not in ("failed", "truncated") for answer in cut),
        "other_calls_failed": len(others),
        "calls_moved_to_the_other_engine": sum(
            len({visit.engine for visit in visits.get(turn_id, [])}) > 1 for turn_id in answered
        ),
        "answers_not_recorded": sum(states.get(turn_id) != "complete" for turn_id in answered),
        "turns_without_a_call": len(states.keys() - received),
        "sessions": len(sessions),
        "sessions_doubled": len(doubled) + len(sessions ^ agents.names),
    }


async def measure(folder: Path, undisturbed_s: float, killing_s: float) -> dict[str, Any]:
    notes = Notes()
    relays: dict[str, Relay] = {}
    parts: list[Part] = []
    urls: list[str] = []
    async with AsyncExitStack() as stack:
        for name in NAMES:
            port = random_free_port(HOST)
            plan = embedded_plan(model=str(CHECKPOINT), port=port)
            parts.append(Part(name=name, argv=plan.argv, env=plan.env, stop_seconds=1.0))
            relays[name] = Relay(name, port, notes)
            server, relay_port = await relays[name].serve()
            stack.callback(server.close)
            urls.append(f"http://{HOST}:{relay_port}")
        config = f"[run]\nname = {quoted(RUN)}\nmodel = {quoted(CHECKPOINT)}\n"
        installation = await stack.enter_async_context(installed(folder, parts, urls, config, verbose=True))
        agents = Agents(installation.port, await installation.key_of(RUN))
        working = asyncio.create_task(agents.work())
        await asyncio.sleep(WARM_S)
        notes.start_again()
        began = len(agents.answers)
        await asyncio.sleep(undisturbed_s)
        undisturbed = {"reuse": notes.reuse, "calls_per_s": (len(agents.answers) - began) / undisturbed_s}
        notes.start_again()
        began = len(agents.answers)
        since = time.perf_counter()
        kills = await kill_in_turn(installation, relays, killing_s)
        await asyncio.sleep(WARM_S)  # what the last kill does to the other calls is counted as well
        killing = time.perf_counter() - since
        disturbed = {"reuse": notes.reuse, "calls_per_s": (len(agents.answers) - began) / killing}
        agents.over = True
        await working
        found = accounts(installation, agents, notes, kills)
    return {
        "kills": len(kills),
        **found,
        "prefix_reuse": {"undisturbed": round(undisturbed["reuse"], 3), "killing": round(disturbed["reuse"], 3)},
        "prefix_reuse_ratio": round(disturbed["reuse"] / undisturbed["reuse"], 3),
        "calls_per_s": {
            "undisturbed": round(undisturbed["calls_per_s"], 1),
            "killing": round(disturbed["calls_per_s"], 1),
        },
        "damage": _damage(installation),
    }


def _damage(installation: Installation) -> int:
    """Print what `base-rl db check` finds in the store, and return the number of its findings."""
    findings = check(f"sqlite:///{installation.store}")
    for finding in findings:
        print(f"  base-rl db check: {finding}", flush=True)
    return sum(finding.count for finding in findings)


BROKEN = (
    ("cut streams without the error event", "cut_without_error_event"),
    ("cut streams that the store has as whole", "cut_not_marked"),
    ("other calls that failed", "other_calls_failed"),
    ("answers that are not in the store", "answers_not_recorded"),
    ("recorded turns that no agent asked for", "turns_without_a_call"),
    ("sessions that are there twice, or not at all", "sessions_doubled"),
    ("damage in the store", "damage"),
)
"""Figures that must be 0."""


def judged(result: dict[str, Any]) -> list[Target]:
    return [
        *(Target(what=what, measured=result[key], bound=0) for what, key in BROKEN),
        Target(
            what="prefix reuse while engines are killed, over the undisturbed",
            measured=result["prefix_reuse_ratio"],
            bound=0.9,
            at_least=True,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="two kills; reuse is not judged and nothing written")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="base-rl-engines-"))
    times = (SHORT_UNDISTURBED_S, SHORT_KILLING_S) if options.short else (UNDISTURBED_S, KILLING_S)
    try:
        result = {"machine": describe(), **uvloop.run(measure(folder / "run", *times))}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=2))
    targets = judged(result)
    for what, bound, measured in target_rows(targets):
        print(f"{what}: {measured} ({bound})")
    if options.short:
        return 0 if all(target.reached for target in targets[:-1]) else 1
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
