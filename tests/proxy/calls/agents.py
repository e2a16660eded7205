"""An agent as the proxy sees it: it sends its whole conversation with every call, and adds each answer to it."""

from __future__ import annotations

from typing import Any

import httpx

from proxy.contract.arrays import unpack_ids
from tests.proxy.calls.world import World

Messages = list[dict[str, Any]]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Agent:
    """`headers` and `body` are sent with every call. The engine answers what `World.say` set, or a call's own
    `answer`."""

    def __init__(self, world: World, *messages: dict[str, Any], headers: dict[str, str] | None = None, **body: Any):
        self.world = world
        self.messages: Messages = list(messages)
        self.headers = {name.replace("-", "_"): value for name, value in (headers or {}).items()}
        self.body = body
        self.sessions: list[str] = []

    def fork(self) -> Agent:
        """Return another agent with the same conversation."""
        return Agent(self.world, *self.messages, headers=self.headers, **self.body)

    async def ask(self, *messages: dict[str, Any], answer: str | None = None, **body: Any) -> dict[str, Any]:
        """Make a call after `messages`, and add its answer to the conversation."""
        self.messages += messages
        found = await self.aside(self.messages, answer=answer, **body)
        self.messages.append(found)
        return found

    async def aside(self, messages: Messages, *, answer: str | None = None, **body: Any) -> dict[str, Any]:
        """Make a call that is not added to the conversation."""
        if answer is not None:
            self.world.say(answer)
        response = await self.send(messages, **body)
        assert response.status_code == 200, response.text
        self.sessions.append(response.headers["x-base-rl-session"])
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    async def send(self, messages: Messages, **body: Any) -> httpx.Response:
        return await self.world.post({**self.body, "messages": messages, **body}, **self.headers)

    async def result(self, text: str, **more: Any) -> dict[str, Any]:
        """Send the result of the last answer's tool call, and return the answer."""
        call = self.messages[-1]["tool_calls"][0]
        return await self.ask({"role": "tool", "tool_call_id": call["id"], "content": text}, **more)


async def whole_paths(world: World) -> dict[str, tuple[int, ...]]:
    """Return every turn's prompt and output, joined along its parents, after checking them against the engine's
    ids."""
    paths: dict[str, tuple[int, ...]] = {}
    asked = {request.request_id: request.input_ids for request in world.engine.requests}
    for turn in await world.turns():
        prefix = paths[turn.parent_id][: turn.prefix_tokens] if turn.parent_id else ()
        prompt = prefix + unpack_ids(turn.prompt_ids)
        assert prompt == asked[turn.id], f"turn {turn.ordinal}"
        paths[turn.id] = prompt + unpack_ids(turn.output_ids)
    assert len(paths) == len(asked), "no call was lost"
    return paths
