"""XGrammar, SGLang's own back end on a GPU, accepts what llguidance allows under the same constraints."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from proxy.calls.call import AnswerFormat, ModelCall, ToolChoice, ToolUse
from proxy.engines.launch import SGLANG_READY_MARKER
from proxy.settings import load_settings
from tests.proxy.calls import xgrammar_accepts
from tests.proxy.calls.test_constraints import (
    CITY,
    NOTE,
    WEATHER,
    call,
    constraint_of,
    ends_soon,
    function,
    walk,
)
from tests.proxy.tokens.families import FAMILIES, load

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

ASKED: dict[str, ModelCall] = {
    "required": call(tools=WEATHER, tool_choice=ToolChoice(use=ToolUse.REQUIRED)),
    "one": call(tools=WEATHER, tool_choice=ToolChoice(use=ToolUse.REQUIRED), parallel_calls=False),
    "strict": call(tools=WEATHER),
    "either": call(tools=[function("weather", CITY)], answer_format=AnswerFormat(schema=NOTE)),
}


def broken(text: str) -> str:
    """Return the text without the city and the end of a call, so that it violates the constraint."""
    return text.replace("Rome", "Roma").replace("Oslo", "Osla").replace("done", "don").replace("true", "maybe")


async def verdicts_on(cases: list[tuple[str, list[str]]]) -> list[list[bool]]:
    python = load_settings().engine.sglang_venv / "bin" / "python"
    if not (python.parents[1] / SGLANG_READY_MARKER).is_file() and os.environ.get("BASE_RL_REQUIRE_SGLANG") != "1":
        pytest.skip("there is no SGLang for CPU: run make sglang-cpu")
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-W", "ignore", str(xgrammar_accepts.__file__)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    answered, _ = await process.communicate(json.dumps(cases).encode())
    assert process.returncode == 0
    verdicts: list[list[bool]] = json.loads(answered)
    return verdicts


async def test_xgrammar_accepts_what_llguidance_generates() -> None:
    names, cases = [], []
    for family in FAMILIES:
        template = load(family)
        likes = [*template.encode("<tool_call>"), *template.encode("[TOOL_CALLS]"), *template.encode("{")]
        weights = {**ends_soon(family), **dict.fromkeys(likes, 60.0)}
        for name, asked in ASKED.items():
            constraint = constraint_of(family, asked)
            assert constraint is not None
            texts = [walk(family, asked, seed, weights) for seed in range(6)]
            spoilt = [broken(text) for text in texts if broken(text) != text]
            names.append(f"{family}/{name}")
            cases.append((constraint.text, [*texts, *spoilt]))
    assert sum(len(texts) - 6 for _, texts in cases) > len(cases), "most have texts that are to be refused"
    for name, (_, texts), verdict in zip(names, cases, await verdicts_on(cases), strict=True):
        wanted = [index < 6 for index in range(len(texts))]
        wrong = [text for text, found, right in zip(texts, verdict, wanted, strict=True) if found != right]
        assert not wrong, (name, wrong)
