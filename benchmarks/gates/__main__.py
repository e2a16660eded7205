"""`make bench-gate`: bad versions are kept from users or taken back, and good ones are not, by drawn rewards on a
real store, and in the parts `real-…` on real learning. Fails unless the targets below are reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.gates.parts import PARTS, SHORT, WHOLE
from benchmarks.gates.report import judged

_RESULTS = Path(__file__).resolve().parents[1] / "results" / "gate.json"


def main() -> int:
    """Run the parts, write the results, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--short",
        action="store_true",
        help="2 runs of each, 10 healthy steps, little real learning; writes no results",
    )
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=list(PARTS), help="the others keep their results"
    )
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    size = SHORT if options.short else WHOLE
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        for part in options.parts:
            found = PARTS[part](pool.map, size)
            # Read again: another process may have written other parts meanwhile.
            results = _merged(results if options.short else _stored(), found)
            if not options.short:
                _RESULTS.write_text(json.dumps(results, indent=2) + "\n")
            print(f"{part} done", flush=True)
    print(json.dumps({name: value for name, value in results.items() if name != "canary_curve"}, indent=2))
    if set(options.parts) != set(PARTS):
        return 0
    if not options.short:
        from benchmarks.gates.plot import draw

        draw(results)
    targets = judged(results)
    for target in targets:
        print(f"{'ok    ' if target.reached else 'MISSED'} {target.what}: {target.measured:.3f}")
    return 0 if all(target.reached for target in targets) else 1


def _stored() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    return stored


def _merged(results: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    # Two parts each give some of the figures of these.
    shared = {name: {**results.get(name, {}), **found.get(name, {})} for name in ("healthy", "real")}
    return {**results, **found, **shared, "machine": machine.describe()}


if __name__ == "__main__":
    sys.exit(main())
