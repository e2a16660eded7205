"""A candidate's unseen answers decide, on the whole proxy and an engine with a model: a worse one is rejected, a good
one is promoted, and no caller sees an answer of either before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from pydantic import SecretStr
from safetensors.torch import load_file, save_file

from proxy.app import create_app
from proxy.contract.policy import WeightsFormat
from proxy.settings import (
    BootstrapSettings,
    EngineSettings,
    ProviderSettings,
    RunSettings,
    ServerSettings,
    Settings,
)
from tests.engines.conftest import Models, Server
from tests.engines.lora_adapters import write_adapter
from tests.proxy.judges.model_server import serving_model
from tests.proxy.judges.test_comparisons import answers
from tests.proxy.test_loop import ADMIN, RUN, TRAINER, trainer_post
from tests.proxy.versions.publishing import fit_request, reference
from tests.running_app import bearer, running, until_ready

_PAIRS = 16
_SECONDS = 60
_RELEASE = {
    "policy": "gated",
    # The callers make no pause, in which the candidate could answer with a busy_share of 0.
    "shadow": {"share": 1.0, "answers": _PAIRS, "busy_share": 0.5},
    "preference": {"judge": "taste", "max_loss": 0.4},
}


class Callers:
    """Callers of a run whose answers are greedy, and a judge that knows the answers of version 0: any other answer is
    worse."""

    def __init__(self, client: httpx.AsyncClient, weights: Path, model: Path) -> None:
        self.client = client
        self.heard: dict[str, str] = {}
        """Answers by prompt."""
        self._asked = 0
        self._weights = weights
        self._model = model

    async def judge(self, body: dict[str, Any]) -> str:
        first, second = (answers(body)[place] in self.heard.values() for place in ("1", "2"))
        better = "neither" if first == second else "1" if first else "2"
        return json.dumps({"rationale": "it is right", "better": better})

    async def commit(self, *, is_good: bool) -> None:
        """Commit an adapter: one that changes nothing, or a random one."""
        directory = self._weights / ("good" if is_good else "bad")
        write_adapter(directory, self._model, seed=5)
        if is_good:
            file = directory / "adapter_model.safetensors"
            save_file({name: torch.zeros_like(each) for name, each in load_file(file).items()}, file)
        weights = reference(directory, WeightsFormat.ADAPTER)
        await trainer_post(self.client, "versions", fit_request((), 0, weights))

    async def ask(self) -> str:
        """Ask the next of some questions, each in a session of its own, and return which version answered."""
        self._asked += 1
        prompt = f"question {self._asked % 8}"
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": prompt}],
            "max_completion_tokens": 8,
            "temperature": 0,
        }
        session = {"x-base-rl-session": f"call-{self._asked}"}
        answer = await self.client.post("/v1/chat/completions", json=body, headers=session)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        assert self.heard.setdefault(prompt, text) == text, "every caller hears the same version"
        return str(answer.json()["system_fingerprint"])

    async def ask_until(self, *states: str) -> None:
        """Ask until the versions have these states. Only a version that has passed its gates may answer."""
        async with asyncio.timeout(_SECONDS):
            while True:
                by = await self.ask()
                found = [each["state"] for each in reversed((await self._api(""))["versions"])]
                assert found[int(by.removeprefix("policy@"))] in ("serving", "committed", "retired"), (by, found)
                if found == list(states):
                    return

    async def finding(self, version: int, gate: str) -> dict[str, Any]:
        findings = (await self._api(f"/{version}/gates"))["findings"]
        found: dict[str, Any] = next(each for each in findings if each["gate"] == gate)
        return found

    async def _api(self, path: str) -> dict[str, Any]:
        answer = await self.client.get(f"/api/v1/runs/policy/versions{path}", headers=bearer(ADMIN))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@asynccontextmanager
async def open_callers(tmp_path: Path, server: Server, model: Path) -> AsyncIterator[Callers]:
    async with serving_model() as judge:
        settings = Settings(
            server=ServerSettings(data_dir=tmp_path / "data"),
            bootstrap=BootstrapSettings(
                admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN), trainer_key=SecretStr(TRAINER)
            ),
            engine=EngineSettings(url=server.url, health_interval_seconds=0.1),
            providers={"house": ProviderSettings(base_url=judge.url)},
            run=RunSettings.model_validate(
                {
                    "name": "policy",
                    "model": str(model),
                    "weights": "adapter",
                    "sampling": {"mode": "respect"},
                    "judges": {"taste": {"kind": "pairwise", "model": "house/judge"}},
                    "release": _RELEASE,
                }
            ),
        )
        async with running(create_app(settings), key=RUN) as client:
            await until_ready(client)
            callers = Callers(client, tmp_path / "data" / "weights", model)
            judge.answers = [callers.judge]
            yield callers


async def test_unseen_answers_decide_and_no_caller_sees_one(server: Server, models: Models, tmp_path: Path) -> None:
    async with open_callers(tmp_path, server, models.a) as callers:
        await callers.commit(is_good=False)
        await callers.ask_until("serving", "rejected")
        found = await callers.finding(1, "preference")
        assert found["state"] == "failed"
        assert found["text"].startswith("it is worse: the judge 'taste' prefers its answers in 0.")
        await callers.commit(is_good=True)
        await callers.ask_until("retired", "rejected", "serving")
        assert (await callers.finding(2, "shadow"))["evidence"]["pairs"] == _PAIRS
        assert (await callers.finding(2, "preference"))["state"] == "passed"
