"""A user's own loss, advantage and filter in training: their effect, their failures, and replay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from proxy.contract.claim import CommitRequest
from proxy.contract.trajectory import TrajectoryGroup
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.real_proxy import RUN, TRAINER, RealProxy, real_proxy, write_real_model
from tests.trainer.test_update import packed_of
from tests.trainer.tiny import ALONE, group_of, load_tiny, settings, trajectory, turn
from trainer.algorithm.parts import as_json, from_json
from trainer.algorithm.presets import resolve
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, Packing
from trainer.errors import ConfigurationError
from trainer.replay.command import IMPOSSIBLE, main
from trainer.update import Learner, Outcome

CLIPPED = """
import torch

def loss(inputs):
    ratio_N = (inputs.logprobs_N - inputs.proximal_N).exp()
    clipped_N = ratio_N.clamp(1 - 0.2, 1 + 0.28)
    return torch.maximum(-ratio_N * inputs.advantages_N, -clipped_N * inputs.advantages_N)
"""

WITH_ENTROPY = "def loss(inputs):\n    return -inputs.advantages_N * inputs.logprobs_N - 0.1 * inputs.entropy_N\n"

ADVANTAGE = """
def advantage(sessions):
    found = []
    for session in sessions:
        others = [each.reward for each in sessions if each.group == session.group and each is not session]
        mean = sum(others) / len(others) if others else 0.0
        found.append([session.reward - mean] * len(session.turns))
    return found
"""

FAILS_ON_LARGE_ADVANTAGES = """
def loss(inputs):
    if (inputs.advantages_N.abs() > 50).any():
        raise RuntimeError("too large for me")
    return -inputs.advantages_N * inputs.logprobs_N
"""

FAILS_ON_NEGATIVE_REWARDS = """
import math

