"""Wire patterns: the ways clients send a run's history. Each keeps a run in one session, whole, with no turn doubled.

A pattern is a recorded shape of requests, not a client's name. Each is sent once alone and eight times in parallel
with equal prompts and answers. No pattern names its session: ids, conversation and trace must be enough.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.engines.protocol import GenerateRequest
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.agents import whole_paths
from tests.proxy.calls.world import CALL, TOOLS, World, open_world

STEPS = 4
TASK = "Find out why the test fails."
SYSTEM = "You are a coding agent."
BESIDE = "I look it up."
Message = dict[str, Any]


@pytest.fixture
def chat_url(database_url: str) -> str:
    """The session of a call depends on the store, so these tests run on both databases."""
    return database_url


class Run:
    """An agent's run over one pattern: `send` makes the next request from `history` and adds the answer to it."""

    tools = True
    continuations: tuple[str, ...] = ("new", *("exact",) * (STEPS - 1))
    """The expected continuations of the run's own turns, in order."""
    thought = ""
    """The thought at the beginning of an answer's text."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.history: list[Any] = []
        self.sessions: list[str] = []
        self.turns: list[str] = []

    async def step(self, index: int, result: str) -> None:
        """Send the history with the result of the previous step."""
        if index == 0:
            self.begin()
        else:
            self.add_result(result)
        await self.send()

    def begin(self) -> None:
        self.history = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]

    async def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        response = await self.world.http.post(path, json={"model": "policy", **body}, headers=headers or {})
        assert response.status_code == 200, response.text
        self.sessions.append(response.headers["x-base-rl-session"])
        self.turns.append(response.headers["x-base-rl-turn"])
        answer: dict[str, Any] = response.json()
        return answer

    def add_result(self, result: str) -> None:
        call = self.history[-1]["tool_calls"][0]
        self.history.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    async def send(self) -> None:
        answer = await self.post("/v1/chat/completions", self.body(), self.headers())
        self.history.append(self.echo(answer["choices"][0]["message"]))

    def body(self) -> dict[str, Any]:
        return {"messages": self.history, **({"tools": TOOLS} if self.tools else {})}

    def headers(self) -> dict[str, str]:
        return {}

    def echo(self, message: Message) -> Message:
        """Return the answer as the client sends it back."""
        return message


class WholeEcho(Run):
    """Tool calls; the answer is sent back unchanged."""


class NullBesideCall(Run):
    """The text beside a tool call is sent back as null."""

    def echo(self, message: Message) -> Message:
        return {**message, "content": None} if message.get("tool_calls") else message


class EmptyBesideCall(Run):
    def echo(self, message: Message) -> Message:
        return {**message, "content": ""} if message.get("tool_calls") else message


class NothingBesideCall(Run):
    def echo(self, message: Message) -> Message:
        return {key: message[key] for key in ("role", "tool_calls") if message.get(key)}


class RewrittenArguments(Run):
    """Arguments are parsed and written again, and the content is sent as parts."""

    def echo(self, message: Message) -> Message:
        calls = [
            {
                **call,
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True),
                },
            }
            for call in message.get("tool_calls") or ()
        ]
        return {"role": "assistant", "content": [{"type": "text", "text": message["content"]}], "tool_calls": calls}


class TracePerRequest(Run):
    """Usual HTTP instrumentation: every request has a trace of its own."""

    def headers(self) -> dict[str, str]:
        return {"traceparent": f"00-{random.getrandbits(128) or 1:032x}-{random.getrandbits(64) or 1:016x}-01"}


class OtherUserEachTime(Run):
    """`user` differs from call to call: it names no session."""

    def body(self) -> dict[str, Any]:
        return {**super().body(), "user": f"user-{len(self.turns)}"}


class AnthropicBlocks(Run):
    """Anthropic's blocks: tool_use and tool_result."""

    def begin(self) -> None:
        self.history = [{"role": "user", "content": TASK}]

    def add_result(self, result: str) -> None:
        used = next(block for block in self.history[-1]["content"] if block["type"] == "tool_use")
        block = {"type": "tool_result", "tool_use_id": used["id"], "content": result}
        self.history.append({"role": "user", "content": [block]})

    async def send(self) -> None:
        tools = [{"name": "calculator", "input_schema": {"type": "object"}}]
        body = {"system": SYSTEM, "messages": self.history, "tools": tools, "max_tokens": 100}
        answer = await self.post("/v1/messages", body)
        self.history.append({"role": "assistant", "content": self.blocks(answer["content"])})

    def blocks(self, content: list[Message]) -> list[Message]:
        return content


