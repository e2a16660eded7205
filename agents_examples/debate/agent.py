"""A debate of two policies: the openai SDK, two models, and a statement of each.

The opening side is the run `debate`, whose sessions `base-rl attempts` opens. The replying side is the run
`opponent`, called with a key of its own; its session is opened by its call, under a name in a header.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=rl-run-... OPPONENT_API_KEY=rl-run-... python agent.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from agents_examples.debate.tasks import Motion, Sum, is_sound, motion_of, random_motion, winner

OPPONENT = "opponent"


@dataclass(frozen=True, kw_only=True)
class Debate:
    """What both sides said, and whether each statement was sound. `winner` is 0 for the opening side, 1 for the
    replying side, None for neither."""

    opening: str
    reply: str
    sound: tuple[bool, bool]
    winner: int | None

    def feedback(self, side: int) -> dict[str, Any]:
        """Return the feedback on a side: 1 if it won. `config.toml` gives soundness no weight: it is only shown."""
        return {"reward": float(self.winner == side), "components": {"sound": float(self.sound[side])}}


async def debate(opener: AsyncOpenAI, opponent: AsyncOpenAI, model: str, motion: Motion) -> Debate:
    """Let one side open and the other one, which hears it, reply. Raises openai.OpenAIError if a call fails."""
    opening = await _state(opener, model, instruction(motion, motion.opener))
    reply = await _state(opponent, OPPONENT, heard(instruction(motion, motion.replier), opening))
    return Debate(
        opening=opening,
        reply=reply,
        sound=(is_sound(motion.opener, opening), is_sound(motion.replier, reply)),
        winner=winner(motion, opening, reply),
    )


def instruction(motion: Motion, own: Sum) -> str:
    """Return what a side is asked."""
    return f"{motion.topic}? Argue that {own.expression} is larger."


def heard(asked: str, opening: str) -> str:
    """Return what the replying side is asked, with what it heard."""
    return f"{asked} The other side says: {opening}"


async def _state(client: AsyncOpenAI, model: str, asked: str) -> str:
    completion = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": asked}])
    return completion.choices[0].message.content or ""


async def attempt(task: dict[str, Any], session: Any) -> Debate:
    """Make one attempt for `base-rl attempts`, and post the feedback on the opponent, whose session it does not know.

    Raise KeyError without the opponent's key.
    """
    name = f"debate-{session.id}"
    headers = {"X-Base-RL-Session": name}
    async with (
        AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as opener,
        AsyncOpenAI(
            base_url=session.base_url, api_key=_opponents_key(), max_retries=0, default_headers=headers
        ) as opponent,
    ):
        held = await debate(opener, opponent, session.model, motion_of(task))
        await opponent.post("/feedback", cast_to=object, body={"session_id": name, **held.feedback(1)})
    return held


def _opponents_key() -> str:
    key = os.environ.get("OPPONENT_API_KEY")
    if not key:
        raise KeyError("set OPPONENT_API_KEY to the output of: base-rl keys create --kind run --run opponent")
    return key


async def main() -> None:
    parser = argparse.ArgumentParser(description="Hold one debate.")
    parser.add_argument("--model", default="debate", help="name of the opening side's model (default: %(default)s)")
    arguments = parser.parse_args()
    motion = random_motion(random.Random())
    try:
        async with AsyncOpenAI() as opener, AsyncOpenAI(api_key=_opponents_key()) as opponent:
            held = await debate(opener, opponent, arguments.model, motion)
    except OpenAIError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{motion.topic}?\n{held.opening}\n{held.reply}\nwinner: {held.winner}")


if __name__ == "__main__":
    asyncio.run(main())
