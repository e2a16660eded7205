from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from agents_examples.sandbox import Stopped, wall
from agents_examples.terminal import tools
from agents_examples.terminal.agent import INSTRUCTION, work
from agents_examples.terminal.demonstrations import Habit, conversation
from agents_examples.terminal.reward import reward
from agents_examples.terminal.tasks import Job, Kind, random_job
from agents_examples.terminal.tools import BASH_TOOL, NoSandbox, files_in, folder_with, run_command, run_tool
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.calculator.server import ScriptedServer, calls, says
from tests.agents_examples.starting import first_answers

FILES = {"cups.txt": "red\nblue\n", "hats.txt": "gold\n"}
JOB = Job(kind=Kind.RENAME, files=FILES, file="cups.txt", word="red", new="eggs.txt")

needs_sandbox = pytest.mark.skipif(
    shutil.which("bwrap") is None or not wall(), reason="bubblewrap is not installed or may not make namespaces"
)


def task_of(job: Job) -> dict[str, Any]:
    return {"instruction": job.instruction, "files": job.files, "check": job.check}


@needs_sandbox
async def test_the_agent_runs_the_command_and_ends_with_an_answer(tmp_path: Path) -> None:
    answers = iter([calls(json.dumps({"command": "cat cups.txt; rm cups.txt"}), name="bash"), says("Done")])
    server = ScriptedServer(lambda _: next(answers))
    with folder_with(FILES) as folder:
        async with server.client() as client:
            messages = await work(client, "terminal", JOB.instruction, folder)
        assert files_in(folder) == {"hats.txt": "gold\n"}
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[3]["content"] == "red\nblue"
    assert server.requests[0]["tools"] == [BASH_TOOL]


@needs_sandbox
async def test_the_reward_is_what_the_check_script_says() -> None:
    rng = random.Random(0)
    for job in [JOB, *(random_job(rng) for _ in range(8))]:
        assert await reward(task_of(job), job.wanted) == 1.0
        assert await reward(task_of(job), dict(job.files)) == 0.0
        assert await reward(task_of(job), {**job.wanted, ".more": ""}) == 0.0
        assert await reward(task_of(job), {name: f"{text}more\n" for name, text in job.wanted.items()}) == 0.0
        assert await reward(task_of(job), {}) == 0.0


@pytest.mark.parametrize("arguments", ["{broken", "[]", "{}", '{"command": 1}', '{"command": "", "more": 1}'])
async def test_a_bad_call_is_answered_with_an_error(arguments: str, tmp_path: Path) -> None:
    assert (await run_tool(arguments, tmp_path)).startswith("error: the arguments")


@needs_sandbox
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo 1; echo 2", "1\n2"),
        ("true", "no output"),
        ("cat absent", "error: exit status 1\ncat: absent: No such file or directory"),
        ("yes", "error: the program printed too much"),
        ("echo 'unfinished", "error: exit status"),
        ("touch /usr/mine", "error: exit status 1\ntouch: cannot touch '/usr/mine': Read-only file system"),
        ("rm -rf /usr/bin 2> /dev/null; ls", "a.txt"),
        ("head -c 100000 /dev/zero > big; stat -c %s big", "65536"),
        ("env | sort", "PATH=/usr/bin:/bin"),
        (" " * 2000, "error: the command has more than"),
    ],
)
async def test_a_command_is_limited(command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A loaded machine may need more than the usual seconds for one of processor time.
    monkeypatch.setattr(tools, "SECONDS", 60.0)
    (tmp_path / "a.txt").write_text("")
    assert said in await run_tool(json.dumps({"command": command}), tmp_path)


@needs_sandbox
async def test_a_command_that_waits_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "SECONDS", 0.5)
    with pytest.raises(Stopped, match="took too long"):
        await run_command("setsid sleep 3600 & sleep 3600", tmp_path)


@needs_sandbox
async def test_a_command_has_no_network_and_sees_no_file_of_the_user(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret = tmp_path_factory.mktemp("secret") / "file"
    secret.write_text("secret")
    assert "No such file" in (await run_command(f"cat {secret}", tmp_path))[0]
    assert "unreachable" in (await run_command("echo > /dev/tcp/192.0.2.1/80", tmp_path))[0]


@needs_sandbox
async def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with folder_with({"a/b.txt": "b"}) as folder:
        await run_command(f"ln -s {tmp_path}/secret link; ln -s {tmp_path} folder; ln -s b.txt a/c.txt", folder)
        assert (folder / "link").is_symlink()
        assert files_in(folder) == {"a/b.txt": "b"}


async def test_without_a_sandbox_there_is_no_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "wall", lambda: ())
    with pytest.raises(NoSandbox, match="apt-get install bubblewrap"):
        await run_tool('{"command": "ls"}', tmp_path)


@needs_sandbox
@pytest.mark.parametrize("habit", list(Habit))
async def test_the_demonstrated_commands_do_what_is_demonstrated(habit: Habit) -> None:
    rng = random.Random(0)
    for job in [random_job(rng) for _ in range(6)]:
        messages = conversation(job, habit)
        with folder_with(job.files) as folder:
            for call, result in itertools.pairwise(messages):
                if result["role"] == "tool":
                    arguments = call["tool_calls"][0]["function"]["arguments"]
                    assert await run_tool(arguments, folder) == result["content"]
            assert await reward(task_of(job), files_in(folder)) == float(habit is Habit.DO)


def test_the_model_starts_with_few_commands() -> None:
    rng = random.Random(0)
    conversations = [
        [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": random_job(rng).instruction}]
        for _ in range(48)
    ]
    said = first_answers(
        EXAMPLES / "terminal" / "checkpoint", conversations, temperature=1.0, longest=48, tools=[dict(BASH_TOOL)]
    )
    assert 0.1 <= sum(text.startswith("<tool_call>") for text in said) / len(said) <= 0.75
