"""Test how `make examples` reads, ends and judges the runs of examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.examples.environment import constraints_beside
from benchmarks.examples.plot import draw
from benchmarks.examples.report import CURVE_ATTEMPTS, curve, figures, judged, page_rows
from benchmarks.examples.run import WINDOW, Bounds, Measured, names, reached, read_journal
from proxy.cli.attempts.journal import Finished, Journal

LEARNT = Measured(rewards=(0.0,) * WINDOW + (1.0,) * WINDOW, failed_calls=0, seconds=60.0)


def test_every_example_with_a_model_is_run() -> None:
    assert "calculator" in names()
    assert "tiny" not in names()


def test_rewards_and_failures_are_read_from_the_journal_of_the_attempts(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    assert read_journal(path) == ([], 0)
    with Journal(path) as journal:
        for number, (reward, problem) in enumerate([(0.5, None), (None, "it crashed"), (1.0, None)]):
            journal.add(
                Finished(task="a", number=number, session_id="s", seconds=1.0, reward=reward, problem=problem)
            )
    with path.open("a") as file:
        file.write('{"task": "a", "num')  # a line that is being written
    assert read_journal(path) == ([0.5, 1.0], 1)


def test_a_run_ends_with_a_window_that_has_none_of_the_first_attempts() -> None:
    bounds = Bounds(enough=0.9)
    assert not reached((1.0,) * (2 * WINDOW - 1), bounds)
    assert reached((0.0,) * WINDOW + (1.0,) * WINDOW, bounds)
    assert not reached((1.0,) * WINDOW + (0.5,) * WINDOW, bounds)


def test_a_curve_has_whole_parts_only() -> None:
    assert curve((0.0,) * CURVE_ATTEMPTS + (1.0,) * (2 * CURVE_ATTEMPTS - 1)) == [0.0, 1.0]


def test_the_worst_seed_is_judged() -> None:
    worse = Measured(rewards=(0.5,) * (2 * WINDOW), failed_calls=1, seconds=200.0)
    assert [target.reached for target in judged("a", figures([LEARNT]))] == [True] * 4
    assert [target.reached for target in judged("a", figures([LEARNT, worse]))] == [False] * 4
    assert page_rows({"a": figures([LEARNT, worse])}) == [["a", "0.00–0.50", "0.50–1.00", "256", "60–200", "1"]]


def test_equal_figures_give_equal_plots(tmp_path: Path) -> None:
    measured = json.loads(json.dumps(figures([LEARNT, LEARNT])))
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
    one, two = (draw("a", measured, tmp_path / place).read_bytes() for place in ("one", "two"))
    assert one == two
    assert b"seed 1" in one


def test_an_example_may_pin_another_version_than_base_rl() -> None:
    constraints = "# pins\nwebsockets==17.4\ntyping_extensions==4.16.0\nPyYAML==6.0.3\n"
    assert constraints_beside("websockets==16.1.1\n", constraints) == constraints.replace("websockets==17.4\n", "")
    assert constraints_beside("# none\nTyping.Extensions==4.15\npyyaml[x]==6\n", constraints) == (
        "# pins\nwebsockets==17.4\n"
    )


@pytest.mark.parametrize("name", names())
def test_an_example_is_one_that_a_folder_can_begin_with(name: str) -> None:
    from proxy.cli.starting_folder import examples

    assert name in examples()
