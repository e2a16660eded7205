"""Versions: making the run's next one from trained weights, and resuming from the run's head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from proxy.contract.claim import CommitRequest, StepReport, TrajectoryAudit
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import Head, PruneRequest
from proxy.contract.step import StepInputs, TokenAudit
from trainer.algorithm.parts import Algorithm, as_json
from trainer.algorithm.running import RunningMeans, lacks_spreads
from trainer.claims.leased import LeasedClaims
from trainer.config import TrainerSettings
from trainer.errors import ProxyRefused, ProxySilent, Superseded, WeightsUnusable
from trainer.models.state_dict import whole_weights
from trainer.observe.step_metrics import consumption
from trainer.parallel.mesh import Ranks
from trainer.proxy_client import ProxyClient
from trainer.publish.probe import probe_of
from trainer.publish.publisher import TrainerState, WeightPublisher
from trainer.runtime.conditions import conditions
from trainer.update import Learner

_STATE_FORMAT = 2
# A prime, so that runs with neighbouring seeds do not repeat each other's seeds at other versions.
_SEED_STRIDE = 1_000_003

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
        self.committed_metrics: dict[str, float] = {}
        """The metrics of the last commit; empty on all ranks but the first."""
        self._fresh = True
        """Whether the optimiser began anew with the current weights, without a trainer state."""

    def resume(self) -> tuple[Head, RunningMeans]:
        """Load the head's weights, optimiser and schedule; return the head with its running means.

        Held claims are given back, and directories that earlier trainers did not commit are removed. Raises
        ProxyRefused, WeightsUnusable.
        """
        self._ranks.from_first(self._claims.give_back)
        head = self._ranks.from_first(self._client.head)
        garbage = self._ranks.from_first(lambda: self.publisher.collect(head))
        state = self.publisher.restore(head, self._learner.model, self._learner.divided())
        if head.version == 0 and head.weights is not None:
            _log.info("the run begins from another run's version, with a fresh optimiser", weights=head.weights.uri)
        elif state is None and head.weights is not None:
            _log.warning("no trainer state was kept for the head: the optimiser starts fresh", version=head.version)
        check_format(state, head)
        self._learner.restore(state)
        self._fresh = state is None
        means = means_of(state, self._algorithm)
        if state is not None and lacks_spreads(state["means"]):
            _log.warning("the trainer state has no spread of rewards: it is estimated anew", version=head.version)
        _log.info("training from", version=head.version, optimizer_steps=self._learner.steps, removed=garbage)
        return head, means

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
    ) -> Head:
        """Publish the current weights and commit them as the successor of `head`, consuming `claim_id` and all kept
        claims. Raises Superseded if the proxy refuses the commit; the written weights are then removed."""
        tensors = whole_weights(self._learner.model.named_weights(), self._ranks)
        probe = probe_of(self._learner.model, self._ranks.device)
        state = state_after(self._learner, means)
        inputs = StepInputs(
            config=self._settings.mathematics(),
            algorithm=as_json(self._algorithm),
            conditions=conditions(self._ranks),
            trained_claim=claim_id,
            optimizer_steps=self._learner.steps if claim_id is None else self._learner.steps_before,
            fresh_optimizer=self._fresh,
        )
        # Before the weights are written, which takes long, and again at the commit.
        self._ranks.from_first(lambda: self._claims.check(claim_id))
        staged = self.publisher.stage(head, tensors, state)

        def commit() -> Head:
            try:
                claim_ids, consumed = self._claims.to_commit(claim_id, audits)
                together = self._claims.taken_together()
                self.committed_metrics = {**metrics, **consumption(consumed)}
                report = StepReport(
                    config_hash=self._settings.config_hash(),
                    seed=self.seed(head),
                    metrics=self.committed_metrics,
                    audit=consumed,
                    tokens=tuple(tokens),
                    inputs=msgspec.structs.replace(inputs, taken_together=together),
                )
                reply = self._client.commit(
                    CommitRequest(
                        claim_ids=claim_ids,
                        parent_version=head.version,
                        weights=staged.weights,
                        step=report,
                        probe=probe,
                    )
                )
            except Superseded:
                self.publisher.discard(staged)
                raise
            # Settled only now: if the process dies before this line, the next trainer settles the head.
            self.publisher.settle(staged)
            self._claims.consumed(claim_ids)
            return msgspec.structs.replace(head, version=reply.version, weights=staged.weights)

        made = self._ranks.from_first(commit)
        self._fresh = False
        self._ranks.from_first(lambda: self._remove_old(made))
        return made

    def _remove_old(self, head: Head) -> None:
        """Delete old weights that need not be kept. A failure is logged, and the next version tries again."""
        keep = self._settings.weights.keep_versions
        present = self.publisher.removable(head) if keep is not None else ()
        if keep is None or not present:
            return
        try:
            reply = self._client.prune(PruneRequest(keep=keep, present=present))
        except (ProxySilent, ProxyRefused) as error:
            _log.warning("old weights not removed, trying again after the next version", reason=str(error))
            return
        self.publisher.remove(reply.remove)
        if reply.remove:
            _log.info("old weights removed", directories=[Path(uri).name for uri in reply.remove])


def state_after(learner: Learner, means: RunningMeans) -> TrainerState:
    """Return this rank's part of the state that the next step depends on besides the weights, without copies."""
    return {
        "format": _STATE_FORMAT,
        "means": means.as_json(),
        **learner.capture(),
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
