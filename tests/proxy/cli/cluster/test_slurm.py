"""Batch scripts: what they ask Slurm for, and what is refused before anything is submitted."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.cluster.slurm import Job, jobs_of
from proxy.cli.console import Refused
from proxy.settings import ConfigurationError, load_settings


def jobs(place: Path, *, ranks: int | None = None, with_trainer: bool = True, **slurm: Any) -> dict[str, Job]:
    overrides: dict[str, dict[str, Any]] = {
        "server": {"data_dir": place / "data"},
        "engine": {"kind": "sglang", "device": "cuda", "replicas": 2, "tensor_parallel": 4},
        "run": {"name": "shop", "model": "somewhere"},
        "slurm": slurm,
    }
    found = jobs_of(
        load_settings(None, overrides),
        config_file=place / "run.toml",
        url="http://login:8080",
        ranks=ranks,
        with_trainer=with_trainer,
        working_dir=place,
    )
    return {job.name: job for job in found}


def options(job: Job) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in job.script.splitlines() if line.startswith("#SBATCH ")]


def test_one_job_for_each_engine_and_one_for_all_ranks(tmp_path: Path) -> None:
    found = jobs(tmp_path, trainer_nodes=2, trainer_ranks_per_node=8, trainer_gpus_per_node=8, partition="gpu")
    assert list(found) == ["shop-slurm-1", "shop-slurm-2", "shop-trainer"]
    for job in found.values():
        assert subprocess.run(["bash", "-n"], input=job.script, text=True, check=False).returncode == 0
        assert {"--requeue", "--time=1440", "--signal=B:USR1@120", "--partition=gpu"} <= set(options(job))
    assert {"--nodes=1", "--gres=gpu:4"} <= set(options(found["shop-slurm-1"])), "as many as divide the model"
    assert {"--nodes=2", "--ntasks-per-node=8", "--gres=gpu:8"} <= set(options(found["shop-trainer"]))


def test_further_options_and_lines_are_in_every_script(tmp_path: Path) -> None:
    for job in jobs(tmp_path, options=["--qos=high"], setup=["module load cuda"]).values():
        assert "--qos=high" in options(job)
        assert "\nmodule load cuda\n" in job.script


def test_an_option_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"slurm.options"):
        jobs(tmp_path, options=["--qos=high\nrm -rf /"])


def test_a_directory_that_slurm_reads_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="without them"):
        jobs(tmp_path, directory=str(tmp_path / "my jobs"))


def test_another_number_of_ranks_than_the_trainers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is for 4 processes"):
        jobs(tmp_path, ranks=4, trainer_nodes=2)
    assert "shop-trainer" in jobs(tmp_path, ranks=4, trainer_nodes=2, trainer_ranks_per_node=2)
    assert "shop-trainer" not in jobs(tmp_path, ranks=4, with_trainer=False)


def test_an_engine_that_slurm_cannot_start_is_refused(tmp_path: Path) -> None:
    settings = load_settings(None, {"engine": {"kind": "http://somewhere:30000"}})
    with pytest.raises(Refused, match="embedded and sglang"):
        jobs_of(settings, config_file=tmp_path, url="", ranks=None, with_trainer=False, working_dir=tmp_path)
