"""A judge of one run whose model fails, workers that run its jobs, and the account of what it scored."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.accounts import Ask
from benchmarks.jobs.judge_stub import SCORE
from benchmarks.jobs.redis_server import RedisServer
from proxy.cli.addresses import random_free_port
from proxy.cli.supervisor import Part
from proxy.settings import Settings, as_environment

WORKER = "worker"
"""The part that runs jobs, where Celery carries them."""
_JUDGE = "adds"
_MODEL_MS, _FAILING_PERCENT = 20, 20
_LEASE_SECONDS = 4.0
_LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Judging:
    """`broker` is the address of a Redis; None: the proxy runs the jobs itself."""

    model: Part
    model_url: str
    broker: str | None

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the sections of the installation."""
        return {
            "providers": {"stub": {"base_url": self.model_url}},
            "jobs": {"lease_seconds": _LEASE_SECONDS, **({} if self.broker is None else {"broker": self.broker})},
        }

    def run_settings(self) -> dict[str, Any]:
        """Return the settings of the run that is judged. The scores are recorded and do not count in its rewards."""
        judge = {"kind": "rubric", "model": "stub/judge", "rubric": "Does the answer add the numbers?"}
        return {"judges": {_JUDGE: judge}, "reward_weights": {_JUDGE: 0.0}}

    def workers(self, settings: Settings, database_url: str, config_file: Path) -> list[Part]:
        """Return the worker, if a broker carries the jobs. Its connections are not those of the proxy's role."""
        if self.broker is None:
            return []
        argv = (sys.executable, "-m", "proxy.cli", "worker", "--config", str(config_file))
        env = {**as_environment(settings), "BASE_RL_DATABASE__URL": database_url}
        return [Part(name=WORKER, argv=argv, env=env)]


@contextmanager
def judging(folder: Path, *, with_workers: bool) -> Iterator[Judging]:
    """Run a Redis while the block lasts, if there are to be workers. The caller runs the judge's model and them."""
    port = random_free_port("127.0.0.1")
    arguments = (str(port), str(_MODEL_MS), str(_FAILING_PERCENT))
    model = Part(name="judge", argv=(sys.executable, "-m", "benchmarks.jobs.judge_stub", *arguments))
    url = f"http://127.0.0.1:{port}/v1"
    if not with_workers:
        yield Judging(model=model, model_url=url, broker=None)
        return
    redis = RedisServer(folder)
    redis.start()
    try:
        yield Judging(model=model, model_url=url, broker=redis.url)
    finally:
        redis.kill()


async def judgements(ask: Ask, run: str, *, patience: float) -> dict[str, int]:
    """Wait until the judge is done with all sessions that have ended by now, `patience` seconds at most, and return
    the figures. All but the first two count broken promises."""
    ended = {
        row[0]
        for row in ask(
            "SELECT sessions.id FROM sessions JOIN runs ON runs.id = run_id"
            f" WHERE runs.name = '{run}' AND ended_at IS NOT NULL AND turn_count > 0 AND erased_at IS NULL"
            " AND coalesce(outcome, '') NOT IN ('failed', 'cancelled')"
        )
    }
    until = time.monotonic() + patience
    open_ = ended - _done(ask).keys()
    while open_ and time.monotonic() < until:
        await asyncio.sleep(_LOOK_S)
        open_ -= _done(ask).keys()
    scores = ask(f"SELECT session_id, value FROM rewards WHERE source = 'judge:{_JUDGE}'")
    entries = Counter(row[0] for row in scores)
    scored = {session for session, has_score in _done(ask).items() if has_score}
    ((failures,),) = ask("SELECT count(*) FROM judgements WHERE error IS NOT NULL")
    return {
        "judged": len(entries),
        "judge_failures": int(failures),
        "unjudged": len(open_) + len(scored - entries.keys()),
        "judged_twice": sum(count > 1 for count in entries.values()),
        "wrong_scores": sum(float(row[1]) != SCORE for row in scores),
    }


def _done(ask: Ask) -> dict[str, bool]:
    """Return the sessions whose judging job is done, each with whether it has a score: some have no answer."""
    found = {}
    for key, result in ask("SELECT key, result FROM jobs WHERE kind = 'judge' AND state = 'done'"):
        value = json.loads(result) if isinstance(result, str) else result
        found[key.removeprefix(f"{_JUDGE}:")] = bool(value and value.get("scored"))
    return found
