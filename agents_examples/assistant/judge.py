"""The judge of `config.toml`: a rule that finds the user's verdict in what the user said after each answer.

It recognises how the simulated user of `tasks.py` begins its sentences, and nothing else. Real users need a judge
that understands them: the kind `follow_up`, which asks a model (README.md).
"""

from __future__ import annotations

from typing import Any

VERDICTS = {"Thanks": 1.0, "No": -1.0}


def judge(session: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a reward for each answer that the user commented on, for its turn."""
    turns = session["turns"]
    found: dict[str, dict[str, Any]] = {}
    for turn in turns:
        words = " ".join(str(message["content"]) for message in turn["messages"] if message["role"] == "user")
        value = verdict(words)
        if turn["parent"] is not None and value is not None:
            answered = turns[turn["parent"]]["id"]
            found.setdefault(answered, {"turn_id": answered, "value": value, "comment": words})
    return list(found.values())


def verdict(words: str) -> float | None:
    """Return what a user's words say of the answer before them; None if they say nothing."""
    first = words.partition(" ")[0].rstrip(",.!")
    return VERDICTS.get(first)
