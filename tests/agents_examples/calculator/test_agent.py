from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from agents_examples.calculator import agent
from agents_examples.calculator.agent import solve
from agents_examples.calculator.tasks import CALCULATOR
from tests.agents_examples.calculator.server import Message, Script, ScriptedServer, calls, says


def in_turn(*answers: Message) -> Script:
    remaining = iter(answers)
    return lambda _: next(remaining)


async def test_uses_the_tool_and_answers() -> None:
    server = ScriptedServer(in_turn(calls('{"a": 12, "b": 7, "op": "*"}'), says("The answer is 84.")))
    async with server.client() as client:
        answer = await solve(client, "calculator", "What is 12 * 7?")
    assert answer.text == "The answer is 84."
    assert answer.calls == 2
    assert [message["role"] for message in answer.messages] == ["user", "assistant", "tool", "assistant"]
    assert answer.messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "84"}
    assert server.requests[0]["messages"] == [{"role": "user", "content": "What is 12 * 7?"}]
    assert server.requests[1]["messages"] == answer.messages[:3]
    assert all(json.dumps(request["tools"]) == json.dumps([CALCULATOR]) for request in server.requests)


@pytest.mark.parametrize("call", [calls("{broken"), calls("{}", name="abacus")])
async def test_a_bad_call_is_answered_with_an_error(call: Message) -> None:
    server = ScriptedServer(in_turn(call, says("I do not know.")))
    async with server.client() as client:
        answer = await solve(client, "calculator", "What is 1 + 1?")
    assert answer.messages[2]["content"].startswith("error: ")
    assert answer.text == "I do not know."


async def test_gives_up_after_its_last_turn() -> None:
    server = ScriptedServer(lambda _: calls('{"a": 1, "b": 1, "op": "+"}'))
    async with server.client() as client:
        answer = await solve(client, "calculator", "What is 1 + 1?", max_turns=2)
    assert answer.text == ""
    assert answer.calls == len(server.requests) == 2


async def test_a_failed_call_raises() -> None:
    server = ScriptedServer(lambda _: says(""), failing_requests=1)
    async with server.client() as client:
        with pytest.raises(openai.InternalServerError):
            await solve(client, "calculator", "What is 1 + 1?")
    assert len(server.requests) == 1


def test_knows_no_more_than_an_address_and_a_key() -> None:
    source = Path(agent.__file__).read_text()
    assert len(source.splitlines()) < 100
    assert "base_rl" not in source.replace("base_url", "")


def test_as_a_program_it_reports_errors() -> None:
    """Nothing listens on port 9 of this machine."""
    environment = os.environ | {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "x"}
    command = [sys.executable, agent.__file__, "What is 1 + 1?"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
