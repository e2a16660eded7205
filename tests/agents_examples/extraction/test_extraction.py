from __future__ import annotations

import json
import random
from typing import Any

import pytest

from agents_examples.extraction.agent import INSTRUCTION, ORDER, extract
from agents_examples.extraction.reward import reward
from agents_examples.extraction.tasks import FIELDS, random_text
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.calculator.server import ScriptedServer, says
from tests.agents_examples.starting import first_answers

RIGHT = {"name": "Anna", "count": 3, "thing": "cups", "city": "Oslo"}
TASK: dict[str, Any] = {"id": "a", "text": "Anna ordered 3 cups for Oslo.", "order": RIGHT}


async def test_the_agent_asks_for_the_schema_and_returns_the_answer() -> None:
    server = ScriptedServer(lambda _: says(json.dumps(RIGHT)))
    async with server.client() as client:
        assert json.loads(await extract(client, "extraction", TASK["text"])) == RIGHT
    (request,) = server.requests
    assert request["response_format"] == ORDER
    assert [message["content"] for message in request["messages"]] == [INSTRUCTION, TASK["text"]]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (json.dumps(RIGHT), {"name", "count", "thing", "city"}),
        (json.dumps(RIGHT | {"city": "Rome"}), {"name", "count", "thing"}),
        (json.dumps(RIGHT | {"count": "3"}), {"name", "thing", "city"}),
        (json.dumps(RIGHT | {"count": True}), {"name", "thing", "city"}),
        (json.dumps({"name": "Anna"}), {"name"}),
        (json.dumps(RIGHT)[:-4], set()),
        ("[]", set()),
        ("", set()),
    ],
)
def test_every_right_field_earns_its_share(answer: str, right: set[str]) -> None:
    found = reward(TASK, answer)
    assert found["components"] == {field: float(field in right) for field in FIELDS}
    assert found["reward"] == len(right) / 4


def test_the_model_starts_with_most_fields_wrong() -> None:
    rng = random.Random(0)
    texts = [random_text(rng) for _ in range(48)]
    conversations = [
        [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text.text}] for text in texts
    ]
    answers = first_answers(EXAMPLES / "extraction" / "checkpoint", conversations, temperature=1.0, longest=64)
    rewards = [
        reward({"order": vars(text.order)}, answer)["reward"] for text, answer in zip(texts, answers, strict=True)
    ]
    assert 0.1 <= sum(rewards) / len(rewards) <= 0.4
