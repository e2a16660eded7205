from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.tiny import InProcess, build, save_tiny_model
from trainer.config import TrainerSettings


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory)
    return directory


Start = Callable[[TrainingProxy, TrainerSettings], InProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Build in-process trainers whose threads end with the test."""
    started: list[InProcess] = []

    def start_one(proxy: TrainingProxy, configured: TrainerSettings) -> InProcess:
        trainer = build(proxy, configured)
        started.append(trainer)
        return trainer

    yield start_one
    for trainer in started:
        trainer.parts.ending.close()
