"""The trunk of a chat completion stays short enough to be read, and its calls few. About four seconds: it starts the
scripted engine, a process of its own, because the trunk ends only behind a real connection."""

from __future__ import annotations

from scripts.trace_call import report, traced_completions

MOST_CALLS = 1300
"""Bound on the calls of a first completion, with room for differences between machines and versions of libraries."""


async def test_a_completion_is_followed_in_fifteen_files() -> None:
    traces = await traced_completions()
    traced = report(*traces)
    trunk = traced["trunk"]
    assert len(trunk) <= 15, trunk
    assert trunk[0] == "proxy/app.py"
    steps = ["dialects/endpoints", "calls/service", "calls/prompts", "calls/generation", "engines/generations"]
    steps += ["calls/recording"]
    places = [trunk.index(f"proxy/{step}.py") for step in steps]
    assert places == sorted(places), "the files come in the order of the call"
    assert "proxy/database/unit_of_work.py" in traced["leaves"], "the way ends in the commit"
    assert all(sum(trace.by_caller.values()) == trace.calls for trace in traces)
    first, second = (calls["python"] + calls["builtin"] for calls in traced["calls"])
    assert first < MOST_CALLS, "make trace-call shows where they are"
    assert second < MOST_CALLS + 200
