"""Follow the page of the scripted engine as it is written: its script, its agent, its commands."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.cli.addresses import random_free_port
from proxy.engines.scripted.script import Match, Rule, read_script
from tests.docs.markdown import ROOT, code, code_blocks, rows, sections

PAGE = (ROOT / "docs" / "scripted-engine.md").read_text()
COMMAND = [sys.executable, "-m", "proxy.cli", "up", "--engine", "scripted"]
READY_SECONDS = 60


class Up:
    """A running `base-rl up`, and its output until it was ready."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = random_free_port("127.0.0.1")
        self.process = subprocess.Popen(
            [*COMMAND, "--port", str(self.port), *arguments],
            cwd=folder,
            env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if "Ctrl-C ends it" in line:
                return
        raise AssertionError(f"ended with {self.process.wait()}:\n{self.said}")

    @property
    def variables(self) -> dict[str, str]:
        """Return the `export` lines that it prints for copying."""
        return dict(re.findall(r"^export (OPENAI_\w+)=(.+?)\s*$", self.said, re.MULTILINE))

    def client(self) -> openai.OpenAI:
        variables = self.variables
        return openai.OpenAI(
            base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"], max_retries=0
        )

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    (folder / "script.toml").write_text(code_blocks(PAGE, "toml")[0])
    found = Up(folder, "--script", "script.toml")
    yield found
    found.end()


def say(up: Up, text: str, **options: Any) -> Any:
    """Return the answer, or all chunks of a stream."""
    with up.client() as client:
        messages: list[Any] = [{"role": "user", "content": text}]
        answer = client.chat.completions.create(model="policy", messages=messages, **options)
        return list(answer) if options.get("stream") else answer


def test_the_agent_on_the_page_gets_its_answer(up: Up, tmp_path: Path) -> None:
    (program,) = code_blocks(PAGE, "python")
    (tmp_path / "agent.py").write_text(program)
    run = subprocess.run(
        [sys.executable, "agent.py"],
        cwd=tmp_path,
        env={**os.environ, **up.variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    expected = re.search(r"# (It is .*)$", program, re.MULTILINE)
    assert expected is not None
    assert run.stdout.strip() == expected[1]


def test_every_rule_of_the_pages_script_answers(up: Up) -> None:
    call = say(up, "What is the weather in Oslo?", tools=[tool("get_weather")]).choices[0]
    assert call.finish_reason == "tool_calls"
    assert call.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    numbers = say(up, "add 12 and 30", tools=[tool("add")]).choices[0].message.tool_calls[0].function
    assert (numbers.name, numbers.arguments) == ("add", '{"a": 12, "b": 30}')
    with pytest.raises(openai.APIStatusError) as raised:
        say(up, "hello")
    assert raised.value.status_code == 503
    pieces = [chunk.choices[0].delta.content or "" for chunk in say(up, "hello", stream=True) if chunk.choices]
    assert "".join(pieces) == "Hello to you too."
    assert len([piece for piece in pieces if piece]) > 2
    assert say(up, "Tell me as JSON").choices[0].message.content == '{"city": "Paris", "degrees": 21}'
    assert say(up, "anything else").choices[0].message.content == "anything else"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_turns_of_the_scripted_engine_are_recorded(up: Up) -> None:
    answer = say(up, "remember me", logprobs=True)
    assert [each.logprob for each in answer.choices[0].logprobs.content[:3]] == [-1.0] * 3
    assert answer.system_fingerprint == "policy@0"
    assert answer.usage.completion_tokens >= 2


def test_up_without_a_script_explains_how_to_write_one(tmp_path: Path) -> None:
    found = Up(tmp_path)
    try:
        assert "no trainer" in found.said
        copied = re.search(r"cp (\S+) script.toml", found.said)
        assert copied is not None
        assert read_script(Path(copied[1]))
        assert "trainer  started" not in found.said
        said = say(found, "is anybody there?").choices[0].message.content
        assert said.endswith("You said: is anybody there?")
        status = [sys.executable, "-m", "proxy.cli", "status", "--data-dir", ".base-rl/scripted"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        assert subprocess.run(status, cwd=tmp_path, env=environment, check=False).returncode == 0
    finally:
        found.end()
    assert (tmp_path / ".base-rl" / "scripted" / "base-rl.sqlite3").exists()


def test_the_page_documents_every_key_and_no_other() -> None:
    match, answer, manner = [
        {name for cells in rows(table) for name in code(cells[0])[:1]}
        for table in sections(PAGE)["Rules"].split("\n\n| ")[1:]
    ]
    assert match == set(Match.__struct_fields__)
    assert answer | manner == set(Rule.__struct_fields__) - {"match"}
    assert not answer & manner


def test_the_short_script_of_the_page_works_as_json(tmp_path: Path) -> None:
    assert '{"rule": [{"match": {…}, "text": …}]}' in PAGE
    (tmp_path / "script.json").write_text('{"rule": [{"match": {"role": "tool"}, "text": "so"}]}')
    assert read_script(tmp_path / "script.json").rule[0].match.role == "tool"


async def test_the_engine_alone_starts_with_the_command_on_the_page(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\.venv/bin/python (-m proxy\.engines\.scripted .*) --port 30000$", PAGE, re.MULTILINE)
    (tmp_path / "script.toml").write_text(code_blocks(PAGE, "toml")[0])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *line.split(), "--port", "0"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with asyncio.timeout(READY_SECONDS):
        while b"running on http" not in await process.stderr.readline():
            assert process.returncode is None
    process.terminate()
    await process.wait()
