"""Settings that a run has at its proxy, and the options that choose runs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import ALONE, settings
from trainer import assembly
from trainer.__main__ import main
from trainer.assembly import RunTrainer, Shared, begin
from trainer.config import AdapterPublish, Configuration, TrainerSettings
from trainer.errors import ConfigurationError
from trainer.models.adapters import AdaptedPolicy
from trainer.proxy_client import ProxyClient

FILE = """
[trainer]
seed = 1
batch = { trajectories = 64, at_least = 4 }
optimizer = { learning_rate = 1e-4 }

[trainer.runs.shop]
batch = { trajectories = 32 }
"""


def head(name: str = "shop", kind: str = "full", **table: Any) -> Head:
    run_id = RunId("run_1")
    base = {"version": 0, "base_model": "base", "weights": None}
    return Head(run_id=run_id, run_name=name, weights_kind=kind, trainer=table, **base)  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trainer.toml"
    path.write_text(FILE)
    return path


def test_a_runs_own_settings_are_over_the_files_and_under_all_others(file: Path) -> None:
    table: dict[str, Any] = {
        "seed": 2,
        "weight": 3.0,
        "batch": {"trajectories": 16, "at_least": 8, "max_staleness": 7},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
        "algorithm": {"preset": "rloo"},
    }
    environment = {"BASE_RL_TRAINER__BATCH__AT_LEAST": "9"}
    configuration = Configuration(file, {"optimizer": {"learning_rate": 1e-2}}, environment)
    found = configuration.of_run("shop", head(**table))
    assert (found.run, found.seed, found.weight, found.algorithm.preset) == ("shop", 2, 3.0, "rloo")
    assert (found.batch.trajectories, found.batch.at_least, found.batch.max_staleness) == (32, 9, 7)
    assert (found.optimizer.learning_rate, found.optimizer.weight_decay) == (1e-2, 0.1)
    assert configuration.of_run("other", head("other", **table)).batch.trajectories == 16


def test_a_run_without_a_table_has_the_settings_of_before(file: Path) -> None:
    configuration = Configuration(file, {}, {})
    assert configuration.of_run("shop", head()) == configuration.runs()["shop"]
    assert Configuration(None, {"run": "a"}, {}).alone(head("a")) == Configuration(None, {}, {}).of_run("a")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"optimiser": {}}, "run 'shop' at its proxy: trainer.optimiser: no such option"),
        ({"batch": {"size": 3}}, "run 'shop' at its proxy: trainer.batch.size: no such option"),
        ({"weight": 0}, "run 'shop' at its proxy: trainer.weight: Input should be greater than 0"),
        ({"api_key": "k"}, "run 'shop' at its proxy: trainer.api_key: belongs to the trainer's machine"),
        ({"weights": {"directory": "/"}}, "run 'shop' at its proxy: trainer.weights: belongs to the trainer's"),
        ({"nproc": 2}, "run 'shop' at its proxy: trainer.nproc: belongs to the trainer's machine"),
        (
            {"algorithm": {"loss": "/x.py:f"}},
            "run 'shop' at its proxy: trainer.algorithm.loss: a function of",
        ),
    ],
)
def test_what_is_wrong_with_a_runs_own_settings_names_the_run(
    file: Path, table: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Configuration(file, {}, {}).of_run("shop", head(**table))
    assert str(raised.value).startswith(message)


def test_a_run_of_adapters_is_trained_with_one() -> None:
    configuration = Configuration(None, {}, {})
    assert configuration.of_run("shop", head()).adapter is None
    found = configuration.of_run("shop", head(kind="adapter")).adapter
    assert found is not None
    assert (found.rank, found.publish) == (16, AdapterPublish.ADAPTER)
    own = configuration.of_run("shop", head(kind="adapter", adapter={"rank": 4})).adapter
    assert own is not None
    assert own.rank == 4


@pytest.mark.parametrize("changes", [{"backend": "archon"}, {"layout": "d2"}])
def test_whole_weights_by_archon_contradict_a_run_of_adapters(changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(ConfigurationError, match=rf"trainer\.{key}: the run 'shop' .* remove {key}, or create a run"):
        Configuration(None, changes, {}).of_run("shop", head(kind="adapter"))


def started(
    proxy: TrainingProxy, local: TrainerSettings, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> RunTrainer:
    """Begin a run as a process does, at the fake proxy."""
    made = partial(ProxyClient, transport=proxy.transport(), pause=lambda _: None)
    monkeypatch.setattr(assembly, "ProxyClient", made)
    values = {"weights": {"directory": str(directory)}, "api_key": local.api_key.get_secret_value()}
    configuration = Configuration(None, {**values, "batch": {"trajectories": 8, "wait_seconds": 0.1}}, {})
    resolve = partial(configuration.of_run, local.run)
    return begin(local.run, local, ALONE, "a-process", Shared(ALONE.device), resolve=resolve)


def test_a_trainer_takes_over_what_the_run_says(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups(), weights_kind="adapter")
    proxy.trainer = {"weight": 2, "adapter": {"rank": 3}, "mismatch": {"warn_above": 0, "pause_above": 0}}
    run = started(proxy, settings(tmp_path), tmp_path, monkeypatch)
    with ExitStack() as ending:
        ending.callback(run.ending.close)
        assert run.weight == 2
        assert isinstance(run.model, AdaptedPolicy)
        run.loop.resume()
        run.loop.step()
    (commit,) = proxy.commits
    assert commit.weights.format == "adapter"
    assert json.loads((Path(commit.weights.uri) / "adapter_config.json").read_text())["r"] == 3


def test_a_wrong_setting_of_a_run_is_an_error_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = TrainingProxy(base_model="/nowhere", trainer={"batsh": {}})
    with pytest.raises(ConfigurationError, match="batsh: no such option"):
        started(proxy, settings(tmp_path), tmp_path, monkeypatch)


def test_runs_are_chosen_by_lists_and_single_names(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(file), "--dry-run"]
    assert main([*words, "--run", "a", "--runs", "shop, b", "--runs", "a"]) == 0
    assert list(json.loads(capsys.readouterr().out)["runs"]) == ["a", "shop", "b"]
    assert main([*words, "--runs", "all"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert (everything["run"], everything["batch"]["trajectories"]) == (None, 64)


@pytest.mark.parametrize(("option", "message"), [("all,a", "every active run"), ("a,,b", "write names with")])
def test_lists_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str], option: str, message: str) -> None:
    assert main(["--runs", option, "--dry-run"]) == 2
    assert message in capsys.readouterr().err
