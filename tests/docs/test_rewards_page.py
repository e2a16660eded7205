"""The page on rewards: each of its judges is a valid configuration and does what the page says."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from proxy.settings import JudgeKind, JudgingSettings, load_settings
from proxy.tokens.template import ChatTemplate
from tests.database import sqlite_database
from tests.docs.markdown import ROOT, code_blocks
from tests.proxy.calls.judged import open_judged
from tests.proxy.judges.model_server import grade
from tests.proxy.judges.test_comparisons import by_length, group, longer
from tests.proxy.judges.test_follow_up import by_thanks, conversation
from tests.proxy.judges.test_programs import http
from tests.proxy.judges.world import World, open_world
from tests.proxy.outbound.targets import target
from tests.proxy.tokens.models import write_model

PAGE = (ROOT / "docs" / "rewards.md").read_text()


def judges() -> dict[str, dict[str, Any]]:
    """Return the judges of the page that name their kind, by kind."""
    tables = [tomllib.loads(block) for block in code_blocks(PAGE, "toml")]
    found = [judge for table in tables for judge in table.get("run", {}).get("judges", {}).values()]
    return {judge["kind"]: judge for judge in found if "kind" in judge}


def test_every_block_is_a_valid_configuration(tmp_path: Path) -> None:
    file = tmp_path / "base-rl.toml"
    blocks = code_blocks(PAGE, "toml")
    for block in blocks:
        file.write_text(block)
        load_settings(file)
        assert len(block.strip().splitlines()) <= 10 or "[providers" in block
    assert set(judges()) == {kind.value for kind in JudgeKind}


@pytest.mark.parametrize("kind", list(JudgeKind))
async def test_each_kind_gives_rewards(tmp_path: Path, kind: JudgeKind, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_checks.py").write_text("def exact(session):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with target(http(1)) as checker:
        judge = judges()[kind]
        if "model" in judge:
            judge["model"] = "local/critic"
        if "url" in judge:
            judge["url"] = f"http://127.0.0.1:{checker.port}/grade"
        judging = JudgingSettings(python_modules=("my_checks",))
        async with open_world(sqlite_database(tmp_path), judging=judging, **judge) as world:
            world.model.answers = [
                {JudgeKind.RELATIVE: by_length, JudgeKind.PAIRWISE: longer, JudgeKind.FOLLOW_UP: by_thanks}.get(
                    kind, grade(1.0)
                )
            ]
            await SESSIONS.get(kind, one)(world)
            assert "done" in await world.run_jobs()
            assert max(row.value for row in await world.rewards()) > 0


async def test_a_run_judges(tmp_path: Path) -> None:
    (block,) = [block for block in code_blocks(PAGE, "toml") if "run:" in block]
    table = tomllib.loads(block)
    (judge,), runs = table["run"]["judges"].values(), table["runs"]
    assert judge["model"] == f"run:{next(iter(runs))}"
    template = ChatTemplate.load(str(write_model(tmp_path / "model", context_length=4096)))
    async with open_judged(tmp_path, template, sqlite_database(tmp_path), answer=grade(1.0), **judge) as world:
        await world.judging.session()
        assert await world.judging.run_jobs() == ["done"]
        assert [reward.value for reward in await world.judging.rewards()] == [1.0]


async def one(world: World) -> None:
    await world.session()


async def two(world: World) -> None:
    await group(world, "a", "bbbb")


async def thanked(world: World) -> None:
    await conversation(world, "2 + 2?", "thanks")


SESSIONS = {JudgeKind.RELATIVE: two, JudgeKind.PAIRWISE: two, JudgeKind.FOLLOW_UP: thanked}
