from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from agents_examples.handoffs.demonstrations import (
    TOOLS,
    Habit,
    demonstration,
    prompt_of_specialist,
    prompt_of_triage,
)
from agents_examples.handoffs.reward import reward
from agents_examples.handoffs.tasks import (
    CONVERSIONS,
    SUMS,
    UNITS,
    answered,
    conversions,
    is_right,
    random_question,
    sums,
)
from benchmarks.examples.report import readme_rows
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.starting import first_answers
from tests.docs.markdown import ROOT, rows

CHECKPOINT = EXAMPLES / "handoffs" / "checkpoint"


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("7 + 8 = 15", 15),
        ("3 hours = 180 minutes", 180),
        (" It is = 15.\n", 15),
        ("15", None),
        ("7 + 8 = 14 = 15", None),
        ("7 + 8 = 15 or 16", None),
        ("7 + 8 = -15", None),
        ("7 + 8 = 15\n7 + 8 = 16", None),
        ("= 1234567", None),
        ("", None),
    ],
)
def test_an_answer_ends_with_one_number(answer: str, number: int | None) -> None:
    assert answered(answer) == number


def test_the_reward_is_for_the_right_number_by_whomever() -> None:
    task = {"question": "What is 7 + 8?", "agent": SUMS, "result": 15}
    assert reward(task, {"by": SUMS, "answer": "7 + 8 = 15"}) == 1.0
    assert reward(task, {"by": "triage", "answer": "It is = 15"}) == 1.0
    assert reward(task, {"by": SUMS, "answer": "7 + 8 = 16"}) == 0.0
    assert reward(task, {"by": None, "answer": ""}) == 0.0


def test_every_question_has_a_working_with_its_result() -> None:
    for question in sums():
        assert answered(question.working) == question.result == sum(map(int, re.findall(r"\d+", question.text)))
    for question in conversions():
        (count,) = map(int, re.findall(r"\d+", question.text))
        words = set(re.findall(r"[a-z]+", question.text))
        (factor,) = [one for unit, other, one in CONVERSIONS if {unit, other} <= words]
        assert answered(question.working) == question.result == count * factor


def test_both_specialists_have_half_of_the_tasks() -> None:
    tasks = [json.loads(line) for line in (EXAMPLES / "handoffs" / "tasks.jsonl").read_text().splitlines()]
    assert len({task["question"] for task in tasks}) == 256
    assert [sum(task["agent"] == name for task in tasks) for name in (SUMS, UNITS)] == [128, 128]


@pytest.mark.parametrize("habit", list(Habit))
def test_only_the_right_hand_off_and_a_solution_help(habit: Habit) -> None:
    rng = random.Random(0)
    for _ in range(40):
        shown = demonstration(habit, random.Random(seed := rng.random()))
        question = random_question(random.Random(seed))
        last = shown.messages[-1]
        if habit in {Habit.HAND_OVER, Habit.HAND_ASTRAY}:
            (call,) = last["tool_calls"]
            assert (call["function"]["name"] == f"transfer_to_{question.agent}") is (habit is Habit.HAND_OVER)
        else:
            assert is_right({"result": question.result}, last["content"]) is (habit is Habit.SOLVE)


def test_specialists_start_with_few_right_answers_and_triage_with_some_wrong_hand_offs() -> None:
    rng = random.Random(0)
    questions = [random_question(rng) for _ in range(96)]
    handed = first_answers(
        CHECKPOINT, [prompt_of_triage(one) for one in questions], temperature=1.0, longest=32, tools=TOOLS
    )
    right = [f'"transfer_to_{one.agent}"' in text for one, text in zip(questions, handed, strict=True)]
    assert 0.5 <= sum(right) / len(right) <= 0.85
    for name in (SUMS, UNITS):
        own = [one for one in questions if one.agent == name]
        said = first_answers(
            CHECKPOINT, [prompt_of_specialist(name, one) for one in own], temperature=1.0, longest=32
        )
        solved = [is_right({"result": one.result}, text) for one, text in zip(own, said, strict=True)]
        assert 0 < sum(solved) / len(solved) <= 0.4


def test_the_readme_has_the_figures_of_all_three_agents() -> None:
    measured: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "examples.json").read_text())
    page = (EXAMPLES / "handoffs" / "README.md").read_text()
    for name in (SUMS, UNITS):
        for row in readme_rows(measured[f"handoffs-{name}"]):
            assert row in rows(page)
        assert (ROOT / "docs" / "images" / f"example-handoffs-{name}.svg").exists()
