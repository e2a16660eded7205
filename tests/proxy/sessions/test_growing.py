"""Which recorded step a growing prompt continues."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.identifiers import KeyId
from proxy.sessions import growing as module
from proxy.sessions.growing import (
    SHORTEST_ANSWER,
    GrowingPrompts,
    LonePrompt,
    beginnings,
    continued_steps,
    step_of,
)

KEY = KeyId("key")
FRAME = b"f" * 32
THOUGHT = "I look it up.\nAction: search[tests]"

TEXTS = st.text(st.sampled_from("ab \n\ud800é"), max_size=40)
ANSWERS = TEXTS.filter(lambda text: bool(text.strip()))


def prompt(text: str) -> LonePrompt:
    return LonePrompt(FRAME, text.strip())


def goes_on(recorded: str, answer: str, text: str) -> bool:
    return bool(continued_steps(text, [step_of(prompt(recorded), answer)]))


@given(TEXTS, ANSWERS, TEXTS)
def test_a_text_continues_a_prompt_followed_by_its_answer(recorded: str, answer: str, text: str) -> None:
    """The rule in plain words, on texts so similar that it often holds."""
    text = text.strip()
    begin = recorded.strip()
    expected = text != begin and text.startswith(begin) and answer.strip() in text[len(begin) :]
    places = text[len(begin) :].count(answer.strip()[:1])
    if places <= module.OCCURRENCES or not expected:
        assert goes_on(recorded, answer, text) == expected


@given(TEXTS, ANSWERS, TEXTS, TEXTS)
def test_text_around_the_answer_does_not_matter(recorded: str, answer: str, before: str, after: str) -> None:
    text = f"{recorded}{'c' * len(before)}{answer}{after}".strip()
    assert goes_on(recorded, answer, text)
    assert not goes_on(recorded, f"{answer.strip()}d", text)
    assert not goes_on(f"d{recorded}", answer, text)


@given(st.lists(st.tuples(ANSWERS, TEXTS), min_size=1, max_size=5))
def test_a_step_continues_the_last_one(steps: list[tuple[str, str]]) -> None:
    text, recorded = "Task:", []
    for answer, result in steps:
        recorded.append(step_of(prompt(text), answer))
        text = f"{text} {answer}\nObservation: {result}."
    assert continued_steps(text, recorded)[0] == recorded[-1]


@pytest.mark.parametrize(
    ("recorded", "answer", "text"),
    [
        ("What is 1 + 1", "That makes two, I think.", "What is 1 + 12"),
        ("Task", THOUGHT, "Task"),
        ("Task", THOUGHT, THOUGHT),
        ("Task one", THOUGHT, f"Task two {THOUGHT}"),
        ("Task", THOUGHT, f"Task {THOUGHT[:-1]}"),
        (f"Task {THOUGHT}", THOUGHT, f"Task {THOUGHT}\nObservation: none"),
    ],
    ids=["number", "same", "answer alone", "other task", "cut answer", "answer before"],
)
def test_a_text_without_the_answer_after_the_prompt_continues_nothing(recorded: str, answer: str, text: str) -> None:
    assert not goes_on(recorded, answer, text)


def test_an_answer_longer_than_its_head_is_compared_whole() -> None:
    answer = "a" * module.HEAD + "b"
    assert goes_on("Task", answer, f"Task {answer}\nOn")
    assert not goes_on("Task", answer, f"Task {answer[:-1]}c\nOn")
    assert goes_on("Task", answer, f"Task aa{answer}"), "it begins a little later"


def test_the_nearest_answer_counts_then_the_longest() -> None:
    two, three = step_of(prompt("Task"), "2"), step_of(prompt("Task"), "3")
    long = step_of(prompt("Task"), "3 or more")
    assert continued_steps("Task 2\nObservation: 3", [three, two]) == [two, three]
    assert continued_steps("Task 3 or more\nObservation: 2", [two, three, long])[0] == long


@given(TEXTS, st.lists(st.integers(0, 60)))
def test_beginnings_are_those_of_the_text(text: str, lengths: list[int]) -> None:
    found = beginnings(text, lengths)
    assert set(found) == {length for length in lengths if length <= len(text)}
    assert all(found[length] == beginnings(text[:length], [length])[length] for length in found)


def test_a_short_answer_counts_only_behind_another_answer() -> None:
    prompts = GrowingPrompts()
    short = "a" * (SHORTEST_ANSWER - 1)
    assert prompts.add(KEY, prompt("Task"), f"  {short}\n", has_grown=False) is None
    assert prompts.continued(KEY, prompt(f"Task {short} on")) == []
    step = prompts.add(KEY, prompt("Task"), short, has_grown=True)
    assert prompts.continued(KEY, prompt(f"Task {short} on")) == [step]
    assert prompts.add(KEY, prompt("Task"), " \n", has_grown=True) is None


def test_key_and_frame_must_be_equal() -> None:
    prompts = GrowingPrompts()
    step = prompts.add(KEY, prompt("Task"), THOUGHT, has_grown=False)
    text = f"Task {THOUGHT}"
    assert prompts.continued(KEY, prompt(text)) == [step]
    assert prompts.continued(KeyId("other"), prompt(text)) == []
    assert prompts.continued(KEY, LonePrompt(b"g" * 32, text)) == []


@given(st.data())
def test_the_newest_are_kept(data: Any) -> None:
    added: dict[tuple[int, int], bytes | None] = {}
    prompts = GrowingPrompts(most=4)
    for key, number in data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=20)):
        added.pop((key, number), None)
        added[key, number] = prompts.add(KeyId(str(key)), prompt(f"Task {number}"), THOUGHT, has_grown=False)
    newest = list(added)[-4:]
    assert len(prompts) == len(newest)
    for (key, number), step in added.items():
        found = prompts.continued(KeyId(str(key)), prompt(f"Task {number} {THOUGHT}"))
        assert found == ([step] if (key, number) in newest else [])


def test_one_frame_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEPS_OF_FRAME", 3)
    prompts = GrowingPrompts()
    for number in range(5):
        prompts.add(KEY, prompt(f"Task {number}"), THOUGHT, has_grown=False)
    kept = [bool(prompts.continued(KEY, prompt(f"Task {number} {THOUGHT}"))) for number in range(5)]
    assert kept == [False, False, True, True, True]
    prompts.drop_where(lambda key_id, _step: key_id == KEY)
    assert len(prompts) == 0
    assert prompts.continued(KEY, prompt(f"Task 4 {THOUGHT}")) == []
