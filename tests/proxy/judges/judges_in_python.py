"""Functions that judges in tests call."""

from __future__ import annotations

import time
from typing import Any


def half(session: dict[str, Any]) -> float:
    return 0.5 if session["messages"][-1]["content"] == "It is 4." else 0.0


async def both(session: dict[str, Any]) -> dict[str, Any]:
    return {
        "rewards": [
            {"value": 1, "comment": "right"},
            {"name": "style", "value": 0.25, "turn_id": session["turns"][0]["id"]},
        ]
    }


def nothing(_session: dict[str, Any]) -> None:
    return None


def nonsense(_session: dict[str, Any]) -> str:
    return "good"


def failing(session: dict[str, Any]) -> float:
    raise ValueError(session["messages"][-1]["content"])


def slow(_session: dict[str, Any]) -> float:
    time.sleep(0.5)
    return 1.0


def by_number(session: dict[str, Any]) -> float:
    return int(session["messages"][0]["content"]) / 10
