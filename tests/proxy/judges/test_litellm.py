"""litellm's providers, with a real server in their place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from proxy.judges.models import JudgeModels
from proxy.settings import ProviderSettings
from tests.database import sqlite_database
from tests.proxy.judges.model_server import grade, refusal
from tests.proxy.judges.world import open_world

pytest.importorskip("litellm")

# litellm's own, at its import and at its first call.
pytestmark = pytest.mark.filterwarnings("ignore")


async def test_a_provider_without_a_base_url_is_litellms(tmp_path: Path) -> None:
    async with open_world(sqlite_database(tmp_path), provider="openai", model="openai/gpt-4o-mini") as world:
        world.model.answers = [
            grade(0.75, "right"),
            refusal(500, "internal error"),
            refusal(401, "wrong key sk-judge"),
            refusal(429, "quota", **{"retry-after": "90"}),
        ]
        await world.session()
        assert await world.run_jobs() == ["done"]
        (judgement,) = await world.judgements()
        assert (judgement.score, judgement.prompt_tokens, judgement.completion_tokens) == (0.75, 100, 10)
        # litellm knows the price of this model: 0.15 and 0.60 dollars for a million tokens.
        assert judgement.cost == pytest.approx(100 * 0.15e-6 + 10 * 0.6e-6)
        assert world.model.keys == ["Bearer sk-judge"]
        assert world.model.requests[0]["response_format"]["type"] == "json_schema"
        for expected in ("failed", "dead", "postponed"):
            await world.session()
            assert await world.run_jobs() == [expected]
            error = (await world.jobs())[-1].error
            assert "sk-judge" not in error
        # Each failure is one request: litellm repeats none.
        assert len(world.model.requests) == 4


async def test_an_anthropic_model_is_asked_in_its_own_format(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    async def message(body: dict[str, Any]) -> JSONResponse:
        asked.append(body)
        content = [{"type": "text", "text": grade(0.5)}]
        usage = {"input_tokens": 100, "output_tokens": 10}
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"]}
        return JSONResponse({**head, "content": content, "stop_reason": "end_turn", "usage": usage})

    async with open_world(
        sqlite_database(tmp_path), provider="anthropic", structured=False, model="anthropic/claude-unknown"
    ) as world:
        world.model.answers = [message]
        await world.session()
        assert await world.run_jobs() == ["done"]
        assert "You grade the work" in str(asked[0]["system"])
        (judgement,) = await world.judgements()
        assert (judgement.score, judgement.prompt_tokens, judgement.cost) == (0.5, 100, None)


async def test_a_provider_that_litellm_does_not_know_ends_the_job(tmp_path: Path) -> None:
    async with open_world(sqlite_database(tmp_path), provider="nobody", model="nobody/model") as world:
        await world.session()
        assert await world.run_jobs() == ["dead"]
        assert world.model.requests == []


def test_nothing_imports_litellm_before_a_judge_needs_it() -> None:
    code = "import sys, proxy.app, proxy.worker; sys.exit('litellm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert JudgeModels({"anthropic": ProviderSettings()}) is not None
