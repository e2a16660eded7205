"""Train the runs of a plan in turns."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from threading import Condition

from trainer.assembly import RunTrainer, Shared, begin
from trainer.errors import TrainerError
from trainer.parallel.mesh import Ranks
from trainer.proxy_client import ProxyClient, RunLister
from trainer.rotation.following import Following
from trainer.rotation.plan import Plan
from trainer.rotation.roster import Roster
from trainer.rotation.turns import Turns


def train_in_turns(plan: Plan, ranks: Ranks, process: str, failed: dict[str, TrainerError]) -> None:
    """Train until interrupted, or until every run has ended by an error and no other can come. Errors are added to
    `failed` as they happen."""
    changed = Condition()
    shared = Shared(ranks.device, changed)

    def connect(name: str) -> ProxyClient:
        settings = plan.settings(name)
        return ProxyClient(settings.proxy_url, settings.api_key.get_secret_value(), settings.run)

    def begin_run(name: str, patience: float) -> RunTrainer:
        settings = plan.settings(name)
        return begin(name, settings, ranks, process, shared, patience, partial(plan.resolved, name))

    following = None
    if plan.follows and ranks.is_first:
        lister = RunLister(plan.process.proxy_url, plan.process.api_key.get_secret_value())
        following = Following(lister, changed)
    turns = Turns(Roster(plan.runs, connect, changed, following), begin_run, ranks, changed, failed)
    with ExitStack() as ending:
        ending.callback(turns.close)
        turns.run()
