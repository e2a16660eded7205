"""base-rl's own endpoints, through the same SDK: sessions are opened, rewarded and ended with three POSTs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI


@dataclass(frozen=True, kw_only=True)
class Session:
    """`client` carries the session's own key and address; all of them share one pool of connections."""

    id: str
    client: AsyncOpenAI

    async def post_reward(self, reward: float) -> None:
        """The final reward; it ends the session."""
        await self.client.post("/feedback", cast_to=object, body={"reward": reward, "session_id": self.id})

    async def end(self, outcome: str) -> None:
        """`failed` or `cancelled`: the session will not be trained."""
        await self.client.post(f"/sessions/{self.id}/end", cast_to=object, body={"outcome": outcome})


async def open_group(client: AsyncOpenAI, *, task: str, group: str, size: int, purpose: str) -> list[Session]:
    """`size` sessions that attempt the same task, with the run's key. Raises openai.OpenAIError."""
    body = {"task": task, "group": group, "group_size": size, "n": size, "purpose": purpose}
    answer: Any = await client.post("/sessions", cast_to=object, body=body)
    return [
        Session(id=one["id"], client=client.with_options(api_key=one["api_key"], base_url=one["base_url"]))
        for one in answer.get("sessions", [answer])
    ]
