"""The figures as keys of the result file, as a table, and compared with the targets."""

from __future__ import annotations

from typing import Any

from benchmarks.proxy.systems import BASE_RL, BASE_RL_FSYNC, BASE_RL_MANY, LITELLM_NAME, RLLM_NAME
from benchmarks.targets import Target

COMPARED = (BASE_RL, LITELLM_NAME, RLLM_NAME)
TITLES = {
    BASE_RL: "base-rl",
    RLLM_NAME: "rllm-model-gateway",
    LITELLM_NAME: "LiteLLM proxy",
    BASE_RL_FSYNC: "base-rl, fsync at every commit",
    BASE_RL_MANY: "base-rl, many runs in its store",
}
EARLY, LATE = 2, 100
TURNS_TOLD = (1, 2, 10, 25, 50, 75, 100)


def headline(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of the result file. `added_p99_ms` is at half load, `added_p50_ms` at one connection."""
    ours = figures[BASE_RL]
    return {
        "calls_per_s": {name: figures[name]["short"]["calls_per_s"] for name in COMPARED},
        "added_p50_ms": {name: figures[name]["one"]["added_p50"] for name in COMPARED},
        "added_p99_ms": {name: figures[name]["half_load"]["added_p99"] for name in COMPARED},
        "turn_cost_100_vs_2": ours["turns"][LATE - 1] / ours["turns"][EARLY - 1],
        "added_ttft_ms": ours["first_token"]["added_p50"],
        "cpu_ms_per_call": ours["short"]["cpu_ms_per_call"],
        "calls_per_s_many_runs_vs_one": figures[BASE_RL_MANY]["short"]["calls_per_s_vs_one"],
        "systems": {
            name: {
                **{key: value for key, value in each.items() if key != "turns"},
                **({"turn_cpu_ms": {str(t): each["turns"][t - 1] for t in TURNS_TOLD}} if "turns" in each else {}),
            }
            for name, each in figures.items()
        },
    }


def judged(result: dict[str, Any]) -> list[Target]:
    rate, added = result["calls_per_s"], result["added_p50_ms"]
    # Results of before the store with many runs was measured do not have it.
    many = result.get("calls_per_s_many_runs_vs_one")
    half = result["systems"][BASE_RL]["half_load"]
    return [
        Target(
            what="calls/s against LiteLLM's", measured=rate[BASE_RL] / rate[LITELLM_NAME], bound=10, at_least=True
        ),
        Target(
            what="calls/s against rllm-model-gateway's",
            measured=rate[BASE_RL] / rate[RLLM_NAME],
            bound=2,
            at_least=True,
        ),
        Target(
            what="added p50, ms, against 1/8 of LiteLLM's", measured=added[BASE_RL], bound=added[LITELLM_NAME] / 8
        ),
        Target(what="added p50, ms, against rllm-model-gateway's", measured=added[BASE_RL], bound=added[RLLM_NAME]),
        Target(
            what="added p99 over added p50, at half load", measured=half["added_p99"] / half["added_p50"], bound=10
        ),
        Target(what="CPU of turn 100 over turn 2", measured=result["turn_cost_100_vs_2"], bound=1.25),
        Target(
            what="added to the first token beyond a whole answer's, ms",
            measured=result["added_ttft_ms"] - added[BASE_RL],
            bound=1,
        ),
        *([] if many is None else [many_runs(many)]),
    ]


def many_runs(ratio: float) -> Target:
    return Target(
        what="calls/s with many runs in the store, against one run", measured=ratio, bound=0.95, at_least=True
    )


def verdict(target: Target) -> str:
    return (
        f"{'ok    ' if target.reached else 'MISSED'}  {target.what}: {target.measured:.2f} "
        f"({'at least' if target.at_least else 'at most'} {target.bound:.2f})"
    )


COLUMNS = (
    ("calls/s", "short", "calls_per_s", 0),
    ("CPU ms", "short", "cpu_ms_per_call", 2),
    ("50 turns", "long", "calls_per_s", 0),
    ("CPU ms", "long", "cpu_ms_per_call", 2),
    ("adds p50", "one", "added_p50", 2),
    ("adds p99", "one", "added_p99", 2),
    ("1st token", "first_token", "added_p50", 2),
    ("half p50", "half_load", "added_p50", 2),
    ("half p99", "half_load", "added_p99", 2),
)


def table(figures: dict[str, dict[str, Any]]) -> str:
    """Return the table, in milliseconds except for calls per second. Figures that were not measured are omitted."""
    any_of = next(iter(figures.values()))
    columns = [column for column in COLUMNS if column[1] in any_of]
    rows = [f"{'':<30}" + "".join(f"{title:>10}" for title, *_ in columns)]
    for name, each in figures.items():
        cells = (f"{each[look][key]:>10.{digits}f}" for _, look, key, digits in columns)
        rows.append(f"{TITLES[name]:<30}" + "".join(cells))
    if "turns" in figures.get(BASE_RL, {}):
        costs = figures[BASE_RL]["turns"]
        rows += ["", "CPU ms of turn " + ", ".join(f"{turn}: {costs[turn - 1]:.2f}" for turn in TURNS_TOLD)]
    return "\n".join(rows)


def page(result: dict[str, Any]) -> str:
    """Return the section "The proxy" of docs/performance.md in Markdown."""
    versions = result["versions"]
    costs = result["systems"][BASE_RL]["turn_cpu_ms"]
    systems = _markdown(["", *(title for title, *_ in COLUMNS)], page_rows(result["systems"]))
    turns = _markdown(["turn", *costs], [["CPU ms", *(f"{cost:.2f}" for cost in costs.values())]])
    bounds = _markdown(["target", "bound", "measured"], target_rows(result))
    return f"""\
## The proxy

The cost of base-rl in front of an engine that costs almost nothing: the [scripted engine](scripted-engine.md)
at zero delay, with proxy and load generator on the same two cores of an {result["machine"]["processor"]}. Two
other proxies were measured in turns in the same run: LiteLLM {versions[LITELLM_NAME]} (one worker, no database,
a master key) and rllm-model-gateway {versions[RLLM_NAME]} (one process, traces in SQLite, started as in its
README). They forward to a stub that answers chat completions at once; base-rl also finds the conversation that
a call continues, renders and tokenises the prompt, and commits the turn with ids, log-probabilities and
versions before its answer is complete.

The requests are those of an unchanged agent: a system message and questions, no header that names a session
(rllm-model-gateway gets the path that it needs), answers of one sentence, kept connections.

- *calls/s* and *CPU ms* (of the proxy's process, per call): 32 connections, conversations of 3 turns.
- *50 turns*: the same with 8 connections and conversations of 50 turns.
- *adds*: milliseconds added to the same calls without the proxy, one at a time; *1st token*: the same for
  streamed calls, until the first text, p50.
- *half*: milliseconds added while calls arrive at random times at half the saturation rate, measured from when
  each was due.

Medians of {result["rounds"]} rounds. In each round the systems are measured one after another, and the others
are idle.

{systems}

A commit survives the death of the process. In the first row a power failure can lose the last moments
(`database.synchronous = "normal"`, as in rllm-model-gateway); in the row with fsync every commit waits for the disk
(`"full"`, the default), and nothing is lost. The row with many runs has {result["runs"]}
active runs of 10 versions each in its store, of which one is called.

CPU time of base-rl's process per turn, by the turn's number in the conversation:

{turns}

{bounds}
"""


def _markdown(heading: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heading, ["---"] * len(heading), *rows])


def page_rows(systems: dict[str, Any]) -> list[list[str]]:
    return [
        [TITLES[name], *(f"{each[look][key]:.{digits}f}" for _, look, key, digits in COLUMNS)]
        for name, each in systems.items()
    ]


def target_rows(result: dict[str, Any]) -> list[list[str]]:
    return [
        [each.what, f"{'≥' if each.at_least else '≤'} {each.bound:.2f}", f"{each.measured:.2f}"]
        for each in judged(result)
    ]


def targets(result: dict[str, Any]) -> str:
    return "\n".join(map(verdict, judged(result)))


def line(name: str, found: dict[str, Any]) -> str:
    parts = []
    if "one" in found:
        parts.append(f"adds {found['one']['added_p50']:.2f} ms")
    if "short" in found:
        parts.append(f"{found['short']['calls_per_s']:.0f} calls/s, {found['short']['cpu_ms_per_call']:.2f} ms CPU")
    if "long" in found:
        parts.append(f"{found['long']['calls_per_s']:.0f} calls/s over 50 turns")
    if "turns" in found:
        parts.append(f"turn {LATE} costs {found['turns'][LATE - 1] / found['turns'][EARLY - 1]:.2f} of turn {EARLY}")
    return f"{TITLES[name]}: {', '.join(parts)}"


def rounded(value: Any) -> Any:
    """Round to four digits: more than the machine can reproduce."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return value
