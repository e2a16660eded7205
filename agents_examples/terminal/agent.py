"""An agent in a shell: the openai SDK, a loop of its own, and bash in a folder without network.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=rl-run-... python agent.py "Rename a.txt to b.txt." a.txt=red
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from agents_examples.terminal.tools import BASH_TOOL, NoSandbox, files_in, folder_with, run_tool

INSTRUCTION = "Do the job in the folder with bash."
TURNS = 4


async def work(client: AsyncOpenAI, model: str, job: str, folder: Path) -> list[dict[str, Any]]:
    """Ask the model, run the commands that it writes in the folder, and ask again, until it answers without one.

    Return the conversation. Raises openai.OpenAIError if a call of the model fails, and NoSandbox.
    """
    messages: list[Any] = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": job}]
    for _ in range(TURNS):
        completion = await client.chat.completions.create(model=model, messages=messages, tools=[BASH_TOOL])
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            if call.type == "function" and call.function.name == "bash":
                result = await run_tool(call.function.arguments, folder)
            else:
                result = "error: the only tool is bash"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return messages


async def attempt(task: dict[str, Any], session: Any) -> dict[str, str]:
    """Make one attempt for `base-rl attempts`. Return the files that it left."""
    with folder_with(task["files"]) as folder:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
            await work(client, session.model, task["instruction"], folder)
        return files_in(folder)


async def main() -> None:
    parser = argparse.ArgumentParser(description="Do one job in a new folder.")
    parser.add_argument("job", help='for example "Rename a.txt to b.txt."')
    parser.add_argument("files", nargs="*", metavar="NAME=TEXT", help="files of the folder, for example a.txt=red")
    parser.add_argument("--model", default="terminal", help="name of the model (default: %(default)s)")
    arguments = parser.parse_args()
    with folder_with(
        {name: f"{text}\n" for name, _, text in (file.partition("=") for file in arguments.files)}
    ) as folder:
        try:
            async with AsyncOpenAI() as client:
                messages = await work(client, arguments.model, arguments.job, folder)
        except (OpenAIError, NoSandbox) as error:
            raise SystemExit(f"error: {error}") from error
        for message in messages:
            calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
            print(f"{message['role']:>9}: {' '.join(filter(None, [message.get('content'), *calls]))}")
        print(f"    files: {files_in(folder)}")


if __name__ == "__main__":
    asyncio.run(main())
