"""Tables and charts in the terminal."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from proxy.cli.drawing import LiveRun, live_line, live_table, sparkline, transcript


def rendered(drawing: Any) -> str:
    console = Console(width=100, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(drawing)
    return captured.get()


@given(st.lists(st.floats(0, 1), max_size=300), st.integers(1, 60))
def test_a_sparkline_is_never_wider_than_asked(values: list[float], width: int) -> None:
    assert len(sparkline(values, width=width)) == min(len(values), width)


def test_a_sparkline_rises_with_its_values() -> None:
    line = sparkline([0.0, 0.25, 0.5, 0.75, 1.0])
    assert line[0] == "▁"
    assert line[-1] == "█"
    assert list(line) == sorted(line)


def live(**changes: Any) -> LiveRun:
    values: dict[str, Any] = {
        "sessions": 256,
        "open_sessions": 64,
        "reward": 0.5,
        "reward_history": [0.1, 0.5],
        "version": 3,
        "swaps": 3,
        "staleness_mean": 1.2,
        "staleness_max": 2,
        "tokens_per_second": 1234.0,
        "failed_calls": 0,
        "turns": 500,
        "seconds": 12.0,
    }
    return LiveRun(**{**values, **changes})


def test_the_live_table_names_reward_version_staleness_and_the_admin_page() -> None:
    text = rendered(live_table(live(), title="demo", admin_url="http://h/admin", admin_key="rl-x", target=0.9))
    for expected in (
        "0.50",
        "256 done",
        "3 hot swaps",
        "1.2 mean, 2 max",
        "1,234 tokens/s",
        "http://h/admin",
        "rl-x",
    ):
        assert expected in text


def test_before_the_first_session_nothing_is_shown_as_zero() -> None:
    early = live(reward=None, reward_history=[], staleness_mean=None, staleness_max=None)
    text = rendered(live_table(early, title="demo", admin_url="u", admin_key="k", target=0.9))
    assert "waiting for the first sessions" in text
    assert "reward –" in live_line(early)


def test_a_transcript_shows_calls_results_and_reward() -> None:
    call = {"function": {"name": "calculator", "arguments": '{"a": 12, "b": 7, "op": "*"}'}}
    record = {
        "messages": [
            {"role": "user", "content": "What is 12 * 7?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "84"},
            {"role": "assistant", "content": "The answer is 84."},
        ],
        "reward": 1.0,
    }
    text = rendered(transcript("after", record))
    for expected in ('calculator(a=12, b=7, op="*")', "84", "The answer is 84.", "reward     1"):
        assert expected in text


def test_a_transcript_shows_invalid_arguments_unchanged() -> None:
    call = {"function": {"name": "calculator", "arguments": "{broken"}}
    text = rendered(transcript("t", {"messages": [{"role": "assistant", "tool_calls": [call]}], "reward": 0}))
    assert "calculator({broken)" in text


def test_the_live_table_keeps_its_rows_in_80_columns() -> None:
    console = Console(width=80, force_terminal=False)
    picture = live_table(
        live(reward=0.95, reward_history=[0.5] * 500),
        title="demo",
        admin_url="http://127.0.0.1:8080/admin",
        admin_key="rl-admin-" + "x" * 32,
        target=0.9,
    )
    with console.capture() as captured:
        console.print(picture)
    reward = next(line for line in captured.get().splitlines() if "mean reward" in line)
    assert "→ 0.90" in reward
    assert "rl-admin-" + "x" * 32 in captured.get()
