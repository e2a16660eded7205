from __future__ import annotations

import json
import random

import pytest

from agents_examples.search.demonstrations import TOOLS, Habit, conversation
from agents_examples.search.reward import reward
from agents_examples.search.tasks import NAMES, WORKERS, Kind, question, random_world
from agents_examples.search.tools import NOTHING, Index, index
from benchmarks.examples.run import EXAMPLES
from tests.agents_examples.starting import first_answers

FOLDER = EXAMPLES / "search"


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("Ada works", "Ada works for Otto."),
        ("works ADA", "Ada works for Otto."),
        ("Ada", "Ada lives in Oslo.\nAda works for Otto."),
        ("Adam", NOTHING),
        ("Ada NOT works", NOTHING),
        ('"Ada" AND (', NOTHING),
        ("Ada*", "Ada lives in Oslo.\nAda works for Otto."),
        ("", NOTHING),
        ("?!", NOTHING),
        ("in", "Ada lives in Oslo.\nOtto lives in Rome.\nBen lives in Cork."),
    ],
)
def test_the_index_finds_documents_with_all_words(query: str, found: str) -> None:
    documents = [
        "Ada lives in Oslo.",
        "Ada works for Otto.",
        "Otto lives in Rome.",
        "Ben lives in Cork.",
        "a in b c d e",
    ]
    assert Index(documents).search(query) == found


def test_every_task_is_answered_by_searches_that_find_one_document() -> None:
    tasks = [json.loads(line) for line in (FOLDER / "tasks.jsonl").read_text().splitlines()]
    world = random_world(random.Random(0))
    asked = {one.text: one for one in (question(world, kind, worker) for kind in Kind for worker in WORKERS)}
    assert {task["question"] for task in tasks} == asked.keys()
    for task in tasks:
        one = asked[task["question"]]
        assert [index().search(each.words) for each in one.searches] == [each.document for each in one.searches]
        assert one.answer == task["answer"]
        assert len(one.searches) == task["hops"]


def test_each_search_but_the_first_is_for_what_the_last_one_found() -> None:
    one = question(random_world(random.Random(1)), Kind.BOSS_COUNTRY, "Ada")
    assert one.text == "In which country does the boss of Ada live?"
    assert one.searches[0].words == "Ada works"
    for last, following in zip(one.searches, one.searches[1:], strict=False):
        assert following.words.split()[0] == last.found
        assert last.document.endswith(f" {last.found}.")


def test_names_occur_in_one_role_only() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("Oslo.", 1.0), ("oslo", 1.0), (" Oslo \n", 1.0), ("I think Oslo.", 0.0), ("Oslo, Rome", 0.0), ("", 0.0)],
)
def test_the_reward_is_for_the_name_alone(answer: str, expected: float) -> None:
    assert reward({"answer": "Oslo"}, answer) == expected


@pytest.mark.parametrize("habit", list(Habit))
def test_only_searching_to_the_end_is_right(habit: Habit) -> None:
    rng = random.Random(0)
    kinds = [kind for kind in Kind if kind is not Kind.HOME]
    asked = [question(random_world(rng), rng.choice(kinds), rng.choice(WORKERS)) for _ in range(40)]
    earned = {reward({"answer": one.answer}, conversation(one, habit, rng)[-1]["content"]) for one in asked}
    assert earned == {float(habit is Habit.SEARCH)}


def test_the_model_starts_with_few_searches() -> None:
    rng = random.Random(0)
    asked = [question(random_world(rng), rng.choice(list(Kind)), rng.choice(WORKERS)) for _ in range(96)]
    conversations = [conversation(one, Habit.SEARCH, rng)[:2] for one in asked]
    said = first_answers(FOLDER / "checkpoint", conversations, temperature=1.0, longest=32, tools=TOOLS)
    assert 0.2 <= sum(text.startswith("<tool_call>") for text in said) / len(said) <= 0.7
