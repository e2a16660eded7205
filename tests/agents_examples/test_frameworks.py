"""Test the agents that are written in a framework, each in the environment that `make example` installs for it."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from agents_examples.handoffs import demonstrations as handoffs
from agents_examples.handoffs.tasks import SUMS, UNITS, Question, sums
from agents_examples.search import demonstrations as search
from agents_examples.search.tasks import WORKERS, Kind, random_world
from agents_examples.search.tasks import question as search_question
from agents_examples.search.tools import index
from agents_examples.service import demonstrations as service
from agents_examples.service.tasks import Case, Request, random_request
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.calculator.server import Message, calls, says
from tests.agents_examples.frameworks import (
    KEYS,
    SPECIALISTS_SESSION,
    assert_sent_as_demonstrated,
    attempts_with,
    rendered,
    spoken,
)

FRAMEWORKS = {"handoffs": "agents", "search": "langgraph.graph", "service": "pydantic_ai"}


def test_all_examples_with_a_framework_are_tested_here() -> None:
    assert {file.parent.name for file in EXAMPLES.glob("*/requirements.txt")} == FRAMEWORKS.keys()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_without_its_framework_an_agent_says_what_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FRAMEWORKS[name], None)
    monkeypatch.delitem(sys.modules, f"agents_examples.{name}.agent", raising=False)
    with pytest.raises(ImportError, match=rf"pip install -r .*{name}/requirements.txt"):
        importlib.import_module(f"agents_examples.{name}.agent")


def service_task(request: Request) -> dict[str, Any]:
    return {**dataclasses.asdict(request), "wanted": request.wanted}


@pytest.mark.clients
async def test_the_service_sends_what_was_demonstrated() -> None:
    rng = random.Random(0)
    requests = [
        next(
            one
            for one in iter(lambda: random_request(rng), None)
            if one.case is case and (one.city is not None) is has_city and not one.names_order
        )
        for case, has_city in itertools.product(Case, (False, True))
    ]
    conversations = [service.conversation(request, service.Habit.KEEP_POLICY) for request in requests]
    cases = [(service_task(one), spoken(messages)) for one, messages in zip(requests, conversations, strict=True)]
    made = await attempts_with("service", cases)
    for request, messages, attempted in zip(requests, conversations, made, strict=True):
        assert attempted.result == request.wanted
        assert_sent_as_demonstrated("service", attempted.requests, messages, service.TOOLS)


@pytest.mark.clients
async def test_the_service_ends_with_a_model_that_cannot_call_tools() -> None:
    task = service_task(random_request(random.Random(0)))
    bad = [calls("{bad", name="find"), calls('{"order":1}', name="absent"), calls('{"order":"x"}', name="find")]
    endless, refusing = calls('{"order":100}', name="find"), says("No.")
    made = await attempts_with("service", [(task, [each] * 20) for each in (*bad, endless, refusing)])
    assert all(attempted.result["tickets"] == [] for attempted in made)
    assert [len(attempted.requests) for attempted in made[-2:]] == [5, 2]


def handoffs_task(question: Question) -> dict[str, Any]:
    return {"question": question.text, "agent": question.agent, "result": question.result}


@pytest.mark.clients
async def test_a_hand_off_sends_what_was_demonstrated_to_the_agents_own_run() -> None:
    question = sums()[0]
    right, own = "1 + 1 = 2", SPECIALISTS_SESSION
    cases: list[tuple[Sequence[Message], dict[str, Any], dict[str, float]]] = [
        ([handoffs.handoff(SUMS), says(question.working)], {"by": SUMS, "answer": question.working}, {own: 1.0}),
        ([handoffs.handoff(SUMS), says("1 + 1 = 3")], {"by": SUMS, "answer": "1 + 1 = 3"}, {own: 0.0}),
        ([handoffs.handoff(UNITS), says(handoffs.NOT_MINE)], {"by": UNITS, "answer": handoffs.NOT_MINE}, {}),
        ([says("I guess 4.")], {"by": "triage", "answer": "I guess 4."}, {}),
        ([calls("{}", name="absent")], {"by": None, "answer": ""}, {}),
        ([calls("{bad", name="transfer_to_sums"), says(right)], {"by": SUMS, "answer": right}, {own: 1.0}),
    ]
    task = handoffs_task(question)
    made = await attempts_with("handoffs", [(task, spoken(said)) for said, _, _ in cases])
    assert [attempted.result for attempted in made] == [result for _, result, _ in cases]
    assert [attempted.server.rewards for attempted in made] == [rewards for _, _, rewards in cases]
    first = made[0]
    assert [request["model"] for request in first.requests] == ["handoffs", SUMS]
    assert first.server.callers == [("rl-session", None), (KEYS["SUMS_API_KEY"], own)]
    prompts = (
        (handoffs.prompt_of_triage(question), handoffs.TOOLS),
        (handoffs.prompt_of_specialist(SUMS, question), ()),
    )
    for request, (messages, tools) in zip(first.requests, prompts, strict=True):
        sent = rendered("handoffs", request["messages"], request.get("tools", ()))
        assert sent == rendered("handoffs", messages, tools)


@pytest.mark.clients
async def test_the_search_sends_what_was_demonstrated() -> None:
    world = random_world(random.Random(0))
    asked = [search_question(world, kind, WORKERS[0]) for kind in Kind]
    assert index().search(asked[0].searches[0].words) == asked[0].searches[0].document  # the world of the documents
    conversations = [search.conversation(one, search.Habit.SEARCH, random.Random(0)) for one in asked]
    cases = [({"question": one.text}, spoken(messages)) for one, messages in zip(asked, conversations, strict=True)]
    made = await attempts_with("search", cases)
    for one, messages, attempted in zip(asked, conversations, made, strict=True):
        assert attempted.result == f"{one.answer}."
        assert_sent_as_demonstrated("search", attempted.requests, messages, search.TOOLS)


@pytest.mark.clients
async def test_the_search_ends_with_a_model_that_cannot_call_tools() -> None:
    task, answer = {"question": "Where does Ada live?"}, says("Oslo.")
    cases = [
        (task, [calls("{bad", name="search")]),
        (task, [calls('{"query": "x"}', name="absent"), answer]),
        (task, [calls('{"words": "x"}', name="search"), answer]),
        (task, [calls('{"query": "Ada"}', name="search")] * 20),
    ]
    made = await attempts_with("search", cases)
    assert [attempted.result for attempted in made] == ["", "Oslo.", "Oslo.", ""]
    assert [len(attempted.requests) for attempted in made] == [1, 2, 2, 5]
