"""Groups of actors: what they ask Ray for, and what is refused before anything is placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.cli.cluster.ray.plan import Group, Placing
from proxy.cli.console import Refused
from proxy.settings import ConfigurationError, load_settings

KEYS = {"BASE_RL_ADMIN_KEY": "admin", "BASE_RL_TRAINER__API_KEY": "trainer"}


def groups(
    place: Path,
    *,
    ranks: int | None = None,
    with_trainer: bool = True,
    engine: dict[str, Any] | None = None,
    **ray: Any,
) -> dict[str, Group]:
    overrides: dict[str, dict[str, Any]] = {
        "server": {"data_dir": place / "data"},
        "engine": engine or {"kind": "sglang", "device": "cuda", "replicas": 2, "tensor_parallel": 4},
        "run": {"name": "shop", "model": "somewhere"},
        "ray": ray,
    }
    placing = Placing(
        settings=load_settings(None, overrides),
        config_file=place / "run.toml",
        url="http://head:8080",
        ranks=ranks,
        with_trainer=with_trainer,
        keys=KEYS,
    )
    return {group.name: group for group in placing.groups()}


def test_one_group_for_each_engine_and_one_for_all_ranks(tmp_path: Path) -> None:
    found = groups(tmp_path, trainer_nodes=2, trainer_ranks_per_node=4, trainer_gpus_per_node=4)
    assert list(found) == ["shop-ray-1", "shop-ray-2", "shop-trainer"]
    engine, trainer = found["shop-ray-2"], found["shop-trainer"]
    assert list(engine.bundles) == [{"CPU": 1, "GPU": 4}], "as many GPUs as divide the model"
    assert [(member.name, member.gpus) for member in engine.members] == [("shop-ray-2", 4)]
    assert list(trainer.bundles) == [{"CPU": 4, "GPU": 4}] * 2
    assert [(member.name, member.bundle, member.gpus) for member in trainer.members] == [
        (f"shop-trainer-{rank}", rank // 4, 1) for rank in range(8)
    ]


def test_every_actor_fits_into_its_bundle(tmp_path: Path) -> None:
    for group in groups(tmp_path, trainer_ranks_per_node=3, trainer_cpus_per_rank=2, engine_cpus=5).values():
        for bundle, reserved in enumerate(group.bundles):
            inside = [member for member in group.members if member.bundle == bundle]
            assert sum(member.cpus for member in inside) == reserved["CPU"]
            assert sum(member.gpus for member in inside) == reserved.get("GPU", 0)


def test_further_resources_and_memory_are_those_of_a_node(tmp_path: Path) -> None:
    found = groups(
        tmp_path,
        engine_resources={"fast_disk": 1},
        engine_memory_gib=2,
        trainer_resources={"accelerator_type:H100": 0.001},
        trainer_memory_gib=3,
    )
    assert found["shop-ray-1"].bundles[0] == {"CPU": 1, "fast_disk": 1, "GPU": 4, "memory": 2 * 2**30}
    assert found["shop-trainer"].bundles[0] == {
        "CPU": 1,
        "accelerator_type:H100": 0.001,
        "memory": 3 * 2**30,
    }


def test_ranks_know_their_places(tmp_path: Path) -> None:
    on_cpus = groups(tmp_path, trainer_nodes=2, trainer_ranks_per_node=2)["shop-trainer"]
    found = [(each["RANK"], each["WORLD_SIZE"], each["LOCAL_RANK"]) for each in environments(on_cpus)]
    assert found == [("0", "4", "0"), ("1", "4", "1"), ("2", "4", "0"), ("3", "4", "1")]
    on_gpus = groups(tmp_path, trainer_ranks_per_node=2, trainer_gpus_per_node=2)["shop-trainer"]
    assert [each["LOCAL_RANK"] for each in environments(on_gpus)] == ["0", "0"], "each sees one GPU, its own"


def environments(group: Group) -> list[dict[str, str]]:
    return [member.environment for member in group.members]


def test_each_program_gets_the_key_that_it_needs_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASE_RL_ADMIN_KEY", "admin")
    monkeypatch.setenv("BASE_RL_TRAINER__API_KEY", "trainer")
    monkeypatch.setenv("BASE_RL_RUN__MAX_NEW_TOKENS", "7")
    found = groups(tmp_path)
    engine, trainer = found["shop-ray-1"].environment, found["shop-trainer"].environment
    assert (engine.get("BASE_RL_ADMIN_KEY"), engine.get("BASE_RL_TRAINER__API_KEY")) == ("admin", None)
    assert (trainer.get("BASE_RL_ADMIN_KEY"), trainer.get("BASE_RL_TRAINER__API_KEY")) == (None, "trainer")
    assert engine["BASE_RL_RUN__MAX_NEW_TOKENS"] == trainer["BASE_RL_RUN__MAX_NEW_TOKENS"] == "7"


def test_a_bound_on_micro_batches_does_not_outlive_the_command(tmp_path: Path) -> None:
    first, second = (groups(tmp_path)["shop-trainer"].environment["BASE_RL_TRAINER_RESTARTS"] for _ in range(2))
    assert first != second


def test_another_number_of_ranks_than_the_trainers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"is for 4 processes, and ray\.trainer_nodes"):
        groups(tmp_path, ranks=4, trainer_nodes=2)
    assert "shop-trainer" in groups(tmp_path, ranks=4, trainer_nodes=2, trainer_ranks_per_node=2)
    assert "shop-trainer" not in groups(tmp_path, ranks=4, with_trainer=False)


def test_another_number_of_gpus_than_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="computes on one GPU"):
        groups(tmp_path, trainer_ranks_per_node=2, trainer_gpus_per_node=8)


def test_an_engine_that_ray_cannot_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="Ray can start engines of the kinds embedded and sglang"):
        groups(tmp_path, engine={"kind": "http://somewhere:30000"})


def test_an_amount_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ray\.engine_resources"):
        groups(tmp_path, engine_resources={"fast_disk": 0})
