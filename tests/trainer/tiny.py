"""A tiny random Qwen3 model on disk, trajectories written by hand or drawn from it, and a trainer in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.identifiers import GroupId, SessionId, TurnId
from proxy.contract.trajectory import Trajectory, TrajectoryGroup, TrajectoryTurn
from proxy.contract.turn import FinishReason, LogprobConvention, TurnState, VersionSpan
from tests.fakes.training_proxy import KEY, RUN, TrainingProxy
from tests.small_models import small_qwen3
from trainer.algorithm.logprobs import token_logprobs
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.presets import resolve
from trainer.assembly import RunTrainer, Shared, assemble, connect
from trainer.claims.leased import LeasedClaims
from trainer.claims.leases import LeaseKeeper
from trainer.config import AlgorithmSettings, OptimizerSettings, Precision, TrainerSettings
from trainer.loop import TrainingLoop
from trainer.models.huggingface import PolicyModel, load_policy
from trainer.models.value import load_value
from trainer.observe.instruments import Instruments
from trainer.parallel.mesh import Ranks
from trainer.proxy_client import ProxyClient
from trainer.teacher import Teacher
from trainer.update import Learner

VOCABULARY = 64
ALONE = Ranks(0, 1, torch.device("cpu"), None)
GRPO = resolve(AlgorithmSettings())

_numbers = count()


def save_tiny_model(directory: Path, seed: int = 0) -> None:
    """Save a Qwen3 model with 2 layers of 32, tied, in bfloat16 like published checkpoints."""
    torch.manual_seed(seed)
    model = small_qwen3(vocab_size=VOCABULARY)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # The default initialisation is so small that all distributions are flat.
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"made_for": "tests"}))


def turn(
    output: Sequence[int],
    *,
    prompt: Sequence[int] = (1, 2, 3),
    logprobs: Sequence[float] | None = None,
    parent: int | None = None,
    prefix: int = 0,
    version: int = 0,
    temperature: float = 1.0,
    trainable: bool = True,
    reward: float | None = None,
    convention: LogprobConvention = LogprobConvention.SAMPLED,
    superseded: bool = False,
    state: TurnState = TurnState.COMPLETE,
) -> TrajectoryTurn:
    return TrajectoryTurn(
        id=TurnId(f"turn_{next(_numbers)}"),
        parent=parent,
        prefix_tokens=prefix,
        packed_prompt_ids=pack_ids(prompt),
        packed_output_ids=pack_ids(output),
        packed_logprobs=pack_logprobs(logprobs if logprobs is not None else (-2.0,) * len(output)),
        spans=(VersionSpan(version=version, start=0, end=len(output)),) if output else (),
        temperature=temperature,
        convention=convention,
        trainable=trainable,
        reward=reward,
        superseded=superseded,
        state=state,
    )


def cut(answer: TrajectoryTurn, *, left: bool = False) -> TrajectoryTurn:
    """Return the answer as cut by its bound on tokens, or by a client that left."""
    state = TurnState.TRUNCATED if left else TurnState.COMPLETE
    return msgspec.structs.replace(answer, finish_reason=FinishReason.LENGTH, state=state)


def trajectory(*turns: TrajectoryTurn, reward: float | None = 1.0, group: str | None = None) -> Trajectory:
    return Trajectory(
        session_id=SessionId(f"ses_{next(_numbers)}"),
        group_id=GroupId(group) if group is not None else None,
        task=None,
        turns=tuple(turns),
        reward=reward,
    )


def group_of(trajectories: Sequence[Trajectory], name: str | None = "grp") -> TrajectoryGroup:
    return TrajectoryGroup(id=GroupId(name) if name is not None else None, trajectories=tuple(trajectories))


def load_tiny(directory: Path, *, entropy_gradient: bool = False) -> PolicyModel:
    scored = partial(token_logprobs, entropy_gradient=entropy_gradient)
    return load_policy(directory, TrainerSettings().precision, scored, activation_checkpointing=False)


@torch.no_grad()
def draw(
    model: Any,
    prompt: Sequence[int],
    length: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    count: int = 1,
) -> list[tuple[list[int], list[float]]]:
    """Draw `count` outputs under one prompt, each with its log-probabilities, token by token."""
    inner: Any = model.inner
    ids = torch.tensor([list(prompt)] * count)
    columns = []
    for _ in range(length):
        logprobs = (inner(input_ids=ids, use_cache=False).logits[:, -1] / temperature).log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
        ids = torch.cat([ids, tokens], dim=1)
        columns.append(logprobs.gather(-1, tokens))
    drawn = torch.cat(columns, dim=1)
    return list(zip(ids[:, len(prompt) :].tolist(), drawn.tolist(), strict=True))


def settings(directory: Path, /, **changes: Any) -> TrainerSettings:
    values: dict[str, Any] = {
        "run": RUN,
        "api_key": KEY,
        "batch": {"trajectories": 8, "at_least": 1, "wait_seconds": 0.1},
        "optimizer": {"learning_rate": 1e-3},
        # At once, so that a test finds the version of a step committed when the step returns.
        "weights": {"directory": str(directory), "behind": False},
        # The log-probabilities that tests record are invented, so a gap to them means nothing.
        "mismatch": {"warn_above": 0, "pause_above": 0},
    }
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return TrainerSettings.model_validate(values)


def learner_of(model: PolicyModel, algorithm: Algorithm, optimizer: OptimizerSettings, base: Path) -> Learner:
    """Return a learner with the model in `base` as reference and as the critic's start, if the algorithm uses
    them."""
    reference = load_tiny(base).requires_grad_(False).eval() if algorithm.has_reference else None
    critic = load_value(base, Precision.FLOAT32, activation_checkpointing=False) if algorithm.has_critic else None
    return Learner(model, algorithm, optimizer, ALONE, reference, critic)


@dataclass
class InProcess:
    """A trainer and those of its parts that tests inspect."""

    parts: RunTrainer
    pauses: list[float]

    @property
    def loop(self) -> TrainingLoop:
        return self.parts.loop

    @property
    def model(self) -> Any:
        return self.parts.model

    @property
    def learner(self) -> Learner:
        return self.parts.learner

    @property
    def claims(self) -> LeasedClaims:
        return self.parts.connection.claims

    @property
    def leases(self) -> LeaseKeeper:
        return self.parts.connection.leases

    @property
    def instruments(self) -> Instruments:
        return self.parts.instruments

    @property
    def teacher(self) -> Teacher | None:
        return self.parts.teacher

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_weights()}


def build(
    proxy: TrainingProxy, configured: TrainerSettings, shared: Shared | None = None, ranks: Ranks = ALONE
) -> InProcess:
    """Assemble the parts as `python -m trainer` does, with the fake proxy instead of a network, without announcing
    the trainer."""
    pauses: list[float] = []
    pause: Callable[[float], None] = pauses.append
    client = ProxyClient("http://proxy", KEY, RUN, transport=proxy.transport(), pause=pause)
    ending = ExitStack()
    connection = connect(client, configured, "a-process", ending)
    shared = shared or Shared(ranks.device)
    parts = assemble(configured.run, configured, ranks, connection, proxy.head, shared, ending)
    return InProcess(parts=parts, pauses=pauses)
