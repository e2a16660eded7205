from __future__ import annotations

import json
import random
import shutil

import pytest

from agents_examples.countdown import tools
from agents_examples.countdown.agent import answer_of, solve
from agents_examples.countdown.demonstrations import SEARCH, Habit, conversation
from agents_examples.countdown.reward import reward
from agents_examples.countdown.tasks import Puzzle, random_puzzle, value_of
from agents_examples.countdown.tools import PYTHON_TOOL, run_program, run_tool
from agents_examples.sandbox import wall
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.calculator.server import ScriptedServer, calls, says
from tests.agents_examples.starting import first_answers

PUZZLE = Puzzle(numbers=(1, 7, 7), target=56)


async def test_the_agent_runs_the_program_and_answers() -> None:
    answers = iter([calls(json.dumps({"code": "print(6 * 7)"}), name="python"), says("(1+7)*7")])
    server = ScriptedServer(lambda _: next(answers))
    async with server.client() as client:
        messages = await solve(client, "countdown", PUZZLE.question)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["content"] == "42"
    assert answer_of(messages) == "(1+7)*7"
    assert answer_of(messages[:3]) == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(1+7)*7", 56),
        (" 7*7+1 ", 50),
        ("56", None),  # none of the numbers
        ("7*8", None),
        ("1*7", None),  # not all of them
        ("1+7*7*1", None),
        ("1+7+-7", None),
        ("7**1*7", None),
        ("1+7+True", None),
        ("print(7)", None),
        ("", None),
        ("(" * 1000, None),
        ("1" + "+7" * 10_000, None),
    ],
)
def test_an_answer_is_an_expression_of_the_numbers_and_nothing_else(text: str, value: int | None) -> None:
    assert value_of(text, PUZZLE.numbers) == value
    assert reward({"numbers": [1, 7, 7], "target": 56}, text) == float(value == 56)


@pytest.mark.parametrize("arguments", ["{broken", "[]", "{}", '{"code": 1}', '{"code": "", "more": 1}'])
async def test_a_bad_call_is_answered_with_an_error(arguments: str) -> None:
    assert (await run_tool(arguments)).startswith("error: the arguments")


async def test_a_long_program_is_refused() -> None:
    assert "characters" in await run_tool(json.dumps({"code": "#" * 5000}))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(1 + 1)", "2"),
        ("x = 1", "error: the program printed nothing"),
        ("1 / 0", "error: ZeroDivisionError: division by zero"),
        ("while True: pass", "error: the program failed or exceeded a limit"),
        ("print('a' * 10**6)", "error: the program printed too much"),
        ("x = 'a' * 10**9", "error: MemoryError:"),
        ("raise SystemExit(3)", "error: the program failed or exceeded a limit"),
        ("import os; print(sorted(set(os.environ) - {'LC_CTYPE', 'PWD'}))", "[]"),
    ],
)
async def test_a_program_is_limited(code: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A loaded machine may need more than the usual seconds for one of processor time.
    monkeypatch.setattr(tools, "SECONDS", 60.0)
    assert await run_program(code) == said


async def test_a_program_that_waits_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "SECONDS", 0.2)
    assert await run_program("import time; time.sleep(3600)") == "error: the program took too long"


async def test_a_program_writes_no_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("outside") / "file"
    await run_program(f"open({str(path)!r}, 'w').write('x' * 100)")
    assert not path.exists() or path.read_text() == ""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_behind_bubblewrap_there_is_no_network_and_no_file_of_the_user(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if not wall():
        pytest.skip("bubblewrap may not make namespaces here")
    path = tmp_path_factory.mktemp("secret") / "file"
    path.write_text("secret")
    assert "FileNotFoundError" in await run_program(f"print(open({str(path)!r}).read())")
    assert "unreachable" in await run_program("import socket; socket.create_connection(('192.0.2.1', 80), 1)")


async def test_the_demonstrated_programs_do_what_is_demonstrated() -> None:
    rng = random.Random(0)
    for habit in (Habit.SEARCH, Habit.BROKEN_PROGRAM, Habit.IGNORED_RESULT):
        _, call, result, _ = conversation(random_puzzle(rng), habit, rng)
        assert await run_tool(call["tool_calls"][0]["function"]["arguments"]) == result["content"]


async def test_the_search_finds_a_solution_of_every_puzzle() -> None:
    rng = random.Random(1)
    for puzzle in [random_puzzle(rng) for _ in range(5)]:
        numbers = ", ".join(map(str, puzzle.numbers))
        found = await run_program(SEARCH.format(numbers=numbers, target=puzzle.target))
        assert value_of(found, puzzle.numbers) == puzzle.target


def test_the_model_starts_with_few_programs() -> None:
    rng = random.Random(0)
    conversations = [[{"role": "user", "content": random_puzzle(rng).question}] for _ in range(48)]
    said = first_answers(
        EXAMPLES / "countdown" / "checkpoint", conversations, temperature=1.0, longest=64, tools=[dict(PYTHON_TOOL)]
    )
    assert 0.05 <= sum(text.startswith("<tool_call>") for text in said) / len(said) <= 0.6
