"""The models of replayed steps, loaded once for all steps that are built alike."""

from __future__ import annotations

from proxy.contract.policy import Head
from trainer.config import TrainerSettings
from trainer.loading import load_critic, load_learnt, reference_of
from trainer.models.adapters import AdaptedPolicy
from trainer.models.huggingface import resolve_directory
from trainer.models.policy import Policy, Scorer
from trainer.models.state_dict import put_weights, whole_weights
from trainer.models.value import ValueModel
from trainer.parallel.mesh import Ranks


class ReplayModels:
    """Keeps the last policy, reference and critic, because loading one takes longer than most steps."""

    def __init__(self, ranks: Ranks) -> None:
        self._policy: Policy | None = None
        self._policy_key: tuple[object, ...] = ()
        self._policy_ranks = ranks
        self._reference: Scorer | None = None
        self._reference_key: tuple[object, ...] = ()
        self._critic: ValueModel | None = None
        self._critic_key: tuple[object, ...] = ()

    def policy(self, head: Head, settings: TrainerSettings, ranks: Ranks) -> Policy:
        """Return a model of this build. One of another build gets the weights of the model before it."""
        key = (head.base_model, *_build(settings), settings.activation_checkpointing)
        if self._policy is None or key != self._policy_key:
            before = None if self._policy is None else whole_weights(self._policy.named_weights(), self._policy_ranks)
            model = load_learnt(resolve_directory(head.base_model), settings, ranks)
            if before is not None:
                tensors = ranks.from_first(lambda: before)
                put_weights(model.named_weights(), tensors, "the step before")
            self._policy, self._policy_key, self._policy_ranks = model, key, ranks
        return self._policy

    def reference(self, head: Head, settings: TrainerSettings, policy: Policy, ranks: Ranks) -> Scorer:
        # A reference that follows the policy has weights of its own, which are part of each step's state.
        if settings.reference.follows:
            return reference_of(policy, resolve_directory(head.base_model), settings, ranks)
        if isinstance(policy, AdaptedPolicy):
            return policy.adapters.base
        key = (head.base_model, *_build(settings))
        if self._reference is None or key != self._reference_key:
            base = resolve_directory(head.base_model)
            self._reference, self._reference_key = reference_of(policy, base, settings, ranks), key
        return self._reference

    def critic(self, head: Head, settings: TrainerSettings, ranks: Ranks) -> ValueModel:
        """Return a value model of this build. Its weights are part of the trainer state, so any will do."""
        key = (head.base_model, settings.precision, settings.activation_checkpointing)
        if self._critic is None or key != self._critic_key:
            base = resolve_directory(head.base_model)
            self._critic, self._critic_key = load_critic(base, settings, ranks), key
        return self._critic


def _build(settings: TrainerSettings) -> tuple[object, ...]:
    """Return the settings that a model in memory depends on."""
    build = settings.backend, settings.layout, settings.pipeline_schedule, settings.precision, settings.head_precision
    return *build, settings.adapter, settings.offload, settings.algorithm.learns_entropy