class AnthropicWithoutText(AnthropicBlocks):
    """Only the tool_use block of an answer is sent back."""

    def blocks(self, content: list[Message]) -> list[Message]:
        return [block for block in content if block["type"] == "tool_use"] or content


class ResponsesItems(Run):
    """Items of the Responses API, all of them with every request."""

    def begin(self) -> None:
        self.history = [{"role": "user", "content": TASK}]

    def add_result(self, result: str) -> None:
        call = next(item for item in reversed(self.history) if item.get("type") == "function_call")
        self.history.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})

    async def send(self) -> None:
        tools = [{"type": "function", **TOOLS[0]["function"]}]
        answer = await self.post("/v1/responses", {**self.asked(), "tools": tools})
        self.take(answer)

    def asked(self) -> dict[str, Any]:
        return {"instructions": SYSTEM, "input": self.history}

    def take(self, answer: dict[str, Any]) -> None:
        self.history += answer["output"]


class ResponsesWithoutItemIds(ResponsesItems):
    def take(self, answer: dict[str, Any]) -> None:
        self.history += [{key: item[key] for key in item if key != "id"} for item in answer["output"]]


class ResponsesWithoutText(ResponsesItems):
    """The message item beside a call is left out."""

    def take(self, answer: dict[str, Any]) -> None:
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        self.history += calls or answer["output"]


class PreviousResponse(ResponsesItems):
    """Only new items are sent, with `previous_response_id`."""

    last: str | None = None

    def asked(self) -> dict[str, Any]:
        new = self.history if self.last is None else self.history[-1:]
        return {"instructions": SYSTEM, "input": new, "previous_response_id": self.last}

    def take(self, answer: dict[str, Any]) -> None:
        super().take(answer)
        self.last = answer["id"]


class TextOnly(Run):
    """A loop in prose: no ids are sent back."""

    tools = False

    def add_result(self, result: str) -> None:
        self.history.append({"role": "user", "content": result})


class TextOnlyTracePerRequest(TracePerRequest, TextOnly):
    """No ids, and a trace of its own for every request."""


class Reminded(Run):
    """A part is added to the last user message, and left out of the next request."""

    tools = False
    continuations = ("new", *("edited",) * (STEPS - 1))

    def add_result(self, result: str) -> None:
        self.history.append({"role": "user", "content": result})

    def body(self) -> dict[str, Any]:
        *before, last = self.history
        return {"messages": [*before, self.reminded(last)]}

    def reminded(self, last: Message) -> Message:
        parts = [last["content"], "Be brief."]
        return {"role": "user", "content": [{"type": "text", "text": text} for text in parts]}


class RemindedBetweenTags(Reminded):
    """The reminder is between tags after the text."""

    def reminded(self, last: Message) -> Message:
        return {"role": "user", "content": f"{last['content']}\n<system-reminder>\nBe brief.\n</system-reminder>"}


class SideCalls(TextOnly):
    """A title or commit message is requested in between, in a conversation of its own that names nothing."""

    async def send(self) -> None:
        await super().send()
        if len(self.turns) == 2:
            aside = [{"role": "system", "content": "Write a title."}, {"role": "user", "content": f"{self.number}"}]
            response = await self.world.http.post("/v1/chat/completions", json={"model": "policy", "messages": aside})
            assert response.status_code == 200


class ThoughtDropped(TextOnly):
    """The model's thought is part of the text, and the client leaves it out of the history."""

    thought = "<think>\nI wonder.\n</think>\n\n"

    def echo(self, message: Message) -> Message:
        return {**message, "content": message["content"].partition("</think>")[2].lstrip()}


