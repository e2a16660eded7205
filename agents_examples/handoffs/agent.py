"""A triage agent that hands questions to two specialists: the OpenAI Agents SDK, and a model for each of the three.

Each agent is a run with a policy of its own. `base-rl attempts` opens the triage agent's session; a specialist's is
opened by its call, with its run's key, under a name in a header.

OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=rl-run-... SUMS_API_KEY=rl-run-... UNITS_API_KEY=rl-run-... \
  python agent.py "What is 7 + 8?"
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from agents_examples.handoffs.tasks import INSTRUCTIONS, SPECIALISTS, TRIAGE, is_right

try:
    from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, OpenAIChatCompletionsModel, RunConfig, Runner
except ImportError as error:
    install = f"{sys.executable} -m pip install -r {Path(__file__).with_name('requirements.txt')}"
    raise ImportError(f"this agent needs the OpenAI Agents SDK ({error}); install it: {install}") from error

MOST_CALLS = 2
"""Bound on the model calls of an attempt: one of the triage agent and one of a specialist."""


def triage_with(client: AsyncOpenAI, model: str, *, session: str | None = None) -> Agent[None]:
    """Return the triage agent, whose model is `model`; a specialist's has the specialist's name. `session` names the
    sessions of the specialists. Raise KeyError without the key of a specialist."""
    headers = None if session is None else {"X-Base-RL-Session": session}
    specialists = []
    for name, description in SPECIALISTS.items():
        own = client.with_options(api_key=_key_of(name), default_headers=headers)
        specialist = Agent[None](
            name=name,
            handoff_description=description,
            instructions=INSTRUCTIONS[name],
            model=OpenAIChatCompletionsModel(model=name, openai_client=own),
        )
        specialists.append(specialist)
    own_model = OpenAIChatCompletionsModel(model=model, openai_client=client)
    return Agent(name=TRIAGE, instructions=INSTRUCTIONS[TRIAGE], handoffs=[*specialists], model=own_model)


async def ask(triage: Agent[None], question: str) -> dict[str, Any]:
    """Return the answer to a question and `by`, the name of the agent that gave it. Without an answer, because the
    model called tools wrongly, `by` is None. Raise openai.OpenAIError if a call fails."""
    try:
        # The SDK's tracing would send to OpenAI what the agents say.
        config = RunConfig(tracing_disabled=True)
        result = await Runner.run(triage, question, max_turns=MOST_CALLS, run_config=config)
    except (ModelBehaviorError, MaxTurnsExceeded):
        return {"by": None, "answer": ""}
    return {"by": result.last_agent.name, "answer": str(result.final_output)}


async def attempt(task: dict[str, Any], session: Any) -> dict[str, Any]:
    """Make one attempt for `base-rl attempts`, which does not know the specialists' sessions: post the reward of the
    specialist here, if the question was one for it."""
    name = f"handoffs-{session.id}"
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        found = await ask(triage_with(client, session.model, session=name), task["question"])
        if found["by"] == task["agent"]:
            body = {"session_id": name, "reward": float(is_right(task, found["answer"]))}
            specialist = client.with_options(api_key=_key_of(found["by"]))
            await specialist.post("/feedback", cast_to=object, body=body)
    return found


def _key_of(specialist: str) -> str:
    variable = f"{specialist.upper()}_API_KEY"
    key = os.environ.get(variable)
    if not key:
        raise KeyError(f"set {variable} to the output of: base-rl keys create --kind run --run {specialist}")
    return key


async def main() -> None:
    parser = argparse.ArgumentParser(description="Answer one question.")
    parser.add_argument("question", help='such as "What is 7 + 8?" or "How many minutes are 3 hours?"')
    parser.add_argument("--model", default="handoffs", help="name of the triage agent's model (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        async with AsyncOpenAI() as client:
            found = await ask(triage_with(client, arguments.model), arguments.question)
    except OpenAIError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{found['by']}: {found['answer']}")


if __name__ == "__main__":
    asyncio.run(main())
