"""Assembly of everything that trains one run, from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Condition

import torch

from proxy.contract.policy import Head
from trainer.algorithm.overlong import bounded
from trainer.algorithm.presets import resolve
from trainer.claims.filling import BatchSource
from trainer.claims.leased import LeasedClaims, take_over
from trainer.claims.leases import LeaseKeeper
from trainer.claims.prefetch import BatchPrefetcher
from trainer.claims.presence import Presence
from trainer.config import TrainerSettings
from trainer.loading import Residents, load_critic, load_learnt, reference_of
from trainer.loop import TrainingLoop
from trainer.models.adapters import AdaptedPolicy
from trainer.models.huggingface import resolve_directory
from trainer.models.policy import Policy
from trainer.observe.instruments import Instruments
from trainer.observe.step_report import StepReporter
from trainer.observe.tracing import Profiler
from trainer.observe.watch import GradientWatch
from trainer.parallel.layout import layout_of
from trainer.parallel.mesh import Ranks
from trainer.proxy_client import ProxyClient
from trainer.publish.accepted import Accepted
from trainer.publish.transports import publisher_of
from trainer.runtime.memory import MicroBatchMemory
from trainer.runtime.restarts import Restarts
from trainer.teacher import Teacher
from trainer.update import Learner
from trainer.versions import Versions


class Shared:
    """Parts that the runs of a process share: the profiler, and base models under adapters.

    `changed` is notified when one of several runs has a batch; None if the process trains a single run.
    """

    def __init__(self, device: torch.device, changed: Condition | None = None) -> None:
        self.profiler = Profiler(device)
        self.changed = changed
        self.residents = Residents()


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The connection of a run to its proxy, and the claims that it has leased there."""

    client: ProxyClient
    leases: LeaseKeeper
    claims: LeasedClaims
    accepted: Accepted


@dataclass(frozen=True, kw_only=True)
class RunTrainer:
    """One run that can be trained. Closing `ending` releases everything that it holds outside the process."""

    name: str
    weight: float
    loop: TrainingLoop
    model: Policy
    learner: Learner
    connection: Connection
    instruments: Instruments
    teacher: Teacher | None
    prefetcher: BatchPrefetcher | None
    ending: ExitStack


def begin(
    name: str,
    settings: TrainerSettings,
    ranks: Ranks,
    process: str,
    shared: Shared,
    patience: float | None = None,
    resolve: Callable[[Head], TrainerSettings] | None = None,
) -> RunTrainer:
    """Return a run that is ready to resume from its head. It is announced to other trainers on this machine, and the
    claims of dead ones have been given back.

    `settings` say how to reach the proxy, and `resolve` returns the complete settings once the head is known; without
    it, `settings` are complete. `patience` bounds in seconds how long its proxy and its teacher are waited for. A
    collective; raises TrainerError on every rank, after everything has been closed again.
    """
    ending = ExitStack()
    with ExitStack() as undone:
        undone.callback(ending.close)
        client = ProxyClient(settings.proxy_url, settings.api_key.get_secret_value(), settings.run)
        # Closed here as well, because the head may be refused before `connect` takes the client over.
        ending.callback(client.close)
        client.patience = patience
        head = ranks.from_first(client.head)
        if resolve is not None:
            settings = resolve(head)
        connection = connect(client, settings, process, ending)
        connection.accepted.check(head)
        presence = Presence(settings.weights.directory / head.run_id / ".trainers", process)
        ending.callback(presence.leave)
        # Closed in reverse order: claims are released before the presence ends, by which others judge them dead.
        if ranks.is_first:
            ending.callback(connection.claims.leave)
        ranks.from_first(lambda: take_over(presence, client))
        assembled = assemble(name, settings, ranks, connection, head, shared, ending)
        if (teacher := assembled.teacher) is not None:
            teacher.patience = patience
            ranks.from_first(lambda: teacher.check(resolve_directory(head.base_model)))
        # Complete: from now on the caller closes `ending`.
        undone.pop_all()
    return assembled


def connect(client: ProxyClient, settings: TrainerSettings, process: str, ending: ExitStack) -> Connection:
    ending.callback(client.close)
    leases = LeaseKeeper(client)
    ending.callback(leases.stop)
    accepted = Accepted(settings)
    return Connection(
        client=client,
        leases=leases,
        claims=LeasedClaims(client, leases, settings.batch, settings.name, process, accepted),
        accepted=accepted,
    )


def assemble(
    name: str,
    settings: TrainerSettings,
    ranks: Ranks,
    connection: Connection,
    head: Head,
    shared: Shared,
    ending: ExitStack,
) -> RunTrainer:
    """Build all parts of a run except its connection and its presence."""
    ranks = ranks.arranged(layout_of(settings))
    algorithm = bounded(resolve(settings.algorithm), head.max_new_tokens, head.context_length)
    base = resolve_directory(head.base_model)
    model = load_learnt(base, settings, ranks, shared.residents)
    if isinstance(model, AdaptedPolicy):
        ending.callback(shared.residents.remove, model)
    reference = reference_of(model, base, settings, ranks) if algorithm.has_reference else None
    critic = load_critic(base, settings, ranks) if algorithm.has_critic else None
    learner = Learner(model, algorithm, settings.optimizer, ranks, reference, critic)
    teacher = Teacher(settings.teacher) if algorithm.has_teacher else None
    if teacher is not None:
        ending.callback(teacher.close)
    instruments = Instruments(settings, algorithm, ranks, base, head, shared.profiler)
    ending.callback(instruments.close)
    publisher = publisher_of(settings.weights, base, model, ranks, proxy_url=settings.proxy_url)
    ending.callback(publisher.close)
    versions = Versions(settings, algorithm, ranks, connection.client, connection.claims, publisher, learner)
    ending.callback(versions.close)
    source = BatchSource(connection.claims, settings.batch, algorithm, model.vocabulary, head.max_new_tokens)
    prefetcher = None
    if shared.changed is not None:
        prefetcher = BatchPrefetcher(connection.claims, source, shared.changed)
        ending.callback(prefetcher.stop)
    memory = MicroBatchMemory(settings.batch, ranks, Restarts.of_launcher(), head.run_id)
    loop = TrainingLoop(
        algorithm=algorithm,
        ranks=ranks,
        take=source.take if prefetcher is None else prefetcher.take,
        prepare=source.prepare,
        claims=connection.claims,
        learner=learner,
        teacher=teacher,
        versions=versions,
        memory=memory,
        reporter=StepReporter(settings, algorithm, ranks, connection.claims, memory, instruments),
        gradients=GradientWatch(ranks, connection.claims, settings.optimizer.pause_after),
    )
    return RunTrainer(
        name=name,
        weight=settings.weight,
        loop=loop,
        model=model,
        learner=learner,
        connection=connection,
        instruments=instruments,
        teacher=teacher,
        prefetcher=prefetcher,
        ending=ending,
    )
