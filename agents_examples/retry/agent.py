"""An agent that gets a second try: the openai SDK's Responses API, a question, and a word on each wrong answer.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=rl-run-... python agent.py "What is 7 + 8?" 15
"""

from __future__ import annotations

import argparse
import asyncio
import re
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAIError

TRIES = 2
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, kw_only=True)
class Try:
    """One answer. `id` is the response's, and `right` whether its last number is the sum."""

    id: str
    text: str
    right: bool


async def solve(client: AsyncOpenAI, model: str, question: str, result: int) -> list[Try]:
    """Ask the question, and again after a wrong answer. Return the answers in order.

    Raises openai.OpenAIError if a call of the model fails.
    """
    tries: list[Try] = []
    asked = question
    while len(tries) < TRIES:
        response = await client.responses.create(
            model=model, input=asked, previous_response_id=tries[-1].id if tries else None
        )
        found = last_number(response.output_text)
        tries.append(Try(id=response.id, text=response.output_text, right=found == result))
        if tries[-1].right:
            break
        asked = feedback(found, result)
    return tries


def feedback(found: int | None, result: int) -> str:
    """Return what the agent says of a wrong answer."""
    if found is None:
        return "That is no number. Try again."
    return f"{found} is too {'small' if found < result else 'large'}. Try again."


def last_number(text: str) -> int | None:
    """Return the last number in a text. None if there is none, or none of at most nine digits."""
    numbers = _NUMBER.findall(text)
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else None


async def attempt(task: dict[str, Any], session: Any) -> list[Try]:
    """Make one attempt for `base-rl attempts`."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        return await solve(client, session.model, task["question"], task["result"])


async def main() -> None:
    parser = argparse.ArgumentParser(description="Ask for one sum, twice if the first answer is wrong.")
    parser.add_argument("question", help='for example "What is 7 + 8?"')
    parser.add_argument("result", type=int, help="the right answer")
    parser.add_argument("--model", default="retry", help="name of the model (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        async with AsyncOpenAI() as client:
            tries = await solve(client, arguments.model, arguments.question, arguments.result)
    except OpenAIError as error:
        raise SystemExit(f"error: {error}") from error
    for one in tries:
        print(f"{'right' if one.right else 'wrong'}: {one.text}")


if __name__ == "__main__":
    asyncio.run(main())
