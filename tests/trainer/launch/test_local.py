"""The launcher of several ranks reports the first rank that ended, and why. Neither the launcher nor its ranks
outlive the other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.trainer.forked import context
from trainer.errors import ConfigurationError
from trainer.launch.local import first_cause, main
from trainer.parallel.mesh import join
from trainer.runtime.restarts import EndReport, Restarts

MODULE = "tests.trainer.ranks_that_end"

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("forked")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for rank in "01":
        os.mkfifo(tmp_path / rank)
    return tmp_path


def launch(how: str, directory: Path) -> None:
    with (directory / "log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    sys.exit(main(["2", how, str(directory)], MODULE))


@contextmanager
def launched(how: str, directory: Path) -> Iterator[ForkServerProcess]:
    process = context().Process(target=launch, args=(how, directory))
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join()


def test_a_rank_that_refuses_is_named_and_the_other_reports_the_loss(directory: Path) -> None:
    with launched("refuses", directory) as process:
        process.join(200)
        assert process.exitcode == 2, "as of a trainer that is one process"
    *before, last = (directory / "log").read_text().splitlines()
    assert last == "base-rl: rank 1 cannot go on: trainer.device: no such thing at this rank"
    (lost,) = [each for each in map(json.loads, before) if each["event"] == "ended, as another rank did"]
    assert (lost["rank"], lost["reason"]) == (1, "trainer.device: no such thing at this rank")


def test_a_killed_rank_is_named(directory: Path) -> None:
    with launched("dies", directory) as process:
        process.join(200)
        assert process.exitcode == 1
    last = (directory / "log").read_text().splitlines()[-1]
    assert last == "base-rl: rank 1 was killed by SIGKILL, and the others ended with it"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_ranks_end_with_a_launcher_that_is_killed(directory: Path) -> None:
    with launched("waits", directory) as process:
        ranks = [psutil.Process(int((directory / rank).read_text())) for rank in "01"]
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=100)
        assert alive == []


def failures(*exit_codes: int) -> ChildFailedError:
    """Return failures of ranks that ended within the same second."""
    found = {}
    for rank, code in enumerate(exit_codes):
        found[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        found[rank].timestamp = 7
    return ChildFailedError("trainer", found)


@pytest.mark.parametrize(
    ("codes", "status", "said"),
    [
        ((1, -9), 1, "rank 1 was killed by SIGKILL"),
        ((-15, 3), 3, "rank 1 ended with status 3"),
        ((2, 1), 2, "rank 0 ended with status 2"),
    ],
)
def test_the_causing_failure_is_distinguished_from_its_consequences(
    tmp_path: Path, codes: tuple[int, int], status: int, said: str
) -> None:
    found, reason = first_cause(failures(*codes), Restarts(tmp_path))
    assert (found, reason.partition(",")[0]) == (status, said)


def test_the_first_reported_failure_counts(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path)
    assert restarts.first_report() is None
    first = EndReport(rank=1, status=2, reason="why")
    restarts.report(first)
    restarts.report(EndReport(rank=0, status=1, reason="as rank 1 is gone"))
    assert restarts.first_report() == first
    assert first_cause(failures(1, 2), restarts) == (2, "rank 1 cannot go on: why")


def test_more_processes_than_devices_are_refused_at_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal comes before ranks that have a device wait for the others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(ConfigurationError, match="3 processes run on this machine, and torch finds 2 CUDA"):
            join("auto")
