"""Task files, what attempts return, journals, and programs, each alone."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cli.attempts.feedback import NotFeedback, feedback_from, feedback_from_output
from proxy.cli.attempts.journal import Finished, Journal
from proxy.cli.attempts.runners import AttemptFailed, FunctionRunner, ProgramRunner, load_function, without_secrets
from proxy.cli.attempts.sessions import Session
from proxy.cli.attempts.task_file import Task, read_tasks
from proxy.cli.console import Refused

SESSION = Session(id="ses_1", base_url="http://127.0.0.1:1/v1", api_key="rl-session-secret", model="demo")
TASK = Task(id="one", fields={"id": "one", "question": "How much?"})


def test_bad_lines_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a"}\n\nnot json\n[1]\n{"id": "a"}\n{"id": ""}\n{"id": true}\n{"id": 7}\n{"q": 1}\n')
    found = read_tasks(path)
    assert [task.id for task in found.tasks] == ["a", "7", "9"]
    assert [problem.split(": ")[0].rpartition(" ")[2] for problem in found.problems] == ["3", "4", "5", "6", "7"]
    assert found.tasks[2].fields == {"q": 1}


@pytest.mark.parametrize("content", [b"", b"\n", b"no task\n", b"\xff\xfe"])
def test_a_file_without_tasks_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"tasks\.jsonl"):
        read_tasks(path)
    with pytest.raises(Refused, match="cannot read the tasks"):
        read_tasks(tmp_path / "absent.jsonl")


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**9), 10**9) | st.booleans())
def test_a_number_is_the_sessions_reward(number: float) -> None:
    for feedback in (feedback_from(number), feedback_from_output(f"progress\n{json.dumps(number)}\n\n")):
        assert feedback.items == ({"reward": float(number)},)
        assert feedback.reward == float(number)


def test_rewards_of_turns_are_not_the_sessions() -> None:
    assert feedback_from([{"turn_id": "t", "reward": 1}]).reward is None
    assert feedback_from([{"turn_id": "t", "reward": 1}, 0.25]).reward == 0.25
    assert feedback_from({"text": "too long"}).items == ({"text": "too long"},)
    assert feedback_from(None).items == ()


@pytest.mark.parametrize(
    "returned",
    [
        "1.0",
        float("nan"),
        float("inf"),
        {},
        {"reward": "1"},
        {"reward": None},
        {1: 2},
        [[1]],
        {"session_id": "s", "reward": 1},
    ],
)
def test_other_values_are_no_feedback(returned: Any) -> None:
    with pytest.raises(NotFeedback):
        feedback_from(returned)


def test_feedback_is_for_the_attempts_own_session() -> None:
    with pytest.raises(NotFeedback, match="leave out `session_id`"):
        feedback_from({"session_id": "ses_2", "reward": 1})


@pytest.mark.parametrize("output", ["", "\n \n", "done", "NaN", '{"reward": Infinity}', "1\nthanks"])
def test_output_without_a_reward_is_no_feedback(output: str) -> None:
    with pytest.raises(NotFeedback, match=r"last line|nothing"):
        feedback_from_output(output)


def test_a_journal_continues_after_a_kill_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        series = journal.series
        journal.add(Finished(task="a", number=0, session_id="s", seconds=1.0, reward=0.0))
        journal.add(Finished(task="a", number=1, session_id="s", seconds=1.0, problem="hung"))
    whole = path.read_text()
    path.write_text(whole + '{"task": "a", "num')
    with Journal(path) as journal:
        assert journal.series == series
        assert journal.has("a", 0)
        assert not journal.has("a", 1)
        assert not journal.has("b", 0)
        journal.add(Finished(task="a", number=1, session_id="t", seconds=1.0))
    assert path.read_text().startswith(whole)
    with Journal(path) as journal:
        assert journal.has("a", 1)


def test_a_journal_whose_first_line_was_cut_off_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"ser')
    with Journal(path) as journal:
        series = journal.series
    assert json.loads(path.read_text()) == {"series": series}


def test_another_file_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("some notes\nand more\n")
    with pytest.raises(Refused, match="no journal"):
        Journal(path)
    assert path.read_text() == "some notes\nand more\n"


def program(*lines: str) -> str:
    """Return a command that runs these lines of Python."""
    return f"{sys.executable} -c '{chr(10).join(lines)}'"


async def test_a_program_finds_its_session_and_its_task() -> None:
    code = (
        "import json, os, sys",
        "task = json.loads(sys.stdin.readline())",
        'assert task == json.loads(os.environ["BASE_RL_TASK"])',
        'assert os.environ["OPENAI_BASE_URL"] == os.environ["ANTHROPIC_BASE_URL"] + "/v1"',
        'print(json.dumps({"reward": 1, "comment": os.environ["OPENAI_API_KEY"] + task["question"]}))',
    )
    feedback = await ProgramRunner(program(*code)).run(TASK, SESSION)
    assert feedback.items == ({"reward": 1.0, "comment": "rl-session-secretHow much?"},)


async def test_a_failing_program_is_told_without_its_keys() -> None:
    code = ("import os, sys", 'sys.exit("wrong key " + os.environ["OPENAI_API_KEY"])')
    with pytest.raises(AttemptFailed, match=r"exit status 1: wrong key \[OPENAI_API_KEY\]"):
        await ProgramRunner(program(*code)).run(TASK, SESSION)
    with pytest.raises(AttemptFailed, match="cannot run /no/such/program"):
        await ProgramRunner("/no/such/program").run(TASK, SESSION)


async def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time",
        'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])',
        f'open("{pids}.part", "w").write(str(child.pid))',
        f'os.rename("{pids}.part", "{pids}")',
        "time.sleep(600)",
    )
    running = asyncio.create_task(ProgramRunner(program(*code)).run(TASK, SESSION))
    while not pids.exists():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(10):
        while _runs(int(pids.read_text())):
            await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    """Return whether a process runs. A killed one whose parent is gone may stay as a zombie for a while."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_functions_are_scored_by_the_reward_function() -> None:
    def attempt(task: dict[str, Any], session: Session) -> str:
        return f"{task['question']} {session.model}"

    async def reward(task: dict[str, Any], result: str) -> float:
        return float(result == "How much? demo")

    assert (await FunctionRunner(attempt, reward).run(TASK, SESSION)).reward == 1.0
    with pytest.raises(AttemptFailed, match="returns a number"):
        await FunctionRunner(attempt).run(TASK, SESSION)

    def broken(task: dict[str, Any], result: str) -> float:
        raise KeyError("answer")

    with pytest.raises(AttemptFailed, match="the reward function raised KeyError"):
        await FunctionRunner(attempt, broken).run(TASK, SESSION)


def test_functions_are_loaded_from_files_and_modules(tmp_path: Path) -> None:
    (tmp_path / "attempt_beside.py").write_text("ANSWER = 42\n")
    (tmp_path / "attempt_agent.py").write_text(
        "import attempt_beside\ndef attempt(task, session): return attempt_beside.ANSWER\n"
    )
    assert load_function(f"{tmp_path}/attempt_agent.py:attempt")({}, None) == 42
    assert load_function("json:dumps") is json.dumps
    for named in ("agent", ":x", "json:", "json:nothing", f"{tmp_path}/absent.py:attempt", "no.such.module:attempt"):
        with pytest.raises(Refused):
            load_function(named)


def test_short_values_and_other_variables_stay() -> None:
    environment = {"MY_TOKEN": "abcdefgh", "SHORT_KEY": "x", "HOME": "/home/someone"}
    assert without_secrets("abcdefgh x /home/someone", environment) == "[MY_TOKEN] x /home/someone"