class GrowingMessage(Run):
    """One user message contains all steps, as in ReAct's prompts; the answer is cut at a stop string."""

    tools = False
    continuations = ("new", *("edited",) * (STEPS - 1))

    def begin(self) -> None:
        self.history = [f"{SYSTEM}\nQuestion: {TASK}\nThought:"]

    def add_result(self, result: str) -> None:
        self.history.append(f"\nObservation: {result}\nThought:")

    def messages(self) -> list[Message]:
        return [{"role": "user", "content": "".join(self.history)}]

    async def send(self) -> None:
        body = {"messages": self.messages(), "stop": ["\nObservation"]}
        answer = await self.post("/v1/chat/completions", body)
        self.history.append(f" {answer['choices'][0]['message']['content'].strip()}")


class GrowingBehindSystem(GrowingMessage):
    """The same after a system message, with the message sent as a part."""

    def begin(self) -> None:
        self.history = [f"Question: {TASK}\n"]

    def messages(self) -> list[Message]:
        part = {"type": "text", "text": "".join(self.history)}
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": [part]}]


class GrowingResponses(GrowingMessage):
    """The same as the text input of the Responses API."""

    async def send(self) -> None:
        answer = await self.post("/v1/responses", {"instructions": SYSTEM, "input": "".join(self.history)})
        self.history.append(f" {answer['output'][0]['content'][0]['text'].strip()}")


NAMING: list[type[Run]] = [
    WholeEcho,
    NullBesideCall,
    EmptyBesideCall,
    NothingBesideCall,
    RewrittenArguments,
    TracePerRequest,
    OtherUserEachTime,
    AnthropicBlocks,
    AnthropicWithoutText,
    ResponsesItems,
    ResponsesWithoutItemIds,
    ResponsesWithoutText,
    PreviousResponse,
]
"""Patterns in which our ids are sent back: a run's session is certain."""

GROWING: list[type[Run]] = [GrowingMessage, GrowingBehindSystem, GrowingResponses]

NAMELESS: list[type[Run]] = [TextOnly, TextOnlyTracePerRequest, Reminded, RemindedBetweenTags, *GROWING]
"""Patterns without ids: runs that have been equal so far cannot be distinguished, but each session is one whole
run."""


def answer_by_step(world: World, pattern: type[Run]) -> Callable[[GenerateRequest], list[int]]:
    """Answer equal prompts equally: a tool call beside text, and plain text after the last result."""

    def script(request: GenerateRequest) -> list[int]:
        step = world.template.tokenizer.decode(list(request.input_ids)).count("Result ")
        text = (
            f"{BESIDE}\n{CALL}" if pattern.tools and step < STEPS - 1 else f"{pattern.thought}I answer {step} here."
        )
        return [*world.template.encode(text), world.template.stop_ids[0]]

    return script


async def runs_of(world: World, pattern: type[Run], count: int, *, equal_results: bool) -> list[Run]:
    """Run the patterns in parallel, step by step, each step in another order."""
    world.engine.script = answer_by_step(world, pattern)
    runs = [pattern(world, number) for number in range(count)]
    order = random.Random(7)
    for index in range(STEPS):
        shuffled = order.sample(runs, len(runs))
        whose = 0 if equal_results else 1
        await asyncio.gather(*(run.step(index, f"Result {index} {whose * run.number}") for run in shuffled))
    return runs


async def assert_whole(world: World, runs: list[Run]) -> None:
    """Assert that every session is one line of `STEPS` turns, each once, and each the exact continuation of the
    previous one."""
    turns = await world.turns()
    assert len(turns) == len({turn.id for turn in turns}) == STEPS * len(runs), "no turn is lost or doubled"
    by_session: dict[str, list[Any]] = {}
    for turn in turns:
        by_session.setdefault(turn.session_id, []).append(turn)
    assert len(by_session) == len(runs) == len(await world.sessions())
    for of_session in by_session.values():
        of_session.sort(key=lambda turn: turn.ordinal)
        assert [turn.continuation for turn in of_session] == list(runs[0].continuations)
        expected = [None, *(turn.id for turn in of_session[:-1])]
        if all(turn.continuation != "edited" for turn in of_session):
            assert [turn.parent_id for turn in of_session] == expected
    await whole_paths(world)


