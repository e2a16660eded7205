"""Learning from a teacher: the embedded engine with another model, in a thread, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from proxy.contract.trajectory import Trajectory
from proxy.engines.embedded.model import ServedModel
from proxy.engines.embedded.residency import AdapterLimits
from proxy.engines.embedded.server import create_app
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.real_proxy import write_real_model
from tests.trainer.tiny import ALONE, draw, group_of, load_tiny, save_tiny_model, settings, trajectory, turn
from trainer.algorithm.contradictions import check_teacher
from trainer.algorithm.presets import resolve
from trainer.batching.grouping import Batch
from trainer.batching.packing import mini_batches
from trainer.batching.sequences import linearise
from trainer.batching.teaching import taught_of
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, TeacherSettings
from trainer.errors import ConfigurationError, TeacherSilent, TeacherUnusable
from trainer.models.huggingface import PolicyModel
from trainer.teacher import Teacher, differing
from trainer.update import Learner


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real_model(tmp_path_factory.mktemp("teacher") / "base")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another model with the same tokens."""
    directory = write_real_model(tmp_path_factory.mktemp("teacher") / "master")
    save_tiny_model(directory, seed=9)
    return directory


@pytest.fixture(scope="module")
def engine(master: Path) -> Iterator[str]:
    """Return the address of a real embedded engine."""
    model = ServedModel(str(master), device="cpu", dtype="float32", seed=0, max_total_tokens=4096)
    limits = AdapterLimits(loaded=0, rank=1)
    app = create_app(model, weight_label="master", max_running=4, max_total_tokens=4096, adapters=limits)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=server.run, name="teacher-engine")
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    (socket,) = server.servers
    yield f"http://127.0.0.1:{socket.sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


@pytest.fixture
def teacher(engine: str) -> Iterator[Teacher]:
    made = Teacher(TeacherSettings(url=engine))
    yield made
    made.close()


