"""A tool-calling agent written with the openai SDK alone. All it knows of the world is a base_url and an api_key:

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=rl-run-... python agent.py "What is 12 * 7?"
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from agents_examples.calculator.tasks import CALCULATOR, calculate


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of an attempt. `text` is the last answer; it is empty if the last turn called a tool."""

    text: str
    messages: list[dict[str, Any]]
    calls: int


async def solve(client: AsyncOpenAI, model: str, question: str, max_turns: int = 3) -> Answer:
    """Ask the model, run the tools that it calls, and ask again, until it answers without a tool.

    Raises openai.OpenAIError if a call of the model fails.
    """
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(1, max_turns + 1):
        completion = await client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR])
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return Answer(text=message.content or "", messages=messages, calls=turn)
        for call in message.tool_calls:
            if call.type == "function" and call.function.name == "calculator":
                result = calculate(call.function.arguments)
            else:
                result = "error: the only tool is calculator"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return Answer(text="", messages=messages, calls=max_turns)


async def attempt(task: dict[str, Any], session: Any) -> Answer:
    """Make one attempt for `base-rl attempts`."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        return await solve(client, session.model, task["question"])


async def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the calculator agent one question.")
    parser.add_argument("question", help='for example "What is 12 * 7?"')
    parser.add_argument("--model", default="calculator", help="name of the model (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        async with AsyncOpenAI() as client:
            answer = await solve(client, arguments.model, arguments.question)
    except OpenAIError as error:
        raise SystemExit(f"error: {error}") from error
    for message in answer.messages:
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
        print(f"{message['role']:>9}: {' '.join(filter(None, [message.get('content'), *calls]))}")


if __name__ == "__main__":
    asyncio.run(main())
