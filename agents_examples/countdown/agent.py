"""An agent that may run Python: the openai SDK, a loop, and a tool in a process with limits.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=rl-run-... python agent.py "Make 23 of 3, 7, 2."
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from agents_examples.countdown.tools import PYTHON_TOOL, run_tool

TURNS = 3


async def solve(client: AsyncOpenAI, model: str, question: str) -> list[dict[str, Any]]:
    """Ask the model, run the programs that it writes, and ask again, until it answers without a program.

    Return the conversation. Raises openai.OpenAIError if a call of the model fails.
    """
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        completion = await client.chat.completions.create(model=model, messages=messages, tools=[PYTHON_TOOL])
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            if call.type == "function" and call.function.name == "python":
                result = await run_tool(call.function.arguments)
            else:
                result = "error: the only tool is python"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return messages


def answer_of(messages: list[dict[str, Any]]) -> str:
    """Return the text of the last answer, none if it called a tool."""
    last = messages[-1]
    return str(last.get("content") or "") if last["role"] == "assistant" else ""


async def attempt(task: dict[str, Any], session: Any) -> str:
    """Make one attempt for `base-rl attempts`."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        return answer_of(await solve(client, session.model, task["question"]))


async def main() -> None:
    parser = argparse.ArgumentParser(description="Solve one puzzle.")
    parser.add_argument("question", help='for example "Make 23 of 3, 7, 2."')
    parser.add_argument("--model", default="countdown", help="name of the model (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        async with AsyncOpenAI() as client:
            messages = await solve(client, arguments.model, arguments.question)
    except OpenAIError as error:
        raise SystemExit(f"error: {error}") from error
    for message in messages:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        print(f"{message['role']:>9}: {' '.join(filter(None, [message.get('content'), *calls]))}")


if __name__ == "__main__":
    asyncio.run(main())
