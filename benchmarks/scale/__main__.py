"""`python -m benchmarks.scale [--sessions 400] [--output FILE] [--short]`: costs with 1 and 2 workers, and what
follows from them for 1, 10 and 100 proxies → `benchmarks/results/scale.json`.

Only counts and ratios of one run are results: PostgreSQL's CPU beside the proxy's, two workers beside one. The
simulation takes the proxy's milliseconds from `benchmarks/results/proxy.json`, which was measured on an idle machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.scale.costs import TURNS, measured
from benchmarks.scale.simulation import Costs, Setup, most_proxies, simulated

RESULTS = Path(__file__).parents[1] / "results"
PROXIES = (1, 10, 100)


def costs_of(found: dict[str, float], scale: float) -> Costs:
    """Return the costs of a call for the simulation, with milliseconds of CPU times `scale`."""
    return Costs(
        proxy_ms=scale * found["proxy_cpu_ms"],
        database_ms=scale * found["database_cpu_ms"],
        rows=found["rows"],
        wal_bytes=found["wal_bytes"],
        bytes=found["bytes"],
        claim_proxy_ms=scale * found["claim_proxy_cpu_ms"],
        claim_database_ms=scale * found["claim_database_cpu_ms"],
    )


def result_of(one: dict[str, float], two: dict[str, float], proxy_ms: float) -> dict[str, Any]:
    """Return the result: counts and ratios of the run, and the simulation. One proxy has the costs measured with one
    worker, several have those of two."""
    scale = proxy_ms / one["proxy_cpu_ms"]
    alone, several, setup = costs_of(one, scale), costs_of(two, scale), Setup()
    return {
        "machine": describe(),
        "turns_per_session": TURNS,
        "calls": int(one["calls"]),
        "cpu_per_call_2_workers_vs_1": round(two["proxy_cpu_ms"] / one["proxy_cpu_ms"], 3),
        "database_cpu_2_workers_vs_1": round(two["database_cpu_ms"] / one["database_cpu_ms"], 3),
        "database_cpu_vs_proxy": round(one["database_cpu_ms"] / one["proxy_cpu_ms"], 3),
        "claim_cpu_per_trajectory_vs_call": round(one["claim_proxy_cpu_ms"] / one["proxy_cpu_ms"], 3),
        "least_share_of_a_worker": round(two["least_share_of_a_worker"], 3),
        "per_call": {name: round(one[name], 2) for name in ("transactions", "rows", "bytes", "wal_bytes")},
        "proxy_cpu_ms": proxy_ms,
        "proxies": {
            str(count): {
                name: float(f"{value:.4g}")
                for name, value in simulated(count, alone if count == 1 else several, setup).items()
            }
            for count in PROXIES
        },
        "most_proxies": most_proxies(several, setup),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--output", type=Path, default=RESULTS / "scale.json")
    parser.add_argument("--short", action="store_true", help="does it run? Writes nothing")
    options = parser.parse_args()
    sessions = 40 if options.short else options.sessions
    one, two = (measured(workers, sessions) for workers in (1, 2))
    proxy_ms = json.loads((RESULTS / "proxy.json").read_text())["cpu_ms_per_call"]
    result = result_of(one, two, proxy_ms)
    print(json.dumps({"one": one, "two": two, "result": result}, indent=1))
    if not options.short:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
