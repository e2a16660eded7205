"""The parts of an exported session that are learnt."""

from __future__ import annotations

import json
from typing import Any

from trainer.fit.records import Selection, examples_of


def exported(name: str, parent: int | None = None, shared: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "parent": parent,
        "prefix_tokens": shared,
        "prompt_ids": [1, 2, 3] if parent is None else [9],
        "output_ids": [4, 5],
        "logprobs": [-1.0, -1.0],
        "versions": [[0, 0, 2]],
        "state": "complete",
        "continuation": "new" if parent is None else "exact",
        "started_at": 0.0 if parent is None else 2.0,
        "finished_at": 1.0 if parent is None else 3.0,
        **changes,
    }


def learnt(*turns: dict[str, Any]) -> list[str]:
    line = {
        "format": "base-rl/1", "session_id": "ses_1", "task": None, "purpose": "train", "state": "ended",
        "reward": 1.0, "created_at": 0.0, "turns": turns,
    }  # fmt: skip
    found = examples_of([json.dumps(line).encode()], Selection(), 64)
    return [turn.id for each in found.examples for turn in each.trajectory.turns if turn.trainable]


def test_superseded_choices_are_not_imitated() -> None:
    choices = [exported(name) for name in "abc"]
    assert learnt(*choices, exported("d", 1, 5)) == ["b", "d"]
    assert learnt(*choices) == ["a", "b", "c"], "nothing says which one the reward is about"


def test_an_answer_that_the_agent_never_saw_is_not_imitated() -> None:
    cut = exported("b", 0, 5, state="truncated")
    assert learnt(exported("a"), cut, exported("c", 0, 5, started_at=4.0, finished_at=5.0)) == ["a", "c"]
    assert learnt(exported("a"), cut, exported("c", 1, 8)) == ["a", "b", "c"], "it was sent back"


def test_a_session_whose_turns_form_no_tree_is_dropped() -> None:
    assert learnt(exported("a", 1, 2), exported("b", 0, 2)) == []
