"""The runbook in `docs/operating.md` has an entry for every alert and for every problem that health reports."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operating.md").read_text()
SECTION = PAGE.split("## Alerts\n")[1].split("\n## ")[0]
ENTRIES = re.findall(r"^\| (.+?) \| ", SECTION, re.MULTILINE)


def test_each_alert_has_an_entry_and_each_entry_an_alert() -> None:
    groups = importlib.import_module("yaml").safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    assert [entry.strip("`") for entry in ENTRIES if entry.startswith("`")] == alerts


def test_each_problem_of_health_has_an_entry() -> None:
    """The problems are the texts in these functions; a gap in a text is `…` in its entry."""
    texts = [
        *problems_in("proxy/overview/health.py", "check", "_run_problems", "_mismatch_problem", "_fault_problem"),
        *problems_in("proxy/serving/pool.py", "problems"),
        *problems_in("proxy/serving/placement.py", "no_engine_for"),
    ]
    assert len(texts) >= 9
    entries = [pattern(entry) for entry in ENTRIES if not entry.startswith(("`", "alert", "problem", "---"))]
    missing = [text for text in texts if not any(entry.match(text) for entry in entries)]
    assert missing == []


def pattern(entry: str) -> re.Pattern[str]:
    return re.compile(".*?".join(re.escape(part) for part in entry.split("…")))


def problems_in(module: str, *functions: str) -> list[str]:
    """Return the sentences with gaps in these functions of a module."""
    tree = ast.parse((ROOT / module).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = [node for function in found if function.name in functions for node in ast.walk(function)]
    texts = ["".join(_part(part) for part in node.values) for node in inside if isinstance(node, ast.JoinedStr)]
    return [text for text in texts if " " in text and len(text) > 24]


def _part(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "…"
