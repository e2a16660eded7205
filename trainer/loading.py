"""Load models onto the ranks: policies, adapters, references and critics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar, cast

import structlog
import torch

from trainer.algorithm.logprobs import exact_token_logprobs, token_logprobs
from trainer.compiling import why_not
from trainer.config import AdapterSettings, Attention, Packing, PipelineSchedule, Precision, TrainerSettings
from trainer.errors import ConfigurationError, UnsupportedModel, WeightsUnusable
from trainer.models.adapters import AdaptedPolicy, Adapters, BasePolicy, slot_key
from trainer.models.archon.model import ArchonModel, Block
from trainer.models.archon.weights import archon_skeleton, archon_stand_in, load_archon
from trainer.models.attention import of_packed_rows
from trainer.models.huggingface import (
    PolicyModel,
    TokenLogprobs,
    load_policy,
    policy_skeleton,
    policy_stand_in,
)
from trainer.models.kernels import take_blocks
from trainer.models.policy import Policy
from trainer.models.skeleton import furnish, has_skeleton, is_skeleton
from trainer.models.state_dict import load_weights
from trainer.models.value import ValueModel, load_value
from trainer.parallel.mesh import Ranks
from trainer.parallel.tensor import NamedWeights
from trainer.reference import FollowingReference

_log = structlog.get_logger("trainer")

_Model = TypeVar("_Model", PolicyModel, ValueModel)

_ONLY = "policy"


class Residents:
    """Base models that the adapters of several runs of a process share. A base is freed with its last adapter."""

    def __init__(self) -> None:
        self._bases: dict[tuple[object, ...], Adapters] = {}
        self._names = count()

    def adapter(self, directory: Path, settings: TrainerSettings, ranks: Ranks) -> AdaptedPolicy:
        """Return a new adapter over the base model of a directory, which is loaded for the first one. A collective.

        Raises UnsupportedModel, and ConfigurationError if the adapter does not fit the model.
        """
        shape = _shape_of(settings)
        name = f"{_ONLY}{next(self._names)}"
        key = _base_key(directory, settings, ranks)
        if key in self._bases:
            return self._bases[key].add(name, shape, settings.seed)
        self._bases[key] = load_adapters(directory, settings, ranks, {name: shape})
        return self._bases[key][name]

    def remove(self, policy: AdaptedPolicy) -> None:
        """Free an adapter that is no longer trained."""
        policy.adapters.remove(policy.name)
        self._bases = {key: base for key, base in self._bases.items() if list(base)}


def _base_key(directory: Path, settings: TrainerSettings, ranks: Ranks) -> tuple[object, ...]:
    """Return everything that a base model in memory depends on. A divided model accepts no slots for adapters of
    further shapes, so there the shape is part of it."""
    divided = ranks.size > 1 or settings.offload
    return (
        directory.resolve(),
        settings.precision,
        settings.head_precision,
        settings.activation_checkpointing,
        settings.attention,
        settings.batch.packing,
        settings.algorithm.learns_entropy,
        settings.offload,
        slot_key(_shape_of(settings)) if divided else None,
    )


def _shape_of(settings: TrainerSettings) -> AdapterSettings:
    if settings.adapter is None:
        raise ValueError("these settings have no adapter")
    return settings.adapter


def load_learnt(
    directory: Path, settings: TrainerSettings, ranks: Ranks, residents: Residents | None = None
) -> Policy:
    """Load what a run trains: the whole model of a directory, or a new adapter over it, which shares the base model
    of `residents`. A collective.

    Raises UnsupportedModel, and ConfigurationError if the ranks' layout or the adapter does not fit the model.
    """
    if settings.adapter is None:
        return load_trained(directory, settings, ranks)
    return (residents or Residents()).adapter(directory, settings, ranks)


def load_trained(directory: Path, settings: TrainerSettings, ranks: Ranks) -> PolicyModel:
    """Load the model of a directory onto the ranks' device, divided among them, to be trained whole. A collective.

    Raises UnsupportedModel, and ConfigurationError if the ranks' layout does not fit the model.
    """
    return _divided(_load_learning(directory, settings, ranks), directory, settings, ranks)


def load_adapters(
    directory: Path, settings: TrainerSettings, ranks: Ranks, shapes: Mapping[str, AdapterSettings]
) -> Adapters:
    """Load a model as `load_trained` does, and add an adapter over it for each of `shapes`. A collective.

    Raises UnsupportedModel, and ConfigurationError if an adapter does not fit the model.
    """
    adapters = Adapters(_load_learning(directory, settings, ranks))
    for name, shape in shapes.items():
        adapters.add(name, shape, settings.seed)
    without_weights = is_skeleton(adapters.model)
    _placed(adapters.model, directory, settings, ranks)
    if without_weights:
        _fill(adapters.model, adapters.base_weights(), directory, ranks)
        for name in shapes:
            adapters[name].begin_anew()
    return adapters


def reference_of(
    policy: Policy, directory: Path, settings: TrainerSettings, ranks: Ranks
) -> PolicyModel | BasePolicy | FollowingReference:
    """Return the reference of a policy: a second set of its weights, if the configured reference follows the policy;
    the base model under the adapter; or a second model. A collective."""
    if settings.reference.follows:
        return FollowingReference(policy, settings.reference)
    if isinstance(policy, AdaptedPolicy):
        return policy.adapters.base
    return load_reference(directory, settings, ranks)


def load_reference(directory: Path, settings: TrainerSettings, ranks: Ranks) -> PolicyModel:
    """Load the model of a directory like `load_trained`, but fixed. A collective."""
    model = _load(directory, settings, ranks, activation_checkpointing=False)
    return _divided(model.requires_grad_(False).eval(), directory, settings, ranks)


def load_critic(directory: Path, settings: TrainerSettings, ranks: Ranks) -> ValueModel:
    """Load a critic that begins with the transformer of a directory, in transformers' own definition whatever the
    backend. Each rank loads it whole before it is divided. A collective. Raises UnsupportedModel."""
    return _placed(
        load_value(directory, settings.precision, activation_checkpointing=settings.activation_checkpointing),
        directory,
        settings,
        ranks,
    )


def _load_learning(directory: Path, settings: TrainerSettings, ranks: Ranks) -> PolicyModel:
    model = _load(directory, settings, ranks, activation_checkpointing=settings.activation_checkpointing)
    asked = settings.batch.packing
    if asked not in model.packings and ranks.is_first:
        _log.warning("the model does not take this packing", asked=asked.value, used=Packing.PADDED.value)
    return model


def _load(directory: Path, settings: TrainerSettings, ranks: Ranks, *, activation_checkpointing: bool) -> PolicyModel:
    """Return a model with its weights on the CPU; or, if it will be divided, without them, as a skeleton."""
    scored = _scored(settings, ranks)
    options = {"activation_checkpointing": activation_checkpointing}
    model: PolicyModel | None = None
    if ranks.size > 1 and not settings.offload:
        model = _skeleton(directory, settings, ranks, scored, **options)
    if model is None:
        load = load_archon if settings.backend == "archon" else load_policy
        model = load(directory, settings.precision, scored, **options)
    if settings.algorithm.router_aux_coefficient and not (isinstance(model, ArchonModel) and model.config.experts):
        raise ConfigurationError(
            f"trainer.algorithm.router_aux_coefficient: {directory} is no mixture of experts, so it has no routers to"
            " balance; leave it out"
        )
    return model


def _skeleton(
    directory: Path, settings: TrainerSettings, ranks: Ranks, scored: TokenLogprobs, *, activation_checkpointing: bool
) -> PolicyModel | None:
    """Return the model without its weights; None if it can only be loaded whole."""
    if settings.backend == "archon":
        return archon_skeleton(
            directory, settings.precision, scored, activation_checkpointing=activation_checkpointing
        )

    def packings() -> frozenset[Packing] | None:
        if not has_skeleton(directory):
            return None
        return policy_stand_in(directory, settings.precision, scored, torch.device("cpu")).packings

    # The first rank decides for all: they must divide the model alike.
    found = ranks.from_first(packings)
    if found is None:
        if ranks.is_first:
            _log.warning("every rank loads the whole model before it is divided", model=str(directory))
        return None
    model = policy_skeleton(directory, settings.precision, scored, activation_checkpointing=activation_checkpointing)
    model.packings = found
    return model


def _scored(settings: TrainerSettings, ranks: Ranks) -> TokenLogprobs:
    exact = head_precision_of(settings, ranks.device) is Precision.FLOAT32
    return partial(
        exact_token_logprobs if exact else token_logprobs, entropy_gradient=settings.algorithm.learns_entropy
    )


def _fill(model: PolicyModel, weights: NamedWeights, directory: Path, ranks: Ranks) -> None:
    """Give a divided skeleton memory for this rank's parts, and read `weights`, which are its own, into them. Raises
    UnsupportedModel."""
    furnish(model, ranks.device)
    try:
        load_weights(weights, directory)
    except WeightsUnusable as error:
        raise UnsupportedModel(str(error)) from error


def head_precision_of(settings: TrainerSettings, device: torch.device) -> Precision:
    """Return the precision of the output head: the configured one, else float32, but the model's precision on
    CUDA."""
    if settings.head_precision is not None:
        return settings.head_precision
    return settings.precision if device.type == "cuda" else Precision.FLOAT32


def _divided(model: PolicyModel, directory: Path, settings: TrainerSettings, ranks: Ranks) -> PolicyModel:
    without_weights = is_skeleton(model)
    if ranks.size == 1 or not isinstance(model, ArchonModel):
        model = _placed(model, directory, settings, ranks)
    else:
        from trainer.models.archon.dividing import divide

        _choose_attention(model, directory, settings, ranks)
        model = divide(model, ranks, settings.pipeline_schedule or PipelineSchedule.ONE_F_ONE_B)
    if without_weights:
        _fill(model, model.own_weights(), directory, ranks)
    if settings.compile:
        check_compiler(ranks.device)
        for layer in model.layers:
            cast("Block", layer).compiled = True
    return model


def check_compiler(device: torch.device) -> None:
    """Raise ConfigurationError if nothing can be compiled for the device."""
    try:
        torch.compile(torch.nn.functional.silu)(torch.ones(2, device=device))
    except Exception as error:
        raise ConfigurationError(
            f"trainer.compile: torch.compile does not work here ({why_not(error)}); it takes a C++"
            f" compiler{' and Triton' if device.type == 'cuda' else ''}, or leave it out"
        ) from error


def _placed(model: _Model, directory: Path, settings: TrainerSettings, ranks: Ranks) -> _Model:
    """Move a model to the device and divide it. A skeleton stays without memory."""
    if not is_skeleton(model):
        model = model.to(ranks.device)
    _choose_attention(model, directory, settings, ranks)
    if ranks.size > 1 or settings.offload:
        from trainer.parallel.fsdp import shard

        shard(model, model.layers, ranks, offload=settings.offload)
    return model


def _choose_attention(
    model: PolicyModel | ValueModel, directory: Path, settings: TrainerSettings, ranks: Ranks
) -> None:
    """Choose how attention is computed, before the model is divided. Raises ConfigurationError if the chosen way does
    not work for the model."""
    asked, packing = settings.attention, settings.batch.packing
    masked = {Packing.TREE, Packing.PACKED} if of_packed_rows(ranks.device) else {Packing.TREE}
    useful = packing in masked and Packing.TREE in model.packings
    if asked is Attention.WHOLE or (asked is Attention.AUTO and not useful):
        return
    if is_skeleton(model) and isinstance(model, PolicyModel):
        obstacle = ranks.from_first(partial(_obstacle_to_blocks, model, directory, settings, ranks))
        if obstacle is None:
            model.accept_block_masks()
            model.by_blocks = True
    else:
        obstacle = take_blocks(model.to(ranks.device))
    if obstacle is not None and asked is Attention.BLOCKS:
        raise ConfigurationError(
            f"trainer.attention: this model cannot compute attention by blocks on {ranks.device.type}: {obstacle};"
            " use auto or whole"
        )
    if obstacle is not None and ranks.is_first:
        _log.warning("attention is not by blocks: trees take longer and more memory", reason=obstacle)


def _obstacle_to_blocks(model: PolicyModel, directory: Path, settings: TrainerSettings, ranks: Ranks) -> str | None:
    """Return why attention by blocks does not work for a model without weights, tried with its stand-in."""
    scored = _scored(settings, ranks)
    if isinstance(model, ArchonModel):
        small: PolicyModel = archon_stand_in(directory, settings.precision, scored).to(ranks.device)
    else:
        small = policy_stand_in(directory, settings.precision, scored, ranks.device)
    learns = any(parameter.requires_grad for parameter in model.parameters())
    return take_blocks(small.requires_grad_(learns))
