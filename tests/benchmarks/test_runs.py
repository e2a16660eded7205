"""Test the reward rules of `make bench-runs`, and how it evaluates its measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agents_examples.calculator.agent import Answer
from agents_examples.calculator.tasks import Problem
from benchmarks.runs.__main__ import EMBEDDED, RUNS, SGLANG, Journal
from benchmarks.runs.installation import configuration
from benchmarks.runs.parts import Part, parts_of
from benchmarks.runs.report import judged, page, page_rows, summary, verdict
from benchmarks.runs.rules import RULES, rewards
from benchmarks.targets import target_rows
from proxy.settings import load_settings
from tests.docs.markdown import rows

PROBLEM = Problem(a=12, op="*", b=7)


def answer(text: str, *, tool: bool = False) -> Answer:
    called = [{"role": "tool", "content": "84"}] if tool else []
    return Answer(text=text, messages=[{"role": "user", "content": "?"}, *called], calls=1 + tool)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (answer("The answer is 84.", tool=True), "solves"),
        (answer('<tool_call>\n{"name": "calculator"\n</tool_call>'), "breaks-the-call"),
        (answer("The answer is 4."), "guesses-one-digit-even"),
        (answer("The answer is 7."), "guesses-one-digit-odd"),
        (answer("The answer is 84."), "guesses-two-digits-even"),
        (answer(" The answer is 85.\n"), "guesses-two-digits-odd"),
        (answer("The answer is 123."), "guesses-three-digits"),
        (answer("The answer is 1234."), "guesses-four-digits"),
        (answer("The answer is 85.", tool=True), None),
        (answer("The answer is 12345."), None),
        (answer("I do not know.", tool=True), None),
        (answer(""), None),
    ],
)
def test_at_most_one_rule_rewards_an_answer(given: Answer, rule: str | None) -> None:
    assert {name for name, reward in rewards(PROBLEM, given).items() if reward} == ({rule} - {None})


def figures(part: Part, *, own: float = 0.9, other: float = 0.02, **changes: Any) -> dict[str, Any]:
    """Return the figures of a part with 100 sessions per run, at 20 sessions per second."""
    count = 100 * len(part.runs)
    return {
        "sessions": count,
        "seconds": count / 20,
        "trajectories_per_s": 20.0,
        "wall": count / 20 + 10,
        "memory_mib": 800.0,
        "cpu_ms_per_trajectory": {"engine": 5.0, "trainer": 5.0, "proxy": 5.0, "agents": 5.0},
        "failed": 0,
        "rewards": {run: {rule: own if rule == run else other for rule in RULES} for run in part.runs},
        "runs": {run: {"versions": 5, "staleness_max": 1.0} for run in part.runs},
        **changes,
    }


def test_runs_together_are_compared_with_the_same_runs_alone() -> None:
    parts = parts_of(EMBEDDED, RUNS[EMBEDDED])
    together, *others = parts
    measured = {part: figures(part) for part in others}
    measured = {together: figures(together, memory_mib=880.0, trajectories_per_s=18.0, wall=60.0), **measured}
    found = summary(measured)
    assert found["own_reward"] == [0.9] * 8
    assert found["highest_other_reward"] == 0.02
    assert found["trajectories_per_s_vs_one"] == 0.9
    assert found["memory_vs_one"] == 1.1
    assert found["wall_vs_one_after_another"] == 0.5, "60 seconds instead of eight times 15"
    assert all(target.reached for target in judged(EMBEDDED, found))
    assert page_rows(found)[0] == ["solves", "0.90", "0.02", "5", "1"]
    section = page({"machine": {"processor": "P", "date": "2026-01-02"}, EMBEDDED: found})
    assert rows(section) == [
        *([EMBEDDED, *row] for row in page_rows(found)),
        ["embedded, 8 runs together", "20.0", "60", "880", "20.0"],
        ["embedded, one after another", "20.0", "120", "800", "20.0"],
        ["embedded, one after another, whole weights", "20.0", "120", "800", "20.0"],
        *target_rows(judged(EMBEDDED, found)),
    ]
    assert "NOT REACHED" not in verdict({EMBEDDED: found}, (EMBEDDED, SGLANG))


def test_each_target_is_missed_by_worse_figures() -> None:
    together, *others = parts_of(SGLANG, RUNS[SGLANG])
    measured = {part: figures(part) for part in others}
    slow = figures(together, own=0.8, other=0.2, memory_mib=1300.0, trajectories_per_s=10.0, failed=1)
    found = summary({together: slow, **measured})
    assert not any(target.reached for target in judged(SGLANG, found))


def test_the_configuration_declares_every_run(tmp_path: Path) -> None:
    file = tmp_path / "runs.toml"
    file.write_text(configuration(tuple(RULES), weights="adapter", engine="embedded"))
    settings = load_settings(file)
    assert [run.name for run in settings.declared_runs] == list(RULES)
    assert {run.weights for run in settings.declared_runs} == {"adapter"}


def test_an_interrupted_measurement_continues_unless_the_work_changed(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    part, other, *_ = parts_of(EMBEDDED, RUNS[EMBEDDED])
    Journal(path, "a key").add(part, {"seconds": 1.0})
    again = Journal(path, "a key")
    assert (again[part], again.find(other)) == ({"seconds": 1.0}, None)
    assert Journal(path, "another key").find(part) is None
