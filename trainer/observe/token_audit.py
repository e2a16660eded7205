"""The trajectories of a step whose tokens are recorded one by one."""

from __future__ import annotations

import hashlib

import torch

from proxy.contract.step import TokenAudit
from trainer.batching.grouping import Batch
from trainer.update import TokenRecord


def audit_tokens(batch: Batch, tokens: TokenRecord | None, sample: int) -> tuple[TokenAudit, ...]:
    """Return an audit of every trained turn of `sample` trajectories; none on a rank without the token record.
    Redacted turns are left out, since not all of their tokens were trained."""
    if tokens is None or sample == 0:
        return ()
    audits = []
    for index in sampled(batch, tokens, sample):
        mine_N = (tokens.trajectory_N == index).nonzero()[:, 0]
        for turn in sorted(set(tokens.turn_N[mine_N].tolist())):
            if batch.trajectories[index].turns[turn].masked:
                continue
            at_N = mine_N[tokens.turn_N[mine_N] == turn]
            audits.append(
                TokenAudit(
                    session_id=batch.trajectories[index].session_id,
                    turn_id=batch.trajectories[index].turns[turn].id,
                    logprobs=tuple(tokens.logprobs_N[at_N].tolist()),
                    engine_logprobs=tuple(tokens.behaviour_N[at_N].tolist()),
                    advantages=tuple(tokens.advantages_N[at_N].tolist()),
                    staleness=tuple(tokens.staleness_N[at_N].int().tolist()),
                    clipped=tuple(tokens.clipped_N[at_N].tolist()),
                )
            )
    return tuple(audits)


def sampled(batch: Batch, tokens: TokenRecord, sample: int) -> list[int]:
    """Return the indices of the chosen trajectories, in the order of the batch: the one with the log-probability
    furthest from the engine's, and others by the hash of their session's id, which makes the choice random and
    repeatable."""
    gap_N = (tokens.logprobs_N - tokens.behaviour_N).abs()
    gap_N = torch.where(tokens.altered_N, torch.zeros_like(gap_N), gap_N)
    worst = int(tokens.trajectory_N[gap_N.argmax()])
    others = sorted(
        (index for index in range(len(batch.trajectories)) if index != worst),
        key=lambda index: hashlib.sha256(batch.trajectories[index].session_id.encode()).digest(),
    )
    return sorted([worst, *others[: sample - 1]])
