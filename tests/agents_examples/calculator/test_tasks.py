from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents_examples.calculator.tasks import (
    OPERATIONS,
    PHRASINGS,
    Problem,
    calculate,
    problems,
    random_problem,
    score,
)

PROBLEMS = st.builds(
    Problem,
    a=st.integers(0, 99),
    b=st.integers(0, 99),
    op=st.sampled_from(sorted(OPERATIONS)),
    phrasing=st.sampled_from(PHRASINGS),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "op", "c"]), inner),
    max_leaves=6,
)


@given(PROBLEMS)
def test_the_tool_and_the_checker_agree(problem: Problem) -> None:
    result = calculate(json.dumps({"a": problem.a, "b": problem.b, "op": problem.op}))
    assert result == str(problem.result)
    assert score(problem, f"The answer is {result}.") == 1.0
    assert score(problem, f"\nThe answer is {result}. ") == 1.0


@given(PROBLEMS, st.integers(-9999, 9999))
def test_another_number_earns_nothing(problem: Problem, number: int) -> None:
    assert score(problem, f"The answer is {number}.") == float(number == problem.result)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "84",
        "The answer is 84",
        "The answer is 084.",
        "The answer is 84. Or 85.",
        "the answer is 84.",
        "The answer is 84.0.",
    ],
)
def test_the_answer_has_to_be_exact(answer: str) -> None:
    assert score(Problem(a=12, op="*", b=7), answer) == 0.0


@given(st.text() | JSON.map(json.dumps))
def test_the_tool_answers_anything_with_text(arguments: str) -> None:
    result = calculate(arguments)
    assert result.startswith("error: ") or int(result) is not None


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1, "b": 2',
        "[1, 2]",
        '{"a": 1, "b": 2}',
        '{"a": true, "b": 2, "op": "+"}',
        '{"a": 1.5, "b": 2, "op": "+"}',
        '{"a": 1, "b": "2", "op": "+"}',
        '{"a": 1, "b": 2, "op": "/"}',
        '{"a": 1, "b": 2, "op": ["+"]}',
        '{"a": 1, "b": 2, "op": "+", "c": 3}',
        "9" * 5000,
    ],
)
def test_wrong_arguments_are_errors(arguments: str) -> None:
    assert calculate(arguments).startswith("error: ")


def test_a_huge_product_causes_no_crash() -> None:
    arguments: dict[str, Any] = {"a": 10**4200, "b": 10**4200, "op": "*"}
    assert calculate(json.dumps(arguments)).startswith("error: ")


def test_problems_are_seeded_and_cover_the_space() -> None:
    first = list(itertools.islice(problems(7), 500))
    assert first == list(itertools.islice(problems(7), 500))
    assert first != list(itertools.islice(problems(8), 500))
    assert {problem.op for problem in first} == set(OPERATIONS)
    assert {problem.phrasing for problem in first} == set(PHRASINGS)
    operands = {operand for problem in first for operand in (problem.a, problem.b)}
    assert min(operands) == 0
    assert max(operands) == 99


def test_the_question_names_the_expression() -> None:
    problem = random_problem(random.Random(1))
    assert problem.expression in problem.question
