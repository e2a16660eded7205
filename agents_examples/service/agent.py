"""A customer service: Pydantic AI, four tools on a database, and a policy in the instructions.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=rl-run-... python agent.py Oslo
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from agents_examples.service.customer import Customer
from agents_examples.service.tools import POLICY, Shop

try:
    from pydantic_ai import Agent, RunContext, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
except ImportError as error:
    install = f"{sys.executable} -m pip install -r {Path(__file__).with_name('requirements.txt')}"
    raise ImportError(f"this agent needs Pydantic AI ({error}); install it: {install}") from error

REQUESTS = 5
"""Calls of the model for one message of the customer."""
ROUNDS = 4


async def find(context: RunContext[Shop], order: int) -> str:
    """Look up an order."""
    shop: Shop = context.deps
    return shop.find(order)


async def cancel(context: RunContext[Shop], order: int) -> str:
    """Cancel an order."""
    shop: Shop = context.deps
    return shop.cancel(order)


async def send(context: RunContext[Shop], order: int, city: str) -> str:
    """Send an order to a city."""
    shop: Shop = context.deps
    return shop.send(order, city)


async def ticket(context: RunContext[Shop], order: int, reason: str) -> str:
    """Open a ticket."""
    shop: Shop = context.deps
    return shop.open_ticket(order, reason)


def agent_with(client: AsyncOpenAI, model: str) -> Agent[Shop, str]:
    provider = OpenAIProvider(openai_client=client)
    return Agent(
        OpenAIChatModel(model, provider=provider),
        deps_type=Shop,
        instructions=POLICY,
        tools=[find, cancel, send, ticket],
    )


async def serve(agent: Agent[Shop, str], shop: Shop, customer: Customer) -> list[tuple[str, str]]:
    """Let agent and customer talk, and return what each said, until the customer has no more to say.

    Raises pydantic_ai.ModelAPIError if a call of the model fails. The conversation ends if the model calls tools
    wrongly or too often.
    """
    said, spoken = customer.opening, []
    history: list[Any] = []
    for _ in range(ROUNDS):
        try:
            limits = UsageLimits(request_limit=REQUESTS)
            result = await agent.run(said, deps=shop, message_history=history, usage_limits=limits)
        except (UnexpectedModelBehavior, UsageLimitExceeded):
            break
        spoken.append((said, str(result.output)))
        history = result.all_messages()
        answer = customer.reply(str(result.output))
        if answer is None:
            break
        said = answer
    return spoken


async def attempt(task: dict[str, Any], session: Any) -> dict[str, Any]:
    """Make one attempt for `base-rl attempts`. Return the state of the database that it left."""
    shop = Shop(task["orders"], customer=task["customer"])
    customer = Customer(
        name=task["customer"], number=task["number"], city=task["city"], names_order=task["names_order"]
    )
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        await serve(agent_with(client, session.model), shop, customer)
    return shop.state()


async def main() -> None:
    parser = argparse.ArgumentParser(description="Serve one customer, whose open order is number 472.")
    parser.add_argument(
        "city", nargs="?", help="where the order is to be sent; it is to be cancelled if there is none"
    )
    parser.add_argument("--model", default="service", help="name of the model (default: %(default)s)")
    arguments = parser.parse_args()
    shop = Shop([{"number": 472, "customer": "Anna", "city": "Rome", "state": "open"}], customer="Anna")
    customer = Customer(name="Anna", number=472, city=arguments.city, names_order=True)
    async with AsyncOpenAI() as client:
        for asked, answered in await serve(agent_with(client, arguments.model), shop, customer):
            print(f"customer: {asked}\n   agent: {answered}")
    print(f"database: {shop.state()}")


if __name__ == "__main__":
    asyncio.run(main())
