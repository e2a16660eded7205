"""Divide a model among ranks according to a layout.

Every rank has tokens of its own: the tokens of a row are divided among the ranks of `c` and `t`. Therefore the
gradient of an undivided weight is the sum over all ranks of a stage: embedding, head and last norm are sharded over
all of them, and experts over all ranks that have the same experts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from trainer.config import PipelineSchedule
from trainer.models.archon.attention import Attention
from trainer.models.archon.mlp import MLP
from trainer.models.archon.model import ArchonModel, CausalModel
from trainer.models.archon.moe import Experts, MixtureOfExperts
from trainer.models.archon.pipelined import PipelinedModel
from trainer.models.huggingface import PolicyModel
from trainer.models.skeleton import is_skeleton
from trainer.parallel.axes import Axes, Axis
from trainer.parallel.fsdp import sum_gradients
from trainer.parallel.mesh import Ranks
from trainer.parallel.pipeline import Pipeline, stages_per_rank

# The dimension along which ranks divide a weight: 0 divides the outputs of a layer, 1 its inputs.
_HEADS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
_WIDTH = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}


def divide(model: ArchonModel, ranks: Ranks, schedule: PipelineSchedule) -> PolicyModel:
    """Return this rank's part of a model, on its device, or without memory if `model` has none. Do not use `model`
    afterwards. A collective.

    Raises ConfigurationError if the layout does not fit the model.
    """
    layout = ranks.layout
    layout.check_model(model.config.shape, stages_per_rank(schedule))
    if not is_skeleton(model):
        model = model.to(ranks.device)
    if layout.pipeline == 1:
        _divide(model.causal, ranks)
        return model
    axis = _axis(ranks.mesh(pipeline=layout.pipeline, stage=layout.stage), "pipeline")
    part = PipelinedModel(model, Pipeline(axis=axis, schedule=schedule, device=ranks.device))
    for stage in part.stages:
        _divide(stage, ranks)
    return part


def _divide(model: CausalModel, ranks: Ranks) -> None:
    """Divide a model in place among the ranks of a stage."""
    layout = ranks.layout
    if layout.stage == 1:
        return
    # torch advises to merge collectives over two axes, which is impossible with two shardings of one dimension.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    shards = _mesh(ranks, shard=layout.data * layout.context, tensor=layout.tensor)
    everyone = _mesh(ranks, shard=layout.sharing)
    experts = _mesh(ranks, shard=layout.sharing // layout.expert, expert=layout.expert)
    _place(model, _axes(ranks))
    for layer in model.model.layers.values():
        if layout.tensor > 1:
            _divide_layer(layer, shards["tensor"])
        for module in layer.modules():
            if isinstance(module, Experts) and layout.tensor * layout.expert > 1:
                if layout.expert > 1:
                    _distribute(module, experts["expert"], dict.fromkeys(_WIDTH, 0))
                fully_shard(module, mesh=_sharding(experts))
        fully_shard(layer, mesh=_sharding(shards))
    # As in `parallel/fsdp.py`: the root must not stay gathered after a forward pass that no backward pass follows.
    fully_shard(model, mesh=_sharding(everyone), reshard_after_forward=True)
    sum_gradients(model)


def _mesh(ranks: Ranks, *, shard: int, **inner: int) -> DeviceMesh:
    """Return the mesh (pipeline, replica, shard, inner), without dimensions of size 1 other than `shard`."""
    sizes = {"pipeline": ranks.layout.pipeline, "replica": ranks.layout.replicas, "shard": shard, **inner}
    return ranks.mesh(**{name: size for name, size in sizes.items() if size > 1 or name == "shard"})


def _sharding(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimensions of a mesh that FSDP shards over; with replicas two of them (HSDP)."""
    names = mesh.mesh_dim_names or ()
    if "replica" in names:
        return mesh["replica", "shard"]
    return mesh["shard"]


def _axes(ranks: Ranks) -> Axes:
    layout = ranks.layout
    # `rows` includes the pipeline, so that none of these groups spans several stages.
    rows = layout.pipeline * layout.replicas * layout.data
    tensor = context = expert = Axis()
    if layout.tensor > 1:
        tensor = _axis(_mesh(ranks, shard=layout.data * layout.context, tensor=layout.tensor), "tensor")
    if layout.context > 1:
        context = _axis(ranks.mesh(rows=rows, context=layout.context, tensor=layout.tensor), "context")
    if layout.expert > 1:
        expert = _axis(_mesh(ranks, shard=layout.sharing // layout.expert, expert=layout.expert), "expert")
    tokens = context if layout.tensor == 1 else tensor
    if layout.tensor > 1 and layout.context > 1:
        tokens = _axis(ranks.mesh(rows=rows, tokens=layout.row), "tokens")
    return Axes(tensor=tensor, context=context, expert=expert, tokens=tokens)


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    return Axis(size=mesh[name].size(), rank=mesh[name].get_local_rank(), group=mesh.get_group(name))


def _place(model: CausalModel, axes: Axes) -> None:
    for module in model.modules():
        if isinstance(module, CausalModel | Attention | MLP | MixtureOfExperts):
            module.axes = axes


def _divide_layer(layer: nn.Module, mesh: DeviceMesh) -> None:
    divided: dict[nn.Module, Mapping[str, int]] = {}
    for module in layer.modules():
        dimensions = _HEADS if isinstance(module, Attention) else _WIDTH if isinstance(module, MLP) else {}
        for name, dimension in dimensions.items():
            # A bias belongs to the outputs: it is divided with them, or added once after their sum.
            divided[module.get_submodule(name)] = {"weight": 0, "bias": 0} if dimension == 0 else {"weight": 1}
    for module in layer.modules():
        if not isinstance(module, Experts):
            _distribute(module, mesh, divided.get(module, {}))


def _distribute(module: nn.Module, mesh: DeviceMesh, dimensions: Mapping[str, int]) -> None:
    """Distribute a module's own parameters over a mesh: sharded along the given dimensions, or replicated."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement: Placement = Shard(dimensions[name]) if name in dimensions else Replicate()
        divided = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
