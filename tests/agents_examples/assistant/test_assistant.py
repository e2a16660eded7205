from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agents_examples.assistant.agent import NOTED, Assistant, serve
from agents_examples.assistant.demonstrations import TOOL, Habit, conversation
from agents_examples.assistant.judge import judge, verdict
from agents_examples.assistant.reward import evaluate, reward
from agents_examples.assistant.tasks import NO_REMINDER, THANKS, Errand, Reminder, random_errand
from benchmarks.examples.run import EXAMPLES, is_evaluated
from tests.agents_examples.starting import first_answers

Block = dict[str, Any]

ERRAND = Errand(wanted=Reminder(at=7, what="visit Hugo"))


class Server:
    """Answers the Messages API with these blocks in turn, and keeps the requests."""

    def __init__(self, *blocks: Block) -> None:
        self.requests: list[dict[str, Any]] = []
        self._blocks: Iterator[Block] = iter(blocks)

    def client(self) -> AsyncAnthropic:
        app = Starlette(routes=[Route("/v1/messages", self._answer, methods=["POST"])])
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
        return AsyncAnthropic(base_url="http://base-rl.test", api_key="k", max_retries=0, http_client=http)

    async def _answer(self, request: Request) -> Response:
        self.requests.append(json.loads(await request.body()))
        block = next(self._blocks)
        return JSONResponse(
            {
                "id": f"msg_{len(self.requests)}",
                "type": "message",
                "role": "assistant",
                "model": "assistant",
                "content": [block],
                "stop_reason": "tool_use" if block["type"] == "tool_use" else "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": 1, "output_tokens": 1},
            }
        )


def says(text: str) -> Block:
    return {"type": "text", "text": text}


def reminds(**given: Any) -> Block:
    return {"type": "tool_use", "id": "toolu_1", "name": "remind", "input": given}


async def test_the_assistant_notes_the_reminder_and_the_user_thanks() -> None:
    server = Server(reminds(at=7, what="visit Hugo"), says("Done."), says("You are welcome."))
    async with server.client() as client:
        assert await serve(Assistant(client, "assistant"), ERRAND) == [THANKS]
    _, noted, thanked = [request["messages"] for request in server.requests]
    assert noted[-1]["content"] == [{"type": "tool_result", "tool_use_id": "toolu_1", "content": NOTED}]
    assert thanked[-1] == {"role": "user", "content": THANKS}
    assert [message["role"] for message in thanked] == ["user", "assistant"] * 2 + ["user"]


async def test_a_user_who_is_put_off_complains_and_asks_once_more() -> None:
    server = Server(says("Done."), says("When?"), says("I am sorry."))
    async with server.client() as client:
        comments = await serve(Assistant(client, "assistant"), ERRAND)
    assert comments == [NO_REMINDER, f"{NO_REMINDER} Never mind."]
    said = [request["messages"][-1]["content"] for request in server.requests]
    assert said == [ERRAND.request, f"{NO_REMINDER} {ERRAND.request}", f"{NO_REMINDER} Never mind."]


async def test_wrong_arguments_are_told_to_the_model_and_note_nothing() -> None:
    server = Server(reminds(at="seven", what="visit Hugo"), says("Done."))
    async with server.client() as client:
        assistant = Assistant(client, "assistant")
        assert await assistant.answer(ERRAND.request) == "Done."
    assert assistant.reminders == []
    assert server.requests[1]["messages"][-1]["content"][0]["content"].startswith("error: ")


def turn(name: str, parent: int | None, *messages: tuple[str, str]) -> dict[str, Any]:
    return {"id": name, "parent": parent, "messages": [{"role": role, "content": text} for role, text in messages]}


def test_the_judge_rewards_the_answers_that_the_user_commented_on() -> None:
    turns = [
        turn("a", None, ("user", ERRAND.request)),
        turn("b", 0, ("user", f"{NO_REMINDER} {ERRAND.request}")),
        turn("c", 1, ("tool", NOTED)),
        turn("d", 2, ("user", THANKS)),
    ]
    found = {each["turn_id"]: each["value"] for each in judge({"turns": turns})}
    assert found == {"a": -1.0, "c": 1.0}


@pytest.mark.parametrize(
    ("words", "value"),
    [(THANKS, 1.0), (NO_REMINDER, -1.0), ("Nothing else.", None), (ERRAND.request, None), ("", None)],
)
def test_words_that_say_nothing_have_no_verdict(words: str, value: float | None) -> None:
    assert verdict(words) == value


def test_numbers_are_posted_of_evaluations_alone() -> None:
    assert is_evaluated("assistant")
    assert not is_evaluated("retry")
    for comments, satisfied in (([THANKS], 1.0), ([NO_REMINDER, THANKS], 0.0), ([NO_REMINDER, NO_REMINDER], 0.0)):
        assert evaluate({}, comments) == satisfied
        assert reward({}, comments) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("habit", list(Habit))
def test_demonstrated_users_comment_as_the_simulated_one_does(habit: Habit) -> None:
    messages = conversation(ERRAND, [habit, habit], random.Random(0))
    last = next(message["content"] for message in reversed(messages) if message["role"] == "user")
    assert (last == THANKS) == (habit is Habit.NOTE)


def test_the_model_starts_with_few_reminders() -> None:
    rng = random.Random(0)
    errands = [random_errand(rng) for _ in range(64)]
    conversations = [[{"role": "user", "content": errand.request}] for errand in errands]
    said = first_answers(
        EXAMPLES / "assistant" / "checkpoint", conversations, temperature=1.0, longest=48, tools=[TOOL]
    )
    noted = sum(
        f'{{"at": {errand.wanted.at}, "what": "{errand.wanted.what}"}}' in text
        for errand, text in zip(errands, said, strict=True)
    )
    assert 0.03 <= noted / len(errands) <= 0.35
