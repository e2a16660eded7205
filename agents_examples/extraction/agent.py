"""An agent that reads orders: text in, JSON of a fixed schema out, with the openai SDK alone.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=rl-run-... python agent.py "Anna ordered 3 cups for Oslo."
"""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, OpenAIError

if TYPE_CHECKING:
    from openai.types.shared_params import ResponseFormatJSONSchema

INSTRUCTION = "Extract the order as JSON with name, count, thing and city."
ORDER: ResponseFormatJSONSchema = {
    "type": "json_schema",
    "json_schema": {
        "name": "order",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "count": {"type": "integer"},
                "thing": {"type": "string"},
                "city": {"type": "string"},
            },
            "required": ["name", "count", "thing", "city"],
            "additionalProperties": False,
        },
    },
}


async def extract(client: AsyncOpenAI, model: str, text: str) -> str:
    """Return what the model says of an order: JSON of the schema, unless its answer was cut off.

    Raises openai.OpenAIError if the call fails.
    """
    completion = await client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}],
        response_format=ORDER,
    )
    return completion.choices[0].message.content or ""


async def attempt(task: dict[str, Any], session: Any) -> str:
    """Make one attempt for `base-rl attempts`."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        return await extract(client, session.model, task["text"])


async def main() -> None:
    parser = argparse.ArgumentParser(description="Extract one order.")
    parser.add_argument("text", help='for example "Anna ordered 3 cups for Oslo."')
    parser.add_argument("--model", default="extraction", help="name of the model (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        async with AsyncOpenAI() as client:
            print(await extract(client, arguments.model, arguments.text))
    except OpenAIError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    asyncio.run(main())
