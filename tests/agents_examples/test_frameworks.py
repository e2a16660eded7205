"""Test the agents that are written in a framework, each in the environment that `make example` installs for it."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import itertools
import json
import random
import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agents_examples.service import demonstrations as service
from agents_examples.service.tasks import Case, random_request
from agents_examples.tiny.vocabulary import render
from benchmarks.examples.environment import interpreter_for
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.calculator.server import Message, ScriptedServer, calls, says
from tests.docs.markdown import ROOT
from tests.proxy.overview.serving import serving_app

FRAMEWORKS = {"service": "pydantic_ai"}
_ATTEMPT = """
import asyncio, json, sys, types
from agents_examples.{name}.agent import attempt
session = types.SimpleNamespace(model="{name}", base_url=sys.argv[2], api_key="rl-session")
print(json.dumps(asyncio.run(attempt(json.loads(sys.argv[1]), session))))
"""


def test_all_examples_with_a_framework_are_tested_here() -> None:
    assert {file.parent.name for file in EXAMPLES.glob("*/requirements.txt")} == FRAMEWORKS.keys()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_without_its_framework_an_agent_says_what_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FRAMEWORKS[name], None)
    monkeypatch.delitem(sys.modules, f"agents_examples.{name}.agent", raising=False)
    with pytest.raises(ImportError, match=rf"pip install -r .*{name}/requirements.txt"):
        importlib.import_module(f"agents_examples.{name}.agent")


async def attempt_with(name: str, task: dict[str, Any], said: Sequence[Message]) -> tuple[Any, list[dict[str, Any]]]:
    """Let an agent attempt a task with a model that says these messages. Return its result and its requests."""
    answers = iter(said)
    server = ScriptedServer(lambda _: next(answers))
    python = await asyncio.to_thread(interpreter_for, EXAMPLES / name)
    async with serving_app(server.app()) as address:
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", _ATTEMPT.format(name=name), json.dumps(task), f"{address}/v1"),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    return json.loads(output), server.requests


def rendered(name: str, messages: Sequence[Message], tools: Sequence[Message]) -> str:
    """Return a conversation as the server renders it for the model. The order of keys counts."""
    tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(EXAMPLES / name / "checkpoint"))
    return render(tokenizer, messages, tools=tools, generation_prompt=True)


def assert_sent_as_demonstrated(
    name: str, requests: Sequence[dict[str, Any]], messages: Sequence[Message], tools: Sequence[Message]
) -> None:
    """Fail unless each request has the text that the model was warmed up with."""
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(requests) == len(ends)
    for request, end in zip(requests, ends, strict=True):
        assert rendered(name, request["messages"], request["tools"]) == rendered(name, messages[:end], tools)


def spoken(messages: Sequence[Message]) -> list[Message]:
    return [{"content": None, **message} for message in messages if message["role"] == "assistant"]


@pytest.mark.clients
async def test_the_service_sends_what_was_demonstrated() -> None:
    rng = random.Random(0)
    wishes = itertools.product(Case, (False, True))
    for case, has_city in wishes:
        request = next(
            one
            for one in iter(lambda: random_request(rng), None)
            if one.case is case and (one.city is not None) is has_city and not one.names_order
        )
        task = {**dataclasses.asdict(request), "wanted": request.wanted}
        messages = service.conversation(request, service.Habit.KEEP_POLICY)
        result, requests = await attempt_with("service", task, spoken(messages))
        assert result == request.wanted
        assert_sent_as_demonstrated("service", requests, messages, service.TOOLS)


@pytest.mark.clients
async def test_the_service_ends_with_a_model_that_cannot_call_tools() -> None:
    request = random_request(random.Random(0))
    task = {**dataclasses.asdict(request), "wanted": request.wanted}
    for bad in (calls("{bad", name="find"), calls('{"order":1}', name="absent"), calls('{"order":"x"}', name="find")):
        result, _ = await attempt_with("service", task, [bad] * 20)
        assert result["tickets"] == []
    endless, requests = await attempt_with("service", task, [calls('{"order":100}', name="find")] * 20)
    assert endless["tickets"] == []
    assert len(requests) == 5
    _, requests = await attempt_with("service", task, [says("No.")] * 20)
    assert len(requests) == 2
