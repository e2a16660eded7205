"""The reward for `base-rl attempts`: the share of the fields that are right, and each field as a component."""

from __future__ import annotations

import json
from typing import Any

from agents_examples.extraction.tasks import FIELDS


def reward(task: dict[str, Any], answer: str) -> dict[str, Any]:
    """Return the feedback on an attempt at a task of `tasks.jsonl`.

    The components only explain the reward: `config.toml` gives them the weight 0. An answer that is no object has no
    right field. A field counts only if its type is right as well, so that `"3"` is no count.
    """
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    given = found if isinstance(found, dict) else {}
    right = {field: float(_same(given.get(field), task["order"][field])) for field in FIELDS}
    return {"reward": sum(right.values()) / len(right), "components": right}


def _same(given: Any, wanted: Any) -> bool:
    return type(given) is type(wanted) and given == wanted
