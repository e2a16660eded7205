"""base-rl's own endpoints through the same SDK: open, reward and end sessions with three POSTs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session. `client` has the session's own key and address; all clients share one pool of connections."""

    id: str
    client: AsyncOpenAI

    async def post_reward(self, reward: float) -> None:
        """Post the final reward, which ends the session."""
        await self.client.post("/feedback", cast_to=object, body={"reward": reward, "session_id": self.id})

    async def end(self, outcome: str) -> None:
        """End the session as `failed` or `cancelled`: it will not be trained."""
        await self.client.post(f"/sessions/{self.id}/end", cast_to=object, body={"outcome": outcome})


async def open_group(client: AsyncOpenAI, *, task: str, group: str, size: int, purpose: str) -> list[Session]:
    """Open `size` sessions that attempt the same task, with the run's key. Raises openai.OpenAIError."""
    body = {"task": task, "group": group, "group_size": size, "n": size, "purpose": purpose}
    answer: Any = await client.post("/sessions", cast_to=object, body=body)
    return [
        Session(id=one["id"], client=client.with_options(api_key=one["api_key"], base_url=one["base_url"]))
        for one in answer.get("sessions", [answer])
    ]
