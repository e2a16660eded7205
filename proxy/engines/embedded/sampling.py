"""Draw one token for every row of a batch, with its log-probability: pure tensor functions.

As in SGLang, the log-probability belongs to the temperature-scaled distribution, after penalties, bias and a
grammar's mask, and before top-p, top-k and min-p. Greedy rows have temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from proxy.engines.embedded.wire import SamplingRules

# 2^64 divided by the golden ratio, as in SplitMix64: it spreads (seed, position) over 64 bits.
_SEED_STRIDE = 0x9E3779B97F4A7C15

_TINY = torch.finfo(torch.float32).tiny

TopLogprobs = list[tuple[float, int]]
"""(log-probability, id) of the most probable tokens, best first, without impossible ones."""


class Draw(NamedTuple):
    """Next tokens `[B]`, their log-probabilities `[B]` in float32, and the most probable tokens of the rows that ask
    for them."""

    tokens_b: torch.Tensor
    logprobs_b: torch.Tensor
    tops: dict[int, TopLogprobs]


class BatchRules:
    """The sampling rules of a batch as tensors, built when requests join or leave."""

    def __init__(self, rules: Sequence[SamplingRules], device: torch.device) -> None:
        self.rules = rules
        self.constrained_rows = [row for row, each in enumerate(rules) if each.constraint is not None]
        self.top_rows = [row for row, each in enumerate(rules) if each.top_logprobs]
        self.greedy_b = torch.tensor([each.greedy for each in rules], device=device)
        self.all_greedy = all(each.greedy for each in rules)
        self.any_greedy = any(each.greedy for each in rules)
        scaled = any(each.temperature != 1.0 for each in rules)
        self.temperature_b1 = torch.tensor([[each.temperature] for each in rules], device=device) if scaled else None
        self.adjusted_rows = [row for row, each in enumerate(rules) if each.adjusts]
        self.seeded_rows = [row for row, each in enumerate(rules) if each.seed is not None and not each.greedy]
        self.cut_rows = [row for row, each in enumerate(rules) if each.cuts]
        if self.cut_rows:
            cut = [rules[row] for row in self.cut_rows]
            self.cut_index = torch.tensor(self.cut_rows, device=device)
            self.top_p_c1 = torch.tensor([[each.top_p] for each in cut], device=device)
            self.top_k_c1 = torch.tensor([[each.top_k or 1 << 30] for each in cut], device=device)
            self.min_p_c1 = torch.tensor([[each.min_p] for each in cut], device=device)


def sample(
    logits_bv: torch.Tensor,
    batch: BatchRules,
    outputs: Sequence[Sequence[int]],
    generator: torch.Generator,
    allowed_cv: torch.Tensor | None = None,
) -> Draw:
    """Return the next token of every row.

    `outputs` are the tokens that each row has generated so far. Penalties count them, and a seeded row's draw depends
    only on its seed and their number, so it is the same in any batch. `allowed_cv` has the allowed tokens for each of
    the batch's `constrained_rows`.
    """
    logits_bv = logits_bv.float()
    if batch.adjusted_rows:
        logits_bv = adjust(logits_bv, batch, outputs)
    if allowed_cv is not None:
        logits_bv = restrict(logits_bv, batch.constrained_rows, allowed_cv)
    if batch.temperature_b1 is not None:
        logits_bv = logits_bv / batch.temperature_b1
    logprobs_bv = torch.log_softmax(logits_bv, dim=-1)
    if batch.all_greedy:
        tokens_b = logprobs_bv.argmax(dim=-1)
    else:
        tokens_b = _draw(logprobs_bv, batch, outputs, generator)
        if batch.any_greedy:
            tokens_b = torch.where(batch.greedy_b, logits_bv.argmax(dim=-1), tokens_b)
    return Draw(tokens_b, logprobs_bv.gather(1, tokens_b[:, None])[:, 0], _tops(logprobs_bv, batch))


def restrict(logits_bv: torch.Tensor, rows: list[int], allowed_cv: torch.Tensor) -> torch.Tensor:
    """Return the logits with minus infinity for the tokens that are not allowed in the given rows."""
    if len(rows) == len(logits_bv):
        return logits_bv.masked_fill(~allowed_cv, -torch.inf)
    index = torch.tensor(rows, device=logits_bv.device)
    return logits_bv.index_copy(0, index, logits_bv[index].masked_fill(~allowed_cv, -torch.inf))


def _tops(logprobs_bv: torch.Tensor, batch: BatchRules) -> dict[int, TopLogprobs]:
    if not batch.top_rows:
        return {}
    counts = [batch.rules[row].top_logprobs for row in batch.top_rows]
    best = logprobs_bv[batch.top_rows].topk(min(max(counts), logprobs_bv.shape[1]), dim=-1)
    rows = zip(batch.top_rows, counts, best.values.tolist(), best.indices.tolist(), strict=True)
    return {
        row: [(value, token) for value, token in zip(values[:count], tokens, strict=False) if value > -math.inf]
        for row, count, values, tokens in rows
    }


def adjust(logits_bv: torch.Tensor, batch: BatchRules, outputs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the logits after bias and presence and frequency penalties, in the rows that ask for them."""
    logits_bv = logits_bv.clone()
    for row in batch.adjusted_rows:
        rules = batch.rules[row]
        if rules.logit_bias:
            ids, values = zip(*rules.logit_bias, strict=True)
            logits_bv[row, list(ids)] += torch.tensor(values, device=logits_bv.device)
        if outputs[row] and (rules.presence_penalty or rules.frequency_penalty):
            used = torch.tensor(list(outputs[row]), device=logits_bv.device)
            tokens, counts = torch.unique(used, return_counts=True)
            logits_bv[row, tokens] -= rules.presence_penalty + rules.frequency_penalty * counts
    return logits_bv


