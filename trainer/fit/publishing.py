"""Publishing a fitted policy as the run's next version, as the loop does, but without a claim."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from proxy.contract.claim import CommitRequest, StepReport
from proxy.contract.policy import Head
from proxy.contract.step import Fit, StepInputs
from trainer.config import TrainerSettings
from trainer.errors import ProxyRefused, Superseded
from trainer.models.policy import Policy
from trainer.models.state_dict import gather_weights
from trainer.models.trained import TRAINED, capture_trained
from trainer.parallel.mesh import Ranks
from trainer.proxy_client import ProxyClient
from trainer.publish.probe import probe_of
from trainer.publish.publisher import OLDER_TENSORS, TrainerState, WeightPublisher
from trainer.runtime.conditions import conditions


def publish(
    settings: TrainerSettings,
    ranks: Ranks,
    client: ProxyClient,
    publisher: WeightPublisher,
    head: Head,
    model: Policy,
    state: TrainerState | None,
    metrics: Mapping[str, float],
    fit: Fit,
    seed: int,
) -> Head:
    """Publish the weights and return the new head. `state` is the head's own trainer state, which stays with the new
    weights: the loop's optimiser, schedule and running means are unchanged.

    Raises Superseded if the head has changed, ProxyRefused; the written weights are then removed. If the process
    dies they are garbage, unless the commit was made; the next trainer finds out which.
    """
    if state is not None:
        state = {key: value for key, value in state.items() if key not in (TRAINED, OLDER_TENSORS)}
        state |= capture_trained(model.named_weights(), publisher.dtype)
    tensors = gather_weights(model.named_weights(), keep=True, dtype=publisher.dtype)
    staged = publisher.stage(head, tensors, state)
    if staged.save is not None:
        # At once: nobody waits for a fit, and a version that is durable before its commit needs no second step.
        staged = staged.save(0)
    report = StepReport(
        config_hash=settings.config_hash(),
        seed=seed,
        metrics=dict(metrics),
        audit=(),
        inputs=StepInputs(
            config=settings.mathematics(),
            algorithm={},
            conditions=conditions(ranks),
            trained_claim=None,
            optimizer_steps=0 if state is None else int(state["steps"]),
            fresh_optimizer=state is None,
            fit=fit,
        ),
    )
    request = CommitRequest(
        claim_ids=(),
        parent_version=head.version,
        weights=staged.weights,
        step=report,
        probe=probe_of(model, ranks.device),
    )
    try:
        reply = client.commit(request)
    except (Superseded, ProxyRefused):
        publisher.discard(staged)
        raise
    publisher.settle(staged)
    return msgspec.structs.replace(head, version=reply.version, weights=staged.weights)
