from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agents_examples.retry.agent import Try, last_number, solve
from agents_examples.retry.reward import WRONG_ANSWER, reward
from agents_examples.retry.tasks import all_sums
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.starting import first_answers

QUESTION = "What is 7 + 8?"


class Server:
    """Answers the Responses API with these texts in turn, and keeps the requests."""

    def __init__(self, *texts: str) -> None:
        self.requests: list[dict[str, Any]] = []
        self._texts: Iterator[str] = iter(texts)

    def client(self) -> AsyncOpenAI:
        app = Starlette(routes=[Route("/v1/responses", self._respond, methods=["POST"])])
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
        return AsyncOpenAI(base_url="http://base-rl.test/v1", api_key="k", max_retries=0, http_client=http)

    async def _respond(self, request: Request) -> Response:
        self.requests.append(json.loads(await request.body()))
        text = {"type": "output_text", "text": next(self._texts), "annotations": []}
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        return JSONResponse(
            {
                "id": f"resp_{len(self.requests)}",
                "object": "response",
                "created_at": 1,
                "model": "retry",
                "status": "completed",
                "output": [message],
                "parallel_tool_calls": False,
                "tool_choice": "auto",
                "tools": [],
            }
        )


async def test_a_wrong_answer_is_followed_by_a_word_on_it_in_the_same_conversation() -> None:
    server = Server("I guess 12", "7 + 8 = 15")
    async with server.client() as client:
        tries = await solve(client, "retry", QUESTION, 15)
    assert [(one.id, one.right) for one in tries] == [("resp_1", False), ("resp_2", True)]
    assert [request["input"] for request in server.requests] == [QUESTION, "12 is too small. Try again."]
    assert [request.get("previous_response_id") for request in server.requests] == [None, "resp_1"]


@pytest.mark.parametrize(
    ("texts", "right"),
    [(["7 + 8 = 15"], [True]), (["I guess 16", "I guess 16", "15"], [False, False]), (["?", "15"], [False, True])],
)
async def test_there_are_two_tries(texts: list[str], right: list[bool]) -> None:
    async with Server(*texts).client() as client:
        assert [one.right for one in await solve(client, "retry", QUESTION, 15)] == right


@pytest.mark.parametrize(("text", "number"), [("7 + 8 = 15", 15), ("-3", -3), ("none", None), ("9" * 5000, None)])
def test_the_last_number_counts(text: str, number: int | None) -> None:
    assert last_number(text) == number


def test_being_right_at_once_earns_most() -> None:
    def total(*right: bool) -> float:
        tries = [Try(id=str(number), text="", right=each) for number, each in enumerate(right)]
        return sum(float(item["reward"]) for item in reward({}, tries))

    assert total(True) > total(False, True) > total(False, False)
    wrong, session = reward({}, [Try(id="a", text="", right=False), Try(id="b", text="", right=True)])
    assert wrong == {"turn_id": "a", "reward": WRONG_ANSWER}
    assert session == {"reward": 1.0}


def test_the_model_starts_with_few_right_answers() -> None:
    sums = all_sums()
    conversations = [[{"role": "user", "content": one.question}] for one in sums]
    said = first_answers(EXAMPLES / "retry" / "checkpoint", conversations, temperature=1.0, longest=24)
    right = sum(last_number(text) == one.result for one, text in zip(sums, said, strict=True))
    assert 0.05 <= right / len(sums) <= 0.35