def drawn(model: PolicyModel, count: int, *, reward: float = 0.0) -> list[Trajectory]:
    """Sample trajectories of two turns from the policy."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        ((first, logprobs),) = draw(model, (1, 2, 3), 4, generator)
        ((second, later),) = draw(model, (1, 2, 3, *first, 7), 3, generator)
        made.append(
            trajectory(
                turn(first, logprobs=logprobs),
                turn(second, prompt=(7,), parent=0, prefix=7, logprobs=later),
                reward=reward,
            )
        )
    return made


def logprobs_of(model: PolicyModel, members: list[Trajectory]) -> list[float]:
    """Return the log-probability of each token of the trajectories from `drawn`."""
    found: list[float] = []
    inner: Any = model.inner
    for member in members:
        first, second = member.turns
        ids = [*first.prompt_ids, *first.output_ids, *second.prompt_ids, *second.output_ids]
        with torch.no_grad():
            logits_TV = inner(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        places = [*range(3, 7), *range(8, 11)]
        found += [logits_TV[place - 1, ids[place]].item() for place in places]
    return found


def test_it_returns_its_model_s_log_probability_of_each_trained_token(
    base: Path, master: Path, teacher: Teacher
) -> None:
    members = drawn(load_tiny(base), 3)
    teacher.check(base)
    scores = teacher.scores(members, linearise(members))
    found = [value for index in range(3) for number in range(2) for value in scores[index, number]]
    assert found == pytest.approx(logprobs_of(load_tiny(master), members), abs=1e-4)


def step(base: Path, teacher: Teacher, members: list[Trajectory], **parts: Any) -> tuple[Any, PolicyModel]:
    model = load_tiny(base)
    algorithm = resolve(AlgorithmSettings.model_validate({"preset": "distillation", **parts}))
    batch = Batch(trajectories=tuple(members), groups=tuple(range(len(members))), base_version=0)
    sequences = linearise(members)
    small = BatchSettings(max_tokens_per_microbatch=24)
    packed = mini_batches(batch, [(0.0, 0.0)] * len(members), sequences, small, algorithm)
    learner = Learner(model, algorithm, OptimizerSettings(learning_rate=3e-4), ALONE)
    return learner.update(packed, teacher.scores(members, sequences)), model


def test_a_step_moves_towards_the_teacher_without_any_reward(base: Path, master: Path, teacher: Teacher) -> None:
    """The loss is the mean of logp − teacher, which estimates the divergence; over many samples it falls."""
    members = drawn(load_tiny(base), 24)
    outcome, after = step(base, teacher, members)
    before = load_tiny(base)
    apart = torch.tensor(logprobs_of(before, members)) - torch.tensor(logprobs_of(load_tiny(master), members))
    assert outcome.loss == pytest.approx(apart.mean().item(), abs=1e-4)
    assert divergence(after, load_tiny(master)) < divergence(before, load_tiny(master)) - 1e-3


def divergence(model: PolicyModel, master: PolicyModel) -> float:
    """Return KL(model ‖ master) of the full distributions after a few prompts."""
    ids = torch.tensor([[1, 2, 3, token] for token in range(16)])
    inner, other = (each.inner(input_ids=ids, use_cache=False).logits.log_softmax(-1) for each in (model, master))
    return float((inner.exp() * (inner - other)).sum(-1).mean().detach())


def test_the_coefficients_weight_both_parts(base: Path, teacher: Teacher) -> None:
    members = drawn(load_tiny(base), 4)
    once, _ = step(base, teacher, members)
    twice, _ = step(base, teacher, members, distill_coefficient=2.0)
    assert twice.loss == pytest.approx(2 * once.loss, rel=1e-5)
    assert twice.gradient_norm == pytest.approx(2 * once.gradient_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("parts", "share"), [({"distill_coefficient": 0.5, "mini_batches": 1}, 0.5), ({"preset": "distillation"}, 1.0)]
)
def test_the_loop_learns_from_a_teacher_without_a_signal_in_rewards(
    base: Path, engine: str, start: Start, tmp_path: Path, parts: dict[str, Any], share: float
) -> None:
    """The loop learns from a teacher beside equal rewards, and with any rewards if the teacher is used alone."""
    members = drawn(load_tiny(base), 4, reward=1.0)
    proxy = TrainingProxy(base_model=str(base))
    proxy.offer([group_of(members)])
    told = {"algorithm": parts, "teacher": {"url": engine}}
    trainer = start(proxy, settings(tmp_path, **told))
    trainer.loop.resume()
    trainer.loop.step()
    (commit,) = proxy.commits
    assert commit.step.metrics["loss"] == pytest.approx(share * commit.step.metrics["kl_teacher"], abs=1e-4)
    assert commit.step.metrics["skipped_no_signal"] == 0.0


def test_another_tokenizer_is_refused_with_a_token_that_differs(base: Path, engine: str, tmp_path: Path) -> None:
    other = json.loads((base / "tokenizer.json").read_text())
    added = {each["content"] for each in other["added_tokens"]}
    token, number = next(each for each in other["model"]["vocab"].items() if each[0] not in added)
    other["model"]["vocab"][token] = number + 100_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    told = Teacher(TeacherSettings(url=engine, tokenizer=tmp_path))
    with pytest.raises(ConfigurationError, match="other tokens than the policy"):
        told.check(base)
    told.close()
    nowhere = Teacher(TeacherSettings(url=engine, tokenizer=tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match=r"trainer\.teacher\.tokenizer"):
        nowhere.check(base)
    nowhere.close()
    assert differing({"a": 1}, {"a": 1, "b": 2}) is None


def test_a_teacher_that_is_down_is_waited_for_and_one_that_refuses_is_not(base: Path) -> None:
    answers = [httpx.Response(503), httpx.Response(400, text="too long")]
    pauses: list[float] = []
    made = Teacher(
        TeacherSettings(url="http://teacher"),
        transport=httpx.MockTransport(lambda _: answers.pop(0)),
        pause=pauses.append,
    )
    members = [trajectory(turn([5, 6]))]
    with pytest.raises(TeacherUnusable, match="too long"):
        made.scores(members, linearise(members))
    assert pauses == [0.2]
    made.close()


def test_a_teacher_that_is_down_ends_the_wait_if_other_ranks_wait(base: Path) -> None:
    down = Teacher(
        TeacherSettings(url="http://teacher"),
        transport=httpx.MockTransport(lambda _: httpx.Response(503, text="soon")),
    )
    down.patience = 0.0
    with pytest.raises(TeacherSilent, match="503: soon"):
        down.check(base)
    down.close()


def test_a_coefficient_and_a_teacher_go_together() -> None:
    for parts, url, said in (
        ({"distill_coefficient": 0.1}, None, r'\[trainer\.teacher\]\nurl = "http'),
        ({"preset": "distillation"}, None, r'\[trainer\.teacher\]\nurl = "http'),
        ({}, "http://teacher", 'preset = "distillation"'),
    ):
        with pytest.raises(ConfigurationError, match=said):
            check_teacher(TeacherSettings(url=url), resolve(AlgorithmSettings.model_validate(parts)))
    check_teacher(TeacherSettings(url="http://teacher"), resolve(AlgorithmSettings(preset="distillation")))


def test_the_teacher_scores_only_trained_tokens() -> None:
    scores = {(0, 0): [-1.0, -2.0], (0, 2): [-3.0], (1, 0): [-4.0, -5.0]}
    trajectory_N, turn_N = torch.tensor([1, 1, 0, 0, 0]), torch.tensor([0, 0, 0, 0, 2])
    assert taught_of(trajectory_N, turn_N, scores).tolist() == [-4.0, -5.0, -1.0, -2.0, -3.0]
    assert taught_of(trajectory_N[:0], turn_N[:0], scores).tolist() == []