def cut(
    logprobs_cv: torch.Tensor, top_p_c1: torch.Tensor, top_k_c1: torch.Tensor, min_p_c1: torch.Tensor
) -> torch.Tensor:
    """Return the log-probabilities with the tokens outside top-p, top-k and min-p at minus infinity.

    Top-p retains the smallest set of most probable tokens that reaches p. The most probable token always stays.
    """
    ordered, index = logprobs_cv.sort(dim=-1, descending=True)
    probabilities = ordered.exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    out = (before >= top_p_c1) | (rank >= top_k_c1) | (probabilities < min_p_c1 * probabilities[:, :1])
    out[:, 0] = False
    return torch.full_like(logprobs_cv, -torch.inf).scatter(1, index, ordered.masked_fill(out, -torch.inf))


def _draw(
    logprobs_bv: torch.Tensor, batch: BatchRules, outputs: Sequence[Sequence[int]], generator: torch.Generator
) -> torch.Tensor:
    """Draw by exponential races: argmax of p/e with e ~ Exp(1) has distribution p."""
    allowed_bv = logprobs_bv
    if batch.cut_rows:
        allowed_bv = logprobs_bv.index_copy(
            0, batch.cut_index, cut(logprobs_bv[batch.cut_index], batch.top_p_c1, batch.top_k_c1, batch.min_p_c1)
        )
    noise_bv = torch.empty_like(allowed_bv).exponential_(generator=generator)
    for row in batch.seeded_rows:
        own = torch.Generator(device=noise_bv.device)
        own.manual_seed(_mix(batch.rules[row].seed or 0, len(outputs[row])))
        noise_bv[row].exponential_(generator=own)
    # Clamped, because noise of exactly 0 has the logarithm minus infinity, and an excluded token could win.
    return (allowed_bv - noise_bv.clamp_min_(_TINY).log_()).argmax(dim=-1)


def _mix(seed: int, position: int) -> int:
    """Return the 63-bit generator seed for one position of one seeded request (SplitMix64's mixing)."""
    value = (seed + (position + 1) * _SEED_STRIDE) & 0xFFFFFFFFFFFFFFFF
    value ^= value >> 31
    return (value * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF) >> 1