@pytest.mark.parametrize("pattern", [*NAMING, *NAMELESS])
async def test_one_run_is_one_session(world: World, pattern: type[Run]) -> None:
    (run,) = await runs_of(world, pattern, 1, equal_results=True)
    assert len(set(run.sessions)) == 1
    await assert_whole(world, [run])


@pytest.mark.parametrize("equal_results", [True, False])
@pytest.mark.parametrize("pattern", NAMING)
async def test_eight_equal_runs_keep_their_own_sessions(
    world: World, pattern: type[Run], equal_results: bool
) -> None:
    runs = await runs_of(world, pattern, 8, equal_results=equal_results)
    assert [len(set(run.sessions)) for run in runs] == [1] * 8
    await assert_whole(world, runs)


@pytest.mark.parametrize("equal_results", [True, False])
@pytest.mark.parametrize("pattern", NAMELESS)
async def test_eight_equal_runs_without_ids_are_eight_whole_sessions(
    world: World, pattern: type[Run], equal_results: bool
) -> None:
    runs = await runs_of(world, pattern, 8, equal_results=equal_results)
    assert Counter(session for run in runs for session in run.sessions) == dict.fromkeys(
        {session for run in runs for session in run.sessions}, STEPS
    )
    await assert_whole(world, runs)


@pytest.mark.parametrize("pattern", GROWING)
async def test_eight_runs_in_one_message_keep_their_own_sessions_by_their_answers(
    world: World, pattern: type[Run]
) -> None:
    """The task and the results are equal; the answers are not. The second answer is shorter than the minimum for a
    first one."""
    runs = [pattern(world, number) for number in range(8)]
    for index in range(STEPS):
        for run in random.Random(index).sample(runs, len(runs)):
            world.say(f"{run.number}" if index == 1 else f"I think of {run.number}.\nAction: look[{index}]")
            await run.step(index, f"Result {index} of 0 to 7: 0 1 2 3 4 5 6 7")
    assert [len(set(run.sessions)) for run in runs] == [1] * 8
    await assert_whole(world, runs)
    assert {turn.attributed_by for turn in await world.turns()} == {"new", "conversation"}


@pytest.mark.parametrize("pattern", [NullBesideCall, TextOnly, GrowingMessage])
async def test_a_second_run_does_not_join_one_that_crashed_and_stayed_open(world: World, pattern: type[Run]) -> None:
    world.engine.script = answer_by_step(world, pattern)
    crashed, second = pattern(world, 0), pattern(world, 1)
    for index in range(2):
        await crashed.step(index, f"Result {index} 0")
    for index in range(STEPS):
        await second.step(index, f"Result {index} 0")
    assert len(set(second.sessions)) == 1
    assert set(second.sessions).isdisjoint(crashed.sessions)


async def test_a_side_call_does_not_disturb_the_run(world: World) -> None:
    (run,) = await runs_of(world, SideCalls, 1, equal_results=True)
    assert len(set(run.sessions)) == 1
    turns = [turn for turn in await world.turns() if turn.session_id == run.sessions[0]]
    assert [turn.continuation for turn in turns] == list(run.continuations)
    assert len(await world.sessions()) == 2, "the side call is a session of its own: nothing ties it to the run"


@pytest.mark.parametrize("count", [1, 8])
async def test_a_thought_that_is_dropped_from_the_text_keeps_the_session(
    chat_url: str, tmp_path: Path, template: ChatTemplate, count: int
) -> None:
    async with open_world(tmp_path, template, {"reasoning_parser": "none"}, url=chat_url) as world:
        runs = await runs_of(world, ThoughtDropped, count, equal_results=False)
        await assert_whole(world, runs)
