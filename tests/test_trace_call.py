"""The trunk of a chat completion stays short enough to be read, and its calls few. About four seconds: it starts the
scripted engine, a process of its own, because the trunk ends only behind a real connection."""

from __future__ import annotations

from scripts.trace_call import report, traced_completions

MOST_CALLS = 1550
"""Of a first completion, with room for what differs between machines and versions of libraries."""


async def test_a_completion_is_followed_in_fifteen_files() -> None:
    traced = report(*await traced_completions())
    trunk = traced["trunk"]
    assert len(trunk) <= 15, trunk
    assert trunk[0] == "proxy/app.py"
    steps = ["dialects/endpoints", "calls/service", "calls/prompts", "calls/generation", "engines/sglang"]
    steps += ["calls/recording", "database/unit_of_work"]
    places = [trunk.index(f"proxy/{step}.py") for step in steps]
    assert places == sorted(places), "the files come in the order of the call"
    first, second = (calls["python"] + calls["builtin"] for calls in traced["calls"])
    assert first < MOST_CALLS, "make trace-call shows where they are"
    assert second < MOST_CALLS + 200
