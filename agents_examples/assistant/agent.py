"""A personal assistant that keeps reminders: the anthropic SDK, a loop, and a tool.

ANTHROPIC_BASE_URL=http://127.0.0.1:8080 ANTHROPIC_API_KEY=rl-run-... python agent.py
"""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

from anthropic import AnthropicError, AsyncAnthropic

from agents_examples.assistant.tasks import NEVER_MIND, THANKS, Errand, Reminder

if TYPE_CHECKING:
    from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam

LONGEST_ANSWER = 64
CALLS = 2
"""Calls of the model for one message of the user: one with a tool, and one that reads its result."""
TRIES = 2
NOTED = "noted"
REMIND: ToolParam = {
    "name": "remind",
    "description": "Note a reminder.",
    "input_schema": {
        "type": "object",
        "properties": {"at": {"type": "integer"}, "what": {"type": "string"}},
        "required": ["at", "what"],
    },
}


class Assistant:
    """A conversation with one user, and the reminders that came of it."""

    def __init__(self, client: AsyncAnthropic, model: str) -> None:
        self.reminders: list[Reminder] = []
        self._client = client
        self._model = model
        self._messages: list[MessageParam] = []

    async def answer(self, text: str) -> str:
        """Answer the user, after as many calls of the tool as there are calls of the model for.

        Raises anthropic.AnthropicError if a call of the model fails.
        """
        self._messages.append({"role": "user", "content": text})
        for _ in range(CALLS):
            message = await self._client.messages.create(
                model=self._model, max_tokens=LONGEST_ANSWER, messages=self._messages, tools=[REMIND]
            )
            self._messages.append({"role": "assistant", "content": message.content})
            results: list[ToolResultBlockParam] = [
                {"type": "tool_result", "tool_use_id": block.id, "content": self._note(block.name, block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            if not results:
                break
            self._messages.append({"role": "user", "content": results})
        return "".join(block.text for block in message.content if block.type == "text")

    def _note(self, tool: str, given: Any) -> str:
        match given:
            case {"at": int(at), "what": str(what)} if tool == "remind":
                self.reminders.append(Reminder(at=at, what=what))
                return NOTED
        return "error: remind takes a whole number `at` and a text `what`"


async def serve(assistant: Assistant, errand: Errand) -> list[str]:
    """Let the user ask, comment, ask once more if the comment is a complaint, and take leave.

    Return the comments. The assistant answers all of them, the last one too.
    """
    comments: list[str] = []
    said = errand.request
    for _ in range(TRIES):
        await assistant.answer(said)
        comments.append(errand.comment(assistant.reminders))
        if comments[-1] == THANKS:
            break
        said = f"{comments[-1]} {errand.request}"
    else:
        comments[-1] += f" {NEVER_MIND}"
    await assistant.answer(comments[-1])
    return comments


async def attempt(task: dict[str, Any], session: Any) -> list[str]:
    """Make one attempt for `base-rl attempts`. The SDK adds `/v1` to the address itself."""
    errand = Errand(wanted=Reminder(at=task["at"], what=task["what"]), phrasing=task["phrasing"])
    address = session.base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=address, api_key=session.api_key, max_retries=0) as client:
        return await serve(Assistant(client, session.model), errand)


async def main() -> None:
    parser = argparse.ArgumentParser(description="Talk to the assistant, a line at a time; an empty line ends it.")
    parser.add_argument("--model", default="assistant", help="name of the model (default: %(default)s)")
    arguments = parser.parse_args()
    async with AsyncAnthropic() as client:
        assistant = Assistant(client, arguments.model)
        try:
            while said := await asyncio.to_thread(input, "you: "):
                print(f"assistant: {await assistant.answer(said)}    {assistant.reminders}")
        except (AnthropicError, EOFError) as error:
            raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    asyncio.run(main())
