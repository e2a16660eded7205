"""Attempts of agents that are written in a framework, each in the environment that `make example` installs for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agents_examples.tiny.vocabulary import render
from benchmarks.examples.environment import interpreter_for
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.calculator.server import Message, ScriptedServer
from tests.docs.markdown import ROOT
from tests.proxy.overview.serving import serving_app

SPECIALISTS_SESSION = "handoffs-ses_1"
KEYS = {"OPENAI_API_KEY": "rl-session", "SUMS_API_KEY": "rl-run-sums", "UNITS_API_KEY": "rl-run-units"}
_ATTEMPTS = """
import asyncio, json, os, sys, types

def leave(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in ("127.0.0.1", "localhost"):
        print("contacted", host, file=sys.stderr, flush=True)
        os._exit(7)

sys.addaudithook(leave)
from agents_examples.{name}.agent import attempt

async def main():
    for task, address in json.loads(sys.argv[1]):
        session = types.SimpleNamespace(id="ses_1", model="{name}", base_url=address, api_key="rl-session")
        print(json.dumps(await attempt(task, session)))

asyncio.run(main())
"""
"""Attempts by a process that ends with status 7 if it contacts another machine, as a framework's tracing might."""


@dataclass(frozen=True, kw_only=True)
class Attempted:
    """What the agent returned, and the server with the requests that it made."""

    result: Any
    server: ScriptedServer

    @property
    def requests(self) -> list[dict[str, Any]]:
        return self.server.requests


async def attempts_with(name: str, cases: Sequence[tuple[dict[str, Any], Sequence[Message]]]) -> list[Attempted]:
    """Let an agent attempt tasks, each with a model that says the messages of its case.

    One process makes all attempts: importing a framework takes seconds.
    """
    servers = [_saying(said) for _, said in cases]
    python = await asyncio.to_thread(interpreter_for, EXAMPLES / name)
    async with contextlib.AsyncExitStack() as running:
        addresses = [await running.enter_async_context(serving_app(server.app())) for server in servers]
        given = [(task, f"{address}/v1") for (task, _), address in zip(cases, addresses, strict=True)]
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", _ATTEMPTS.format(name=name), json.dumps(given)),
            cwd=ROOT,
            env={**os.environ, **KEYS},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    results = map(json.loads, output.splitlines())
    return [Attempted(result=result, server=server) for result, server in zip(results, servers, strict=True)]


def _saying(said: Sequence[Message]) -> ScriptedServer:
    answers = iter(said)
    return ScriptedServer(lambda _: next(answers), named={SPECIALISTS_SESSION: KEYS["SUMS_API_KEY"]})


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
    """Return the assistant's messages as the API answers them."""
    return [{"content": None, **message} for message in messages if message["role"] == "assistant"]
