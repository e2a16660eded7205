"""The scripted engine instead of the other engines, and a reference that knows the script."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.cli.addresses import random_free_port
from proxy.engines.launch import scripted_plan, wait_until_ready
from tests.engines.conftest import Models, Server
from tests.engines.tiny_model import make_tokenizer

SAYS = "abcdefghijklmnopqrstuvwxyz"
SCRIPT = f"""
[[rule]]
text = "{SAYS}"
finish = "length"
ms_per_token = 1
"""


class ScriptedReference:
    """The answer continues with the script's text, from its beginning; log-probabilities are stand-ins."""

    def __init__(self) -> None:
        self._ids = tuple(make_tokenizer().encode(SAYS))

    def greedy(self, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        return (self._ids * (count // len(self._ids) + 1))[:count]

    def greedy_after(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> tuple[int, ...]:
        return self.greedy(prompt, len(output))

    def of_output(self, prompt: tuple[int, ...], output: tuple[int, ...], temperature: float = 1.0) -> list[float]:
        return [-1.0] * len(output)


@pytest.fixture(scope="session")
def reference() -> ScriptedReference:
    return ScriptedReference()


@pytest.fixture(scope="session")
def reference_b() -> ScriptedReference:
    return ScriptedReference()


@pytest.fixture(scope="session")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scripted")
    script, log = folder / "script.toml", folder / "engine.log"
    script.write_text(SCRIPT)
    yield from running(script, models.a, log)


def running(script: Path, model: Path, log: Path) -> Iterator[Server]:
    """Run a scripted engine as a process, until the generator is resumed."""
    plan = scripted_plan(model=str(model), port=random_free_port("127.0.0.1"), script=script, weight_label="a")
    with log.open("wb") as output:
        process = subprocess.Popen(plan.argv, env={**os.environ, **plan.env}, stdout=output, stderr=subprocess.STDOUT)
    try:
        asyncio.run(wait_until_ready(plan.url, timeout=110, process_alive=lambda: process.poll() is None))
        yield Server("scripted", plan.url, 1e-9, log)
    finally:
        process.terminate()
        process.wait(30)
