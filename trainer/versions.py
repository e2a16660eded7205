"""Versions: making the run's next one from trained weights, and resuming from the run's head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog
import torch
from torch import Tensor

from proxy.contract.claim import CommitRequest, StepReport, TrajectoryAudit
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import Head, Probe, PruneRequest
from proxy.contract.step import StepInputs, TokenAudit
from trainer.algorithm.parts import Algorithm, as_json
from trainer.algorithm.running import RunningMeans, lacks_spreads
from trainer.claims.leased import Consumption, LeasedClaims
from trainer.config import TrainerSettings
from trainer.errors import HeadMoved, ProxyRefused, ProxySilent, Superseded, TrainerError, WeightsUnusable
from trainer.models.divided import DividedWeights, PublishedWeights
from trainer.models.state_dict import whole_weights
from trainer.observe.step_metrics import consumption
from trainer.parallel.checkpoint import copied, plain_part
from trainer.parallel.mesh import Ranks
from trainer.proxy_client import ProxyClient
from trainer.publish.pending import Committed, Pending, ignored, may_be_behind
from trainer.publish.probe import probe_of
from trainer.publish.publisher import OLDER_TENSORS, Staged, TrainerState, WeightPublisher
from trainer.publish.shards import MEGABYTE
from trainer.runtime.conditions import conditions
from trainer.update import Learner

_STATE_FORMAT = 2
# A prime, so that runs with neighbouring seeds do not repeat each other's seeds at other versions.
_SEED_STRIDE = 1_000_003

# `base-rl up` and `train` kill a trainer 1.5 seconds after their signal, and its claims are released after this wait.
# A version that is not committed by then is made again.
_CLOSE_SECONDS = 0.75

_log = structlog.get_logger("trainer")


class Versions:
    """Publishes versions and resumes from them. Every rank calls the same methods; only the first talks to the proxy
    and changes directories."""

    def __init__(
        self,
        settings: TrainerSettings,
        algorithm: Algorithm,
        ranks: Ranks,
        client: ProxyClient,
        claims: LeasedClaims,
        publisher: WeightPublisher,
        learner: Learner,
    ) -> None:
        self._settings = settings
        self._algorithm = algorithm
        self._ranks = ranks
        self._client = client
        self._claims = claims
        self.publisher = publisher
        self._learner = learner
        self._may_be_behind = may_be_behind(settings, ranks)
        self._knows_numbers = False
        self._pending: Pending | None = None
        self._copies: Mapping[str, Tensor] = {}
        """The last version's weights, whose memory the next one's copies use."""
        self._state_copies: TrainerState = {}
        """The last copied trainer state, whose memory the next one's copies use."""
        self._has_older_optimizer = False
        """Whether the optimiser's state is that of an earlier version than the weights."""
        self._fresh = True
        """Whether the optimiser began anew with the current weights, without a trainer state."""

    def resume(self) -> tuple[Head, RunningMeans]:
        """Load the head's weights, optimiser and schedule; return the head with its running means.

        Held claims are given back, and directories that earlier trainers did not commit are removed. Raises
        ProxyRefused, WeightsUnusable.
        """
        # Before the head is asked for: the version behind may still become the head.
        if self._pending is not None:
            with suppress(TrainerError):
                self._pending.finish()
            self._pending = None
        self._knows_numbers = False
        self._ranks.from_first(self._claims.give_back)
        head = self._ranks.from_first(self._head_on_disk)
        garbage = self._ranks.from_first(lambda: self.publisher.collect(head))
        state = self.publisher.restore(head, self._learner.model, self._learner.divided())
        if head.version == 0 and head.weights is not None:
            _log.info("the run begins from another run's version, with a fresh optimiser", weights=head.weights.uri)
        elif state is None and head.weights is not None:
            _log.warning("no trainer state was kept for the head: the optimiser starts fresh", version=head.version)
        check_format(state, head)
        self._learner.restore(state)
        self._fresh = state is None
        self._has_older_optimizer = state is not None and OLDER_TENSORS in state
        if self._has_older_optimizer:
            _log.info("the head has no optimiser state: that of an earlier version is used", version=head.version)
        means = means_of(state, self._algorithm)
        if state is not None and lacks_spreads(state["means"]):
            _log.warning("the trainer state has no spread of rewards: it is estimated anew", version=head.version)
        _log.info("training from", version=head.version, optimizer_steps=self._learner.steps, removed=garbage)
        return head, means

    def _head_on_disk(self) -> Head:
        """Return the head. One that another trainer has left in memory is taken back first: its claims were never
        consumed, and its trainer state is lost."""
        head = self._client.head()
        if head.is_saved:
            return head
        _log.warning("the head is not on the disk, so it is taken back", version=head.version)
        return self._client.take_back()

    def seed(self, head: Head) -> int:
        """Return the seed of the step that follows `head`. It depends on the version alone, so a step can be
        replayed without the state of a random generator."""
        return (self._settings.seed * _SEED_STRIDE + head.version) % (1 << 31)

    def make(
        self,
        head: Head,
        means: RunningMeans,
        claim_id: ClaimId | None,
        audits: Sequence[TrajectoryAudit],
        metrics: Mapping[str, float],
        tokens: Sequence[TokenAudit],
        committed: Committed = ignored,
    ) -> Head:
        """Publish the current weights and commit them as the successor of `head`, consuming `claim_id` and all kept
        claims. `committed` is called with the version's number and all of its metrics once it is committed.

        The version before is waited for first. If this one is written behind the next step, the returned head has its
        number and no weights yet, and `settled` or the next `make` reports its commit. Raises Superseded if the proxy
        refuses the commit of either; the written weights are then removed.
        """
        head = self._finished(head)
        # A number may have been used by a version that was withdrawn, so the first commit's answer is waited for.
        # From then on the head is the newest version, and its successor's number is known.
        behind = self._may_be_behind and self._knows_numbers
        dtype = self.publisher.dtype
        due = self._ranks.from_first(lambda: self.publisher.is_state_due(head))
        tensors = self._weights(dtype)
        probe = probe_of(self._learner.model, self._ranks.device)
        state = state_after(self._learner, means, dtype)
        if behind:
            # The version before is written by now, so the copies of its state are free again.
            state = copied(state, self._state_copies) if due else plain_part(state)
            self._state_copies = state if due else self._state_copies
        consumed = self._ranks.from_first(lambda: self._claims.begin_commit(claim_id, audits))
        metrics = {**metrics, **consumption(consumed.audits)}
        step = StepReport(
            config_hash=self._settings.config_hash(),
            seed=self.seed(head),
            metrics=metrics,
            audit=consumed.audits,
            tokens=tuple(tokens),
            inputs=self._inputs(claim_id, consumed),
        )

        def publish() -> Head:
            staged = self.publisher.stage(head, tensors, state, with_tensors=due)
            made, engines = self._ranks.from_first(lambda: self._commit(head, staged, consumed, step, probe))
            if staged.save is not None:
                staged = self._save(made.version, staged, partial(staged.save, engines))
                made = msgspec.structs.replace(made, weights=staged.weights)
            self._ranks.from_first(lambda: self._settle(staged, consumed))
            self._ranks.from_first(lambda: self._remove_old(made))
            return made

        self._fresh = self._has_older_optimizer = False
        provisional = msgspec.structs.replace(head, version=head.version + 1, weights=None)
        self._pending = Pending(provisional.version, lambda made: committed(made, metrics), publish, behind=behind)
        if behind:
            return provisional
        self._knows_numbers = True
        return self._finished(head)

    def _weights(self, dtype: torch.dtype | None) -> PublishedWeights:
        """Return copies of the current weights. Several ranks publish before the next step, so theirs are not copied
        but gathered one at a time while they are written."""
        named = self._learner.model.named_weights()
        if self._ranks.size > 1:
            return DividedWeights(named, self._ranks, dtype)
        # The version before is written by now, so its copies are free again.
        copies = whole_weights(named, self._ranks, dtype, self._copies)
        self._copies = {} if self.publisher.keeps_weights else copies
        return copies

    def _inputs(self, claim_id: ClaimId | None, consumed: Consumption) -> StepInputs:
        dtype, weights = self.publisher.dtype, self._settings.weights
        return StepInputs(
            config=self._settings.mathematics(),
            algorithm=as_json(self._algorithm),
            conditions=conditions(self._ranks),
            trained_claim=claim_id,
            optimizer_steps=self._learner.steps if claim_id is None else self._learner.steps_before,
            fresh_optimizer=self._fresh,
            older_optimizer=self._has_older_optimizer,
            taken_together=consumed.taken_together,
            weights_dtype="float32" if dtype is None else str(dtype).removeprefix("torch."),
            shard_bytes=weights.shard_megabytes * MEGABYTE,
        )

    def _commit(
        self, head: Head, staged: Staged, consumed: Consumption, step: StepReport, probe: Probe | None
    ) -> tuple[Head, int]:
        """Commit the version. Return the new head, and the number of engines that will ask for an offered version."""
        try:
            self._claims.check_held(consumed.claim_ids)
            reply = self._client.commit(
                CommitRequest(
                    claim_ids=consumed.claim_ids,
                    parent_version=head.version,
                    weights=staged.weights,
                    step=step,
                    probe=probe,
                    is_saved=staged.save is None,
                    offer=staged.offer,
                )
            )
        except Superseded:
            self.publisher.discard(staged)
            raise
        return msgspec.structs.replace(head, version=reply.version, weights=staged.weights), reply.engines

    def _save(self, version: int, staged: Staged, save: Callable[[], Staged]) -> Staged:
        """Make a committed version durable and report it. A collective.

        Raises Superseded if the version was taken back meanwhile, WeightsUnusable if the disk refuses it; the version
        is then taken back.
        """
        try:
            saved = save()
        except WeightsUnusable:
            # Engines return to a version that survives a restart. If the proxy is silent, the next trainer does this.
            with suppress(TrainerError):
                self._ranks.from_first(self._client.take_back)
            self._ranks.from_first(lambda: self.publisher.discard(staged))
            raise

        def report() -> None:
            try:
                self._client.saved(version, saved.weights)
            except Superseded:
                self.publisher.discard(saved)
                raise

        self._ranks.from_first(report)
        return saved

    def _settle(self, staged: Staged, consumed: Consumption) -> None:
        # Only now: if the process dies before this line, the next trainer settles the head.
        self.publisher.settle(staged)
        self._claims.consumed(consumed.claim_ids)

    def settled(self, head: Head) -> Head:
        """Return the head, which has its weights if the version behind has been committed. Never waits.

        Raises Superseded if its commit was refused, and the other errors of publishing."""
        return self._finished(head) if self._pending is not None and self._pending.is_done else head

    def close(self) -> None:
        """Wait a while for the version that is being written, so that a step is not lost when the trainer ends."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with suppress(TrainerError, TimeoutError):
                pending.finish(_CLOSE_SECONDS)

    def _finished(self, head: Head) -> Head:
        pending, self._pending = self._pending, None
        if pending is None:
            return head
        made = pending.finish()
        if pending.is_behind and made.version != pending.version:
            raise HeadMoved(f"the version was committed as {made.version}, not {pending.version}")
        return made

    def _remove_old(self, head: Head) -> None:
        """Delete old weights that need not be kept. A failure is logged, and the next version tries again."""
        keep = self._settings.weights.keep_versions
        present = self.publisher.removable(head) if keep is not None else ()
        if keep is None or not present:
            return
        try:
            every = self._settings.weights.keep_every
            reply = self._client.prune(PruneRequest(keep=keep, present=present, keep_every=every))
        except (ProxySilent, ProxyRefused) as error:
            _log.warning("old weights not removed, trying again after the next version", reason=str(error))
            return
        self.publisher.remove(reply.remove)
        if reply.remove:
            _log.info("old weights removed", directories=[Path(uri).name for uri in reply.remove])


def state_after(learner: Learner, means: RunningMeans, published: torch.dtype | None = None) -> TrainerState:
    """Return this rank's part of the state that the next step depends on besides the weights `published` in a dtype,
    without copies."""
    return {
        "format": _STATE_FORMAT,
        "means": means.as_json(),
        **learner.capture(published),
    }


def means_of(state: TrainerState | None, algorithm: Algorithm) -> RunningMeans:
    """Return the running estimates of rewards that a trainer state holds; fresh ones without a state.

    Raise WeightsUnusable for a state that holds something else.
    """
    if state is None:
        return RunningMeans.fresh(algorithm.running_mean_decay)
    return RunningMeans.from_json(algorithm.running_mean_decay, state["means"])


def check_format(state: TrainerState | None, head: Head) -> None:
    """Raise WeightsUnusable for a trainer state of another format than this trainer writes."""
    if state is not None and state.get("format") != _STATE_FORMAT:
        raise WeightsUnusable(
            f"version {head.version}: its trainer state is of format {state.get('format')!r}, and this trainer reads"
            f" {_STATE_FORMAT}"
        )
