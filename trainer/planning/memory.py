"""Formulas for the memory of one rank. Everything is in bytes; nothing here imports torch.

Symbols: D hidden size, H·K heads times their width, G·K the same of KV heads, I width of the MLP (of a token's chosen
experts together), V vocabulary, T tokens of a micro-batch on this rank, P parameters. The axes of a layout are those
of `parallel/layout.py`. Weights, gradients and optimiser state are float32 with every precision.

The factors of activations count the tensors that autograd keeps of a layer as `models/archon` computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config import Precision
from trainer.models.archon.config import ModelConfig
from trainer.parallel.layout import Layout

FLOAT32 = 4
_BFLOAT16 = 2
_MOMENTS = 2
LOGITS_PER_CHUNK, LOGITS_PER_CHUNK_ON_CUDA = 1 << 24, 1 << 28
"""As in `algorithm/logprobs.py`, which imports torch."""
_LOGITS_COPIES = 2
USABLE = 0.9
"""Share of a device's memory to plan with: the rest is for CUDA's context, buffers of collectives and what the
allocator cannot use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the ranks compute at once. `tokens` is `trainer.batch.max_tokens_per_microbatch`; `reference` says whether
    the algorithm has a reference model beside the policy."""

    tokens: int = 16384
    precision: Precision = Precision.BFLOAT16
    checkpointing: bool = False
    compiled: bool = False
    reference: bool = False
    on_gpu: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of the rank that needs most.

    `gathered` are parameters and gradients that FSDP2 holds whole for a moment, `casts` the bfloat16 copies of
    weights that the backward pass needs. Loading needs no more than `weights`: a rank reads only its own part.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int
    casts: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """The peak of a step."""
        kept = self.weights + self.gradients + self.optimizer + self.reference
        return kept + self.gathered + self.casts + self.activations + self.logits


def layer_parameters(config: ModelConfig, layer: int) -> int:
    """Return the parameters of a decoder layer: attention, MLP or experts, and norms."""
    attention = 2 * config.hidden * config.head_dim * (config.heads + config.kv_heads)
    if config.qkv_bias:
        attention += config.head_dim * (config.heads + 2 * config.kv_heads)
    if config.output_bias:
        attention += config.hidden
    if config.qk_norm:
        attention += 2 * config.head_dim
    return attention + 2 * config.hidden + _mlp_parameters(config, layer)


def parameters(config: ModelConfig) -> int:
    """Return the parameters of the model; a tied embedding counts once."""
    layers = sum(layer_parameters(config, layer) for layer in range(config.layers))
    return layers + (1 if config.tied else 2) * _embedding(config) + config.hidden


def rank_memory(config: ModelConfig, layout: Layout, work: Work) -> RankMemory:
    """Return the memory of the rank that needs most: of a pipeline, the larger of the first and the last stage.

    - weights: 4 P_stage / (d·c·t), and gradients as much; AdamW's two moments: twice that.
    - reference: as the weights.
    """
    return max(
        (_stage_memory(config, layout, work, layers, ends) for layers, ends in _stages(config, layout)),
        key=lambda memory: memory.total,
    )


def _stage_memory(config: ModelConfig, layout: Layout, work: Work, layers: range, ends: int) -> RankMemory:
    """Return the memory of a rank whose stage has these layers and `ends` embeddings or heads."""
    root = ends * _embedding(config)
    # The last norm is in the last stage; for the first one it is too much by a few kilobytes.
    stage = sum(layer_parameters(config, layer) for layer in layers) + root + config.hidden
    weights = math.ceil(FLOAT32 * stage / layout.sharing)
    is_divided = layout.stage > 1
    return RankMemory(
        weights=weights,
        gradients=weights,
        optimizer=_MOMENTS * weights,
        reference=weights if work.reference else 0,
        gathered=_gathered(config, layout, layers, root) if is_divided else 0,
        casts=_casts(config, layout, work, layers, root),
        activations=_activations(config, layout, work, layers),
        logits=_logits(config, layout, work),
    )


def _stages(config: ModelConfig, layout: Layout) -> list[tuple[range, int]]:
    """Return the layers of the first and the last stage, with their number of embeddings and heads."""
    if layout.pipeline == 1:
        return [(range(config.layers), 1 if config.tied else 2)]
    size, more = divmod(config.layers, layout.pipeline)
    first = size + (1 if more else 0)
    return [(range(first), 1), (range(config.layers - size, config.layers), 1)]


def _embedding(config: ModelConfig) -> int:
    return config.vocabulary * config.hidden


def _mlp_parameters(config: ModelConfig, layer: int) -> int:
    if config.experts is None or not config.is_sparse(layer):
        return 3 * config.hidden * config.intermediate
    return (
        3 * config.hidden * config.experts.intermediate * config.experts.count + config.hidden * config.experts.count
    )


def _whole_layer(config: ModelConfig, layout: Layout, layer: int) -> int:
    """Return the parameters of a layer that a rank has while it computes it: its share of heads and MLP width (t), or
    its experts (e); experts without e are gathered whole."""
    attention = layer_parameters(config, layer) - _mlp_parameters(config, layer)
    mlp = _mlp_parameters(config, layer)
    is_sparse = config.experts is not None and config.is_sparse(layer)
    return math.ceil(attention / layout.tensor) + math.ceil(mlp / (layout.expert if is_sparse else layout.tensor))


def _gathered(config: ModelConfig, layout: Layout, layers: range, root: int) -> int:
    """Return 4 × (2 layers + embedding and head + the larger of both as a gradient): FSDP2 gathers the next layer
    while it computes one, keeps the root's parameters during a pass, and sums one whole gradient at a time."""
    layer = max((_whole_layer(config, layout, each) for each in layers), default=0)
    return FLOAT32 * (2 * layer + root + max(layer, root))


