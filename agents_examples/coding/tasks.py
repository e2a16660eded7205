"""Small repositories with a bug and a failing test. `python -m agents_examples.coding.tasks` writes `tasks.jsonl`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Repository:
    """`files` are names and contents. Those that begin with `test_` are the tests, of which some fail at first."""

    id: str
    files: dict[str, str]


_IGNORED = {".gitignore": "__pycache__/\n"}
_MEAN = Repository(
    id="mean",
    files={
        **_IGNORED,
        "stats.py": """def mean(values):
    if not values:
        raise ValueError("no values")
    return sum(values) / (len(values) - 1)
""",
        "test_stats.py": """import unittest

from stats import mean


class MeanTest(unittest.TestCase):
    def test_two(self):
        self.assertEqual(mean([1, 3]), 2)

    def test_one(self):
        self.assertEqual(mean([5]), 5)

    def test_none(self):
        with self.assertRaises(ValueError):
            mean([])
""",
    },
)
_SLUG = Repository(
    id="slug",
    files={
        **_IGNORED,
        "slug.py": """def slug(title):
    return "_".join(title.split())
""",
        "test_slug.py": """import unittest

from slug import slug


class SlugTest(unittest.TestCase):
    def test_words(self):
        self.assertEqual(slug("Hello World"), "hello-world")

    def test_one_word(self):
        self.assertEqual(slug("again"), "again")
""",
    },
)
_CLAMP = Repository(
    id="clamp",
    files={
        **_IGNORED,
        "clamp.py": """def clamp(value, low, high):
    return min(low, max(value, high))
""",
        "test_clamp.py": """import unittest

from clamp import clamp


class ClampTest(unittest.TestCase):
    def test_inside(self):
        self.assertEqual(clamp(5, 1, 9), 5)

    def test_below(self):
        self.assertEqual(clamp(0, 1, 9), 1)

    def test_above(self):
        self.assertEqual(clamp(12, 1, 9), 9)
""",
    },
)
REPOSITORIES = (_MEAN, _SLUG, _CLAMP)


def write_tasks(path: Path) -> None:
    """Write the repositories as tasks, one JSON object per line."""
    path.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in REPOSITORIES))


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
