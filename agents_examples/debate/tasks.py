"""Motions and the judge of a debate. `python -m agents_examples.debate.tasks` writes `tasks.jsonl`.

A motion has two sums. Each side argues that its own is the larger one.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

LARGEST_TERM = 9
_EQUATION = re.compile(r"(\d+) \+ (\d+) = (\d+)")


@dataclass(frozen=True, kw_only=True)
class Sum:
    """Two terms from 1 to 9."""

    a: int
    b: int

    @property
    def expression(self) -> str:
        return f"{self.a} + {self.b}"

    @property
    def result(self) -> int:
        return self.a + self.b


@dataclass(frozen=True, kw_only=True)
class Motion:
    """The sums of the side that opens and of the side that replies. They are not equal."""

    opener: Sum
    replier: Sum

    @property
    def topic(self) -> str:
        return f"{self.opener.expression} or {self.replier.expression}"


def is_sound(own: Sum, statement: str) -> bool:
    """Return whether a statement works out the side's own sum, rightly, and makes no other claim of that form."""
    claimed = _EQUATION.findall(statement)
    return claimed == [(str(own.a), str(own.b), str(own.result))]


def winner(motion: Motion, opening: str, reply: str) -> int | None:
    """Return 0 if the opening side wins, 1 if the replying side does, None if neither convinces.

    A side without a sound statement cannot win. If both are sound, the larger sum wins.
    """
    sound = is_sound(motion.opener, opening), is_sound(motion.replier, reply)
    if all(sound):
        return 0 if motion.opener.result > motion.replier.result else 1
    return sound.index(True) if any(sound) else None


def random_motion(rng: random.Random) -> Motion:
    """Return a motion; all terms are equally likely, but sums that are equal are drawn again."""
    while True:
        terms = [rng.randint(1, LARGEST_TERM) for _ in range(4)]
        motion = Motion(opener=Sum(a=terms[0], b=terms[1]), replier=Sum(a=terms[2], b=terms[3]))
        if motion.opener.result != motion.replier.result:
            return motion


def write_tasks(path: Path, count: int = 256) -> None:
    """Write distinct motions as tasks, one JSON object per line."""
    rng = random.Random(0)
    distinct: dict[str, Motion] = {}
    while len(distinct) < count:
        motion = random_motion(rng)
        distinct[motion.topic] = motion
    lines = [
        json.dumps({"id": topic, "opener": [one.opener.a, one.opener.b], "replier": [one.replier.a, one.replier.b]})
        for topic, one in distinct.items()
    ]
    path.write_text("\n".join(lines) + "\n")


def motion_of(task: dict[str, list[int]]) -> Motion:
    """Return the motion of a task."""
    (a, b), (c, d) = task["opener"], task["replier"]
    return Motion(opener=Sum(a=a, b=b), replier=Sum(a=c, b=d))


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