def _casts(config: ModelConfig, layout: Layout, work: Work, layers: range, root: int) -> int:
    """Return 2 × the weights that autocast keeps in bfloat16 until the backward pass: of all layers, or of two if
    layers are computed again."""
    if work.precision is Precision.FLOAT32:
        return 0
    each = [_whole_layer(config, layout, layer) for layer in layers]
    return _BFLOAT16 * ((2 * max(each, default=0) if work.checkpointing else sum(each)) + root)


def _activations(config: ModelConfig, layout: Layout, work: Work, layers: range) -> int:
    """Return T × the bytes per token of all layers; with checkpointing 4 D for each layer, and one layer whole. A
    pipeline keeps the micro-batches of as many as it has stages."""
    tokens = math.ceil(work.tokens / layout.row)
    each = [_bytes_per_token(config, work, layer) for layer in layers]
    kept = FLOAT32 * config.hidden * len(each) + max(each, default=0) if work.checkpointing else sum(each)
    return tokens * layout.pipeline * kept


def _bytes_per_token(config: ModelConfig, work: Work, layer: int) -> int:
    """Return the bytes that autograd keeps of one token in one layer.

    | | float32 | bfloat16 | bfloat16, compiled |
    | --- | --- | --- | --- |
    | norms and residuals, × D | 24 | 20 | 12 |
    | queries and their norm, × H·K | 12 | 10 | 4 |
    | keys and their norm, × G·K | 12 | 10 | 4 |
    | without norms of queries and keys | 4 | 2 | 2 |
    | values, × G·K | 4 | 2 | 2 |
    | output of attention, × H·K | 4 | 2 | 2 |
    | MLP: gate, its activation, up, their product, × I | 16 | 8 | 6 |

    A token that goes to several experts is there once for each, before and after them.
    """
    narrow = work.precision is Precision.BFLOAT16
    unit = _BFLOAT16 if narrow else FLOAT32
    compiled = narrow and work.compiled
    stream = 24 if not narrow else 12 if compiled else 20
    normed = 12 if not narrow else 4 if compiled else 10
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = (normed if config.qk_norm else unit) * (queries + keys) + unit * (keys + queries)
    width, sent = config.intermediate, 0
    is_sparse = config.experts is not None and config.is_sparse(layer)
    if config.experts is not None and is_sparse:
        width = config.experts.intermediate * config.experts.per_token
        sent = 2 * unit * config.experts.per_token * config.hidden
    mlp = (6 if compiled and not is_sparse else 4 * unit) * width
    return stream * config.hidden + attention + mlp + sent


def _logits(config: ModelConfig, layout: Layout, work: Work) -> int:
    """Return 4 × 2 × the logits that are computed at once, and their gradient."""
    most = LOGITS_PER_CHUNK_ON_CUDA if work.on_gpu else LOGITS_PER_CHUNK
    return FLOAT32 * _LOGITS_COPIES * min(most, math.ceil(work.tokens / layout.row) * config.vocabulary)
