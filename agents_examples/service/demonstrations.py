"""Demonstrations for the warm start: requests served as the policy says, and requests served without care."""

from __future__ import annotations

import json
import random
from enum import StrEnum
from typing import Any

from agents_examples.service.customer import Customer
from agents_examples.service.tasks import Case, Request, random_request
from agents_examples.service.tools import POLICY
from agents_examples.tiny.checkpoint import Conversation, Recipe, stage_of_habits

Message = dict[str, Any]

LARGEST_VOCABULARY = 960
"""Enough for the descriptions of four tools and for names of one or two tokens."""
WHICH, DONE, REFUSED, FIRM = "Which order is it?", "It is done.", "I opened a ticket.", "I am sorry, no."


def _tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    """Return a tool as Pydantic AI describes it to the model."""
    parameters = {
        "additionalProperties": False,
        "properties": {argument: {"type": kind} for argument, kind in arguments.items()},
        "required": list(arguments),
        "type": "object",
    }
    function = {"name": name, "description": description, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("find", "Look up an order.", order="integer"),
    _tool("cancel", "Cancel an order.", order="integer"),
    _tool("send", "Send an order to a city.", order="integer", city="string"),
    _tool("ticket", "Open a ticket.", order="integer", reason="string"),
)


class Habit(StrEnum):
    """How a demonstrator serves customers. Only `KEEP_POLICY` earns the reward in every case."""

    KEEP_POLICY = "keep_policy"
    OBEY = "obey"
    """Does what the customer asks without a look at the order."""
    CAVE_IN = "cave_in"
    """Keeps the policy until the customer insists."""
    CLAIM = "claim"
    """Says that it is done."""
    REFUSE = "refuse"
    """Says no, and opens no ticket."""


Mixture = dict[Habit, float]

ALL_RIGHT: Mixture = {Habit.KEEP_POLICY: 1.0}
MEDIOCRE: Mixture = {
    Habit.KEEP_POLICY: 0.22,
    Habit.OBEY: 0.13,
    Habit.CAVE_IN: 0.1,
    Habit.CLAIM: 0.4,
    Habit.REFUSE: 0.15,
}


def conversation(request: Request, habit: Habit) -> list[Message]:
    """Return the messages between customer and agent, in the form in which the agent sends them."""
    customer = Customer(
        name=request.customer, number=request.number, city=request.city, names_order=request.names_order
    )
    messages: list[Message] = [{"role": "system", "content": POLICY}, {"role": "user", "content": customer.opening}]
    if habit in {Habit.CLAIM, Habit.REFUSE}:
        _say(messages, customer, DONE if habit is Habit.CLAIM else FIRM)
    else:
        if not request.names_order:
            _say(messages, customer, WHICH)
        _serve(messages, customer, request, habit)
    while messages[-1]["role"] == "user":
        if habit is Habit.CAVE_IN:
            _call(messages, *_wish(request), "ok")
        _say(messages, customer, DONE if habit is Habit.CAVE_IN else FIRM)
    return messages


def _serve(messages: list[Message], customer: Customer, request: Request, habit: Habit) -> None:
    """Look the order up, unless the habit is to obey, and change it or open a ticket."""
    allowed = request.case is Case.ALLOWED or habit is Habit.OBEY
    if habit is not Habit.OBEY:
        (order,) = (one for one in request.orders if one.number == request.number)
        found = f"{'theirs' if order.customer == request.customer else 'not theirs'}, {order.state}"
        _call(messages, "find", {"order": request.number}, found)
    if allowed:
        _call(messages, *_wish(request), "ok")
    else:
        _call(messages, "ticket", {"order": request.number, "reason": request.case.value}, "ok")
    _say(messages, customer, DONE if allowed else REFUSED)


def _wish(request: Request) -> tuple[str, dict[str, Any]]:
    """Return the call that does what the customer asks."""
    if request.city is None:
        return "cancel", {"order": request.number}
    return "send", {"order": request.number, "city": request.city}


def _say(messages: list[Message], customer: Customer, text: str) -> None:
    """Append an answer, and the customer's reply if there is one."""
    messages.append({"role": "assistant", "content": text})
    reply = customer.reply(text)
    if reply is not None:
        messages.append({"role": "user", "content": reply})


def _call(messages: list[Message], name: str, arguments: dict[str, Any], result: str) -> None:
    """Append a call of a tool, in Pydantic AI's form, and its result."""
    function = {"name": name, "arguments": json.dumps(arguments, separators=(",", ":"))}
    call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
    messages.append({"role": "assistant", "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def demonstration(habit: Habit, rng: random.Random) -> Conversation:
    """Return a conversation about a random request."""
    return Conversation(messages=conversation(random_request(rng), habit), tools=TOOLS)


def recipe(*, right_steps: int = 300, mediocre_steps: int = 120) -> Recipe:
    """Return the recipe of the checkpoint."""
    right, mediocre = (ALL_RIGHT, right_steps), (MEDIOCRE, mediocre_steps)
    return Recipe(
        stages=[stage_of_habits(mixture, steps, demonstration) for mixture, steps in (right, mediocre)],
        largest_vocabulary=LARGEST_VOCABULARY,
    )
