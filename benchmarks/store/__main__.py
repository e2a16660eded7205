"""The growth of the trajectory store: `python -m benchmarks.store [--turns 1000000] [--database sqlite|postgresql]`.

It fills a store through the proxy's own services, in one process: sessions are named as agents name them, every turn
is committed durably, rewards end the sessions, and a trainer consumes half of them. Then it measures claims at 10,000
turns and at the end, the queries of the admin page, bytes, and memory. A claim is timed from the request to the
encoded answer with all its trajectories.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.store import measures
from benchmarks.store.databases import NAMES, Place, place
from benchmarks.store.filling import open_proxy
from benchmarks.store.report import judged, shown
from benchmarks.store.workload import LONG, SHORT, Workload
from proxy.interpreter import settle_interpreter

RESULT = Path(__file__).parent.parent / "results" / "store.json"
EARLY = 10_000
SHORT_TURNS, SHORT_EARLY = 4_000, 2_000
_PARTS = 50
_COMPARED_TURNS = 10_000


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def grown(make: Callable[[], Place], directory: Path, turns: int, early_turns: int) -> dict[str, Any]:
    """Fill one database up to `turns` turns and return its figures."""
    place = make()
    workload = Workload(seed=1)
    async with open_proxy(place.url, directory) as proxy:
        settle_interpreter()
        await proxy.fill(workload, early_turns)
        early = await measures.claims(proxy)
        rates, memory = [], []
        part = max(early_turns, (turns - early_turns) // _PARTS)
        while proxy.filled.turns < turns:
            before, began = proxy.filled.turns, time.perf_counter()
            await proxy.fill(workload, min(part, turns - before))
            rates.append((proxy.filled.turns - before) / (time.perf_counter() - began))
            memory.append(_resident())
            print(f"  {proxy.filled.turns:>9,} turns, {rates[-1]:,.0f}/s, {memory[-1] >> 20} MiB", flush=True)
        late = await measures.claims(proxy)
        first_look = await measures.first_look(proxy)
        admin = await measures.admin(proxy)
        filled = proxy.filled
    settled = memory[max(0, len(memory) // 10)] if memory else _resident()
    return {
        "turns": filled.turns,
        "sessions": filled.sessions,
        "tokens": filled.tokens,
        "ingest_turns_per_s": round(filled.turns / filled.seconds, 1),
        "claim_p99_ms": {_power(early_turns): early["p99"], _power(turns): late["p99"]},
        "admin_p99_ms": max(found["p99"] for found in admin.values()),
        "slowest_part_turns_per_s": round(min(rates, default=0.0), 1),
        "claim_ms": {"early": early, "late": late},
        "bytes": place.size(),
        "bytes_per_token": round(place.size() / filled.tokens, 3),
        "admin_ms": admin,
        "admin_first_look_ms": first_look,
        "rss_growth_mb": round(((memory[-1] if memory else settled) - settled) / 1e6, 1),
        "rss_mb": round(_resident() / 1e6, 1),
    }


def _power(turns: int) -> str:
    """1e4, 1e6."""
    return f"{turns:.0e}".replace("e+0", "e")


async def conversation_ratio(make: Callable[[], Place], directory: Path, turns: int) -> float:
    """Return bytes per token in conversations of 50 turns, relative to the same turns as sessions of one turn."""
    per_token = []
    for length in (LONG, SHORT):
        place = make()
        async with open_proxy(place.url, directory) as proxy:
            await proxy.fill(Workload(seed=2, lengths=(length,)), turns)
            tokens = proxy.filled.tokens
        per_token.append(place.size() / tokens)
    return round(per_token[0] / per_token[1], 3)


def measure(name: str, turns: int, early_turns: int, directory: Path) -> dict[str, Any]:
    print(f"{name}: {turns:,} turns", flush=True)
    with place(name, directory) as make:
        found = asyncio.run(grown(make, directory, turns, early_turns))
        found["conversation_bytes_ratio"] = asyncio.run(
            conversation_ratio(make, directory, min(_COMPARED_TURNS, turns))
        )
    return found


def beside_others(result: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the result with databases that were measured earlier and not now, if they had as many turns."""
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    others = before["databases"] if before.get("turns") == result["turns"] else {}
    databases = {**others, **result["databases"]}
    return {**result, "databases": {name: databases[name] for name in NAMES if name in databases}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1_000_000, help="fill to this many (at least 20,000)")
    parser.add_argument("--database", choices=NAMES, action="append", help="default: both")
    parser.add_argument("--directory", type=Path, help="where the databases are; default: the system's for files")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True, help=f"to {RESULT.name}")
    parser.add_argument(
        "--short", action="store_true", help="a few thousand turns; nothing is written and nothing is judged"
    )
    options = parser.parse_args()
    early_turns = EARLY
    if options.short:
        options.turns, early_turns, options.write = SHORT_TURNS, SHORT_EARLY, False
        measures.CLAIMS, measures.LOOKS = 8, 3
    elif options.turns < 2 * EARLY:
        parser.error(f"--turns is {2 * EARLY} at least")
    directory = Path(tempfile.mkdtemp(prefix="base-rl-store-", dir=options.directory))
    directory.chmod(0o755)  # PostgreSQL's user has its own below it
    try:
        result: dict[str, Any] = {"machine": describe(), "turns": options.turns, "databases": {}}
        for name in options.database or NAMES:
            result["databases"][name] = measure(name, options.turns, early_turns, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if options.write:
        RESULT.write_text(json.dumps(beside_others(result, RESULT), indent=2) + "\n")
    print(shown(result))
    targets = judged(result)
    return 0 if options.short or all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
