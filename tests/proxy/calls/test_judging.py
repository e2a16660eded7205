"""Judges whose model is a run: answered below the agents' calls, and recorded nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from proxy.contract.policy import weight_label
from proxy.database.tables import RunRow
from proxy.engines.fair_queue import FairShare
from proxy.errors import EngineFailed, EngineUnavailable
from proxy.jobs.kinds import JobRefused
from proxy.judges.models import JudgeModels
from proxy.projects.service import ensure_project
from proxy.settings import ConfigurationError, JudgeSettings, load_settings
from proxy.tokens.template import ChatTemplate
from tests.fakes.engine import FakeEngine
from tests.proxy.calls.judged import JudgedWorld, open_judged
from tests.proxy.calls.world import until
from tests.proxy.tokens.models import write_model

Opened = Callable[..., AbstractAsyncContextManager[JudgedWorld]]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """A model whose context holds the instructions of a judge."""
    return ChatTemplate.load(str(write_model(tmp_path_factory.mktemp("judge"), context_length=4096)))


@pytest.fixture
def judged(database_url: str, tmp_path: Path, template: ChatTemplate) -> Opened:
    return partial(open_judged, tmp_path, template, database_url)


async def rows(world: JudgedWorld) -> tuple[int, int]:
    """Return the numbers of sessions and turns."""
    return len(await world.calls.sessions()), len(await world.calls.turns())


async def test_a_run_judges_and_nothing_of_it_is_recorded(judged: Opened) -> None:
    async with judged(tokens_per_day=10) as world:
        await world.judging.session("What is 2 + 2?")
        before = await rows(world)
        assert await world.judging.run_jobs() == ["done"]
        (reward,) = await world.judging.rewards()
        assert (reward.value, reward.source, reward.comment) == (0.75, "judge:taste", "right, and short")
        assert await rows(world) == before
        (request,) = world.engine.requests
        assert request.sampling.constraint is not None
        assert request.sampling.max_new_tokens == 1024
        assert "What is 2 + 2?" in world.prompt()
        (judgement,) = await world.judging.judgements()
        assert judgement.prompt_tokens == len(request.input_ids)
        assert judgement.completion_tokens == len(world.engine.script(request))
        # Its tokens are more than the judge may use in a day.
        await world.judging.session("And 3 + 3?")
        assert await world.judging.run_jobs() == ["postponed"]
        assert len(world.engine.requests) == 1


async def test_an_engine_without_grammars_is_asked_for_text(judged: Opened) -> None:
    async with judged(answer="Right.\nScore: 1") as world:
        world.engine.grammar_backend = "none"
        await world.judging.session()
        assert await world.judging.run_jobs() == ["done"]
        assert [reward.value for reward in await world.judging.rewards()] == [1.0]
        assert [request.sampling.constraint for request in world.engine.requests] == [None]


async def test_an_older_version_judges_if_it_is_named(judged: Opened) -> None:
    async with judged(model="run:critic@3") as world:
        fixed = FakeEngine(world.engine.script, label=weight_label(world.critic.id, 3))
        world.calls.swaps.older[3] = fixed
        await world.judging.session()
        assert await world.judging.run_jobs() == ["done"]
        assert (len(world.engine.requests), len(fixed.requests)) == (0, 1)


async def archive(world: JudgedWorld) -> None:
    statement = update(RunRow).where(RunRow.id == world.critic.id).values(state="archived")
    await world.judging.store.database.commit(lambda connection: connection.execute(statement))


async def move(world: JudgedWorld) -> None:
    """Move the critic into another project."""

    def work(connection: Any) -> None:
        project = ensure_project(connection, "theirs", now=1.0)
        connection.execute(update(RunRow).where(RunRow.id == world.critic.id).values(project_id=project))

    await world.judging.store.database.commit(work)


async def nothing(_: JudgedWorld) -> None:
    return


@pytest.mark.parametrize(
    ("judge", "change", "message"),
    [
        ({"model": "run:nobody"}, nothing, "no run called 'nobody'"),
        ({}, archive, "archived"),
        ({}, move, "no run called 'critic'"),
        ({"model": "run:critic@7"}, nothing, "version 7 of the run 'critic' cannot be served"),
        ({"max_characters": 100_000}, nothing, "prompt is too long"),
    ],
)
async def test_runs_that_cannot_be_asked_are_refused_with_the_reason(
    judged: Opened, judge: dict[str, Any], change: Callable[[JudgedWorld], Any], message: str
) -> None:
    async with judged(**judge) as world:
        await change(world)
        await world.judging.session("long " * 20_000 if judge.get("max_characters") else "2 + 2?")
        assert await world.judging.run_jobs() == ["dead"]
        (job,) = await world.judging.jobs()
        assert message in job.error
        assert "retry the job" in job.error
        assert not await world.judging.rewards()
        assert not world.engine.requests


async def test_calls_take_the_engine_from_judges_which_begin_again(judged: Opened) -> None:
    async with judged() as world:
        load = world.calls.swaps.place_at(world.engine).load
        world.engine.gate.clear()
        await world.judging.session()
        jobs = asyncio.create_task(world.judging.run_jobs())
        await world.engine.held.wait()
        (first,) = world.engine.requests
        async with load.slots.slot(FairShare("run_agents", 1.0)):  # at once: it waits for no judge
            await until(lambda: first.request_id in world.engine.aborted)
            world.engine.gate.set()
            assert not jobs.done()
        assert await jobs == ["done"]
        assert len({request.request_id for request in world.engine.requests}) == 2
        assert load.calls == 0
        (judgement,) = await world.judging.judgements()
        assert judgement.prompt_tokens == len(first.input_ids), "the aborted generation costs nothing"


@pytest.mark.parametrize("busy_share", [0.0, 0.5])
async def test_while_calls_hold_the_engine_judging_waits_and_loses_no_attempt(
    judged: Opened, busy_share: float
) -> None:
    async with judged(timeout_seconds=0.2, busy_share=busy_share) as world:
        load = world.calls.swaps.place_at(world.engine).load
        await world.judging.session()
        async with load.slots.slot(FairShare("run_agents", 1.0)):
            ended = await world.judging.run_jobs()
        assert ended == ["done" if busy_share else "postponed"]
        (job,) = await world.judging.jobs()
        assert ("no engine of run:critic had spare capacity" in (job.error or "")) == (not busy_share)
        assert len(await world.judging.judgements()) == (1 if busy_share else 0)


@pytest.mark.parametrize("case", ["slow", "down", "broken", "unserved", "lies"])
async def test_failures_of_the_engine_are_tried_again(judged: Opened, case: str) -> None:
    async with judged(timeout_seconds=0.2 if case == "slow" else 60) as world:
        if case == "slow":
            world.engine.gate.clear()
        elif case == "unserved":
            world.calls.swaps.version = None
        elif case == "lies":
            world.engine.label = "somebody else's"
        else:
            world.engine.error = EngineUnavailable("it is down") if case == "down" else EngineFailed("it broke")
        await world.judging.session()
        waits = case in ("down", "unserved")
        assert await world.judging.run_jobs() == ["postponed" if waits else "failed"]
        assert not await world.judging.rewards()
        assert world.calls.swaps.rechecks == (case == "down")
        assert world.calls.swaps.place_at(world.engine).load.calls == 0
        assert await rows(world) == (1, 1)


def test_a_process_without_engines_refuses_and_says_what_to_do() -> None:
    judge = JudgeSettings(model="run:critic", rubric="right")
    with pytest.raises(JobRefused, match=r"base-rl worker` has no engines: leave out \[jobs\] broker"):
        JudgeModels({}).check(judge)


def test_a_run_does_not_inherit_the_judge_that_asks_it(tmp_path: Path) -> None:
    file = tmp_path / "base-rl.toml"
    judges = ""
    for name, model in (("own", "run:critic@0"), ("other", "run:second")):
        judges += f'[run.judges.{name}]\nmodel = "{model}"\nrubric = "right"\n'
    file.write_text(f'[run]\nname = "shop"\n{judges}[runs.critic]\n')
    settings = load_settings(file)
    assert [list(run.judges) for run in settings.declared_runs] == [["own", "other"], ["other"]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            '[run]\nname = "shop"\n[run.judges.taste]\nmodel = "run:shop@0"',
            "judges: taste.model is the run that it judges",
        ),
        ('[jobs]\nbroker = "redis://127.0.0.1/0"\n[run.judges.taste]\nmodel = "run:critic"', "leave out jobs.broker"),
        ('[run.judges.taste]\nmodel = "run:critic@latest"', "judges.taste.model"),
    ],
)
def test_configurations_that_could_never_judge_are_refused(tmp_path: Path, lines: str, message: str) -> None:
    file = tmp_path / "base-rl.toml"
    file.write_text(f'{lines}\nrubric = "right"\n')
    with pytest.raises(ConfigurationError, match=message):
        load_settings(file)
