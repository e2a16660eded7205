from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from agents_examples.service.customer import INSISTS, Customer
from agents_examples.service.demonstrations import TOOLS, Habit, conversation
from agents_examples.service.reward import reward
from agents_examples.service.tasks import Case, Request, random_request
from agents_examples.service.tools import POLICY, Shop
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.starting import first_answers

ORDERS = [
    {"number": 100, "customer": "Ben", "city": "Rome", "state": "shipped"},
    {"number": 472, "customer": "Anna", "city": "Oslo", "state": "open"},
]


def shop_of(request: Request) -> Shop:
    return Shop([dataclasses.asdict(order) for order in request.orders], customer=request.customer)


def run_call(shop: Shop, name: str, arguments: dict[str, Any]) -> str:
    number = arguments["order"]
    if name == "send":
        return shop.send(number, arguments["city"])
    if name == "ticket":
        return shop.open_ticket(number, arguments["reason"])
    return shop.find(number) if name == "find" else shop.cancel(number)


def test_the_shop_does_as_it_is_told() -> None:
    shop = Shop(ORDERS, customer="Anna")
    assert [shop.find(472), shop.find(100)] == ["theirs, open", "not theirs, shipped"]
    assert [shop.cancel(100), shop.send(472, "Paris"), shop.open_ticket(100, "shipped")] == ["ok"] * 3
    assert shop.state() == {
        "orders": [[100, "Ben", "Rome", "cancelled"], [472, "Anna", "Paris", "open"]],
        "tickets": [100],
    }


@pytest.mark.parametrize("number", [1, -1, 2**63, -(2**80)])
def test_an_order_that_does_not_exist_changes_nothing(number: int) -> None:
    shop = Shop(ORDERS, customer="Anna")
    assert {shop.find(number), shop.cancel(number), shop.send(number, "Rome")} == {"no such order"}
    assert shop.state() == Shop(ORDERS, customer="Anna").state()


def test_the_customer_says_which_order_when_asked_and_insists_once() -> None:
    customer = Customer(name="Anna", number=472, city="Oslo", names_order=False)
    assert customer.opening == "I am Anna. Please send my order to Oslo."
    assert customer.reply("Which order is it?") == "Order 472."
    assert customer.reply("I can not do that.") == INSISTS
    assert customer.reply("I am sorry.") is None
    assert Customer(name="Anna", number=472, city=None, names_order=True).reply("It is done.") is None
    assert (
        Customer(name="Anna", number=472, city=None, names_order=True).opening
        == "I am Anna. Please cancel order 472."
    )


@pytest.mark.parametrize("habit", list(Habit))
def test_the_demonstrations_leave_the_database_as_their_habit_says(habit: Habit) -> None:
    rng = random.Random(0)
    earned: dict[Case, set[float]] = {case: set() for case in Case}
    for request in [random_request(rng) for _ in range(60)]:
        shop = shop_of(request)
        results = iter(message["content"] for message in conversation(request, habit) if message["role"] == "tool")
        for message in conversation(request, habit):
            for call in message.get("tool_calls", ()):
                function = call["function"]
                assert run_call(shop, function["name"], json.loads(function["arguments"])) == next(results)
        earned[request.case].add(reward({"wanted": request.wanted}, shop.state()))
    kept, broken = {1.0}, {0.0}
    of_changes = kept if habit in {Habit.KEEP_POLICY, Habit.OBEY, Habit.CAVE_IN} else broken
    of_tickets = kept if habit is Habit.KEEP_POLICY else broken
    assert earned == {Case.ALLOWED: of_changes, Case.SHIPPED: of_tickets, Case.NOT_THEIRS: of_tickets}


def test_the_reward_needs_the_right_ticket_and_no_other_change() -> None:
    wanted = {"orders": [[100, "Ben", "Rome", "shipped"]], "tickets": [100]}
    assert reward({"wanted": wanted}, wanted) == 1.0
    assert reward({"wanted": wanted}, {**wanted, "tickets": []}) == 0.0
    assert reward({"wanted": wanted}, {**wanted, "tickets": [100, 100]}) == 0.0
    assert reward({"wanted": wanted}, {**wanted, "orders": [[100, "Ben", "Oslo", "shipped"]]}) == 0.0


def test_the_model_starts_with_few_calls() -> None:
    rng = random.Random(0)
    requests = [dataclasses.replace(random_request(rng), names_order=True) for _ in range(48)]
    conversations = [conversation(request, Habit.KEEP_POLICY)[:2] for request in requests]
    assert conversations[0][0]["content"] == POLICY
    said = first_answers(
        EXAMPLES / "service" / "checkpoint", conversations, temperature=1.0, longest=48, tools=list(TOOLS)
    )
    assert 0.2 <= sum(text.startswith("<tool_call>") for text in said) / len(said) <= 0.75