def advantage(sessions):
    return [[math.sqrt(each.reward + 3.0) if each.reward else 0.0] * len(each.turns) for each in sessions]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], Path]:
    def written(text: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return written


def learnt(
    base: Path, algorithm: AlgorithmSettings, settings: BatchSettings | None = None
) -> tuple[Outcome, list[Tensor]]:
    """Make two steps on twelve answers of different lengths. Return the last outcome and the gradient of each."""
    generator = torch.Generator().manual_seed(0)
    members = [
        trajectory(
            turn(torch.randint(0, 64, (2 + index % 5,), generator=generator).tolist()), reward=float(index % 3 == 0)
        )
        for index in range(12)
    ]
    model = load_tiny(base, entropy_gradient=algorithm.learns_entropy)
    gradients: list[Tensor] = []

    def remember(*_: object) -> None:
        gradients.append(
            torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        )

    learner = Learner(model, resolve(algorithm), OptimizerSettings(learning_rate=1e-3, clip_norm=1e9), ALONE)
    learner.optimizer.register_step_pre_hook(remember)
    packed = packed_of(members, [0] * 4 + [1] * 4 + [2, 2, 3, 3], algorithm, settings)
    learner.update(packed)
    return learner.update(packed), gradients


@pytest.mark.parametrize(("text", "denominator"), [(CLIPPED, "tokens"), (WITH_ENTROPY, "answers")])
def test_micro_batches_change_nothing(
    tiny_model: Path, mine: Callable[[str], Path], text: str, denominator: str
) -> None:
    """Terms are weighted by their share of the batch; answers without an advantage have a gradient too."""
    algorithm = AlgorithmSettings.model_validate({"loss": f"{mine(text)}:loss", "denominator": denominator})
    small = BatchSettings(packing=Packing.PACKED, row_tokens=16, max_tokens_per_microbatch=16)
    (whole, gradients), (parts, divided) = learnt(tiny_model, algorithm), learnt(tiny_model, algorithm, small)
    assert whole.loss == pytest.approx(parts.loss, abs=1e-6)
    for one, other in zip(gradients, divided, strict=True):
        # Processors add in different orders; a term with a wrong weight differs by a thousandth and more.
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_clipped_surrogate_written_by_hand_equals_the_built_in_one(
    tiny_model: Path, mine: Callable[[str], Path]
) -> None:
    own = AlgorithmSettings.model_validate({"loss": f"{mine(CLIPPED)}:loss", "mini_batches": 2})
    built_in = AlgorithmSettings(mini_batches=2, clip_low=0.2, clip_high=0.28)
    (outcome, gradients), (wanted, theirs) = learnt(tiny_model, own), learnt(tiny_model, built_in)
    assert outcome.loss == pytest.approx(wanted.loss, abs=1e-6)
    for one, other in zip(gradients, theirs, strict=True):
        # The gradients' norm is about 3 and float32 sums are taken in another order.
        torch.testing.assert_close(one, other, atol=5e-6, rtol=1e-4)


def rewarded(*rewards: float) -> Callable[[int], TrajectoryGroup]:
    def source(version: int) -> TrajectoryGroup:
        generator = torch.Generator().manual_seed(version)
        return group_of(
            [
                trajectory(
                    turn(torch.randint(0, 64, (4,), generator=generator).tolist(), version=version), reward=reward
                )
                for reward in rewards
            ]
        )

    return source


def test_an_advantage_and_a_filter_decide_what_is_learnt(
    start: Start, tiny_model: Path, tmp_path: Path, mine: Callable[[str], Path]
) -> None:
    """RLOO written by hand equals the built-in one; sessions dropped by the filter are consumed, counted, and in no
    baseline."""
    keep = "def keep(sessions):\n    return [each.reward is None or each.reward < 9 for each in sessions]\n"
    path = mine(f"{ADVANTAGE}\n{keep}")
    commits: list[CommitRequest] = []
    for parts, rewards in (
        ({"preset": "rloo"}, (1.0, 0.0, 0.5)),
        ({"preset": "rloo", "advantage": f"{path}:advantage", "filter": f"{path}:keep"}, (1.0, 0.0, 0.5, 9.0)),
    ):
        proxy = TrainingProxy(base_model=str(tiny_model), source=rewarded(*rewards))
        batch = {"trajectories": len(rewards)}
        trainer = start(proxy, settings(tmp_path / str(len(commits)), algorithm=parts, batch=batch))
        trainer.loop.resume()
        trainer.loop.step()
        commits.append(proxy.commits[0])
    audits = [commit.step.audit for commit in commits]
    own = sorted((audit for audit in audits[1] if audit.skipped is None), key=lambda audit: audit.reward)
    wanted = sorted(audits[0], key=lambda audit: audit.reward)
    assert [audit.advantage for audit in own] == pytest.approx([audit.advantage for audit in wanted])
    assert [audit.reward for audit in audits[1] if audit.skipped == "filtered"] == [9.0]
    assert commits[1].step.metrics["skipped_filtered"] == 1
    assert commits[1].step.metrics["loss"] == pytest.approx(commits[0].step.metrics["loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("part", "text", "said"),
    [
        ("loss", FAILS_ON_LARGE_ADVANTAGES, "mine.py:4: RuntimeError: too large for me in loss"),
        ("advantage", FAILS_ON_NEGATIVE_REWARDS, "mine.py:5: ValueError: "),
    ],
)
def test_a_function_that_fails_skips_batches_and_then_pauses_the_run(
    tmp_path: Path, mine: Callable[[str], Path], part: str, text: str, said: str
) -> None:
    """With the real proxy: one failure is a counted skip; several in a row pause the run with the reason; a trainer
    restarted with a corrected function learns from the same batches."""
    parts = {part: f"{mine(text)}:{part}", **({"scale": "none"} if part == "loss" else {})}
    given: dict[str, Any] = {"batch": {"trajectories": 2, "at_least": 2}, "optimizer": {"pause_after": 2}}
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        with proxy.trainer(algorithm=parts, **given) as trainer:
            before = trainer.weights()
            proxy.group([-200.0, 0.0])
            trainer.loop.step()
            assert all(weight.equal(before[name]) for name, weight in trainer.weights().items())
            assert proxy.get("")["state"] == "active"
            proxy.group([1.0, 0.0])
            trainer.loop.step()
            assert trainer.loop.head.version == 1
            metrics = proxy.get("/steps/1")["step"]["metrics"]
            assert metrics["skipped_user_function_failed"] == 2
            for _ in range(2):
                proxy.group([-200.0, 0.0], version=1)
                trainer.loop.step()
            assert proxy.get("")["state"] == "paused"
            (problem,) = [each for each in proxy.problems() if "paused" in each]
            assert "2 batches in a row were not learnt from at version 1" in problem
            assert said in problem
            trainer.claims.leave()

        corrected = {**parts, part: f"{mine(CLIPPED + ADVANTAGE)}:{part}"}
        proxy.post("/resume")
        with proxy.trainer("another", algorithm=corrected, **given) as trainer:
            for _ in range(2):
                trainer.loop.step()
            assert trainer.loop.head.version == 3, "the same batches, tried again"
            assert proxy.get("/steps/2")["step"]["metrics"]["skipped_user_function_failed"] == 0


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BASE_RL_TRAINER__API_KEY", TRAINER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_flush_denormal(False)


def replayed(proxy: RealProxy, capsys: pytest.CaptureFixture[str], config: Path | None) -> tuple[int, str]:
    words = [RUN, "1", "--proxy", proxy.url, "--json", "--verify"]
    status = main([*words, "--config", str(config)] if config is not None else words)
    told = capsys.readouterr()
    return status, told.out + told.err


@pytest.mark.usefixtures("process")
def test_a_step_is_replayed_with_the_same_file_only(
    tmp_path: Path, mine: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The record names the file by its hash. The file is executed only if the local configuration names the same
    file: a proxy can never cause a file to be executed."""
    path = mine(CLIPPED + ADVANTAGE)
    config = tmp_path / "run.toml"
    config.write_text('[trainer.algorithm]\nloss = "mine.py:loss"\nadvantage = "mine.py:advantage"\n')
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        with proxy.trainer(algorithm={"loss": f"{path}:loss", "advantage": f"{path}:advantage"}) as trainer:
            proxy.group([1.0, 0.0, 0.5, 0.0])
            trainer.loop.step()
            assert trainer.loop.head.version == 1
        status, told = replayed(proxy, capsys, config)
        assert status == 0, told
        assert json.loads(next(line for line in told.splitlines() if line.startswith("{")))["identical"]

        status, told = replayed(proxy, capsys, None)
        assert status == IMPOSSIBLE
        assert "made with algorithm.loss = mine.py:loss, a file of SHA-256 " in told
        assert "pass the configuration that does by --config" in told

        marker = tmp_path / "executed"
        path.write_text(f"open({str(marker)!r}, 'w').close()\n{CLIPPED}")
        status, told = replayed(proxy, capsys, config)
        assert status == IMPOSSIBLE
        assert f"{path} differs, its SHA-256 is " in told
        assert not marker.exists()


def test_a_record_never_names_a_file_to_read(mine: Callable[[str], Path]) -> None:
    """The record does not contain the directory, and a text in a record is never interpreted as a function."""
    path = mine(CLIPPED)
    written = as_json(resolve(AlgorithmSettings.model_validate({"loss": f"{path}:loss"})))
    assert written["loss"]["file"] == "mine.py"
    assert str(path.parent) not in json.dumps(written)
    with pytest.raises(ConfigurationError, match="does not know these parts of an algorithm"):
        from_json({**written, "loss": f"{path}:loss"})
