from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.__main__ import main
from trainer.algorithm.presets import PRESETS, resolve
from trainer.config import AlgorithmSettings, Baseline, Scale, load_runs, load_settings, parse_assignment
from trainer.errors import ConfigurationError
from trainer.observe.metrics.sinks import check_directories

FILE = """
[run]
name = "calculator"

[server]
data_dir = "/srv/base-rl"

[trainer]
seed = 3
batch = { trajectories = 64 }

[trainer.algorithm]
clip_low = 0.1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_precedence_is_command_line_environment_file_default(file: Path) -> None:
    environment = {"BASE_RL_TRAINER__SEED": "4", "BASE_RL_TRAINER__BATCH__AT_LEAST": "3", "BASE_RL_SERVER__PORT": "1"}
    settings = load_settings(file, {"seed": 5}, environment)
    assert settings.seed == 5
    assert (settings.batch.trajectories, settings.batch.at_least, settings.batch.max_staleness) == (64, 3, 4)


def test_run_and_directory_follow_the_proxys_sections(file: Path) -> None:
    settings = load_settings(file, None, {})
    assert settings.run == "calculator"
    assert settings.weights.directory == Path("/srv/base-rl/weights")
    assert load_settings(file, {"run": "other"}, {"BASE_RL_SERVER__DATA_DIR": "/x"}).weights.directory == Path(
        "/x/weights"
    )


def test_lists_and_null_from_the_environment(file: Path) -> None:
    environment = {"BASE_RL_TRAINER__OPTIMIZER__BETAS": "[0.8, 0.9]", "BASE_RL_TRAINER__THREADS": "null"}
    settings = load_settings(file, None, environment)
    assert settings.optimizer.betas == (0.8, 0.9)
    assert settings.threads is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"btach": {}}, "trainer.btach: no such option"),
        ({"batch": {"size": 3}}, "trainer.batch.size: no such option"),
        ({"precision": "half"}, "trainer.precision: Input should be 'float32' or 'bfloat16'"),
        ({"algorithm": {"baseline": "mean"}}, "trainer.algorithm.baseline: Input should be 'group_mean'"),
        ({"batch": {"trajectories": 2, "at_least": 3}}, "at_least (3) cannot exceed trajectories (2)"),
        (
            {"batch": {"packing": "packed", "row_tokens": 99999}},
            "row_tokens (99999) cannot exceed max_tokens_per_microbatch",
        ),
        ({"batch": {"row_tokens": 64}}, "leave it out, or set packing = packed"),
        ({"algorithm": {"reward": {"low": 1.0, "high": 0.0}}}, "low (1.0) must be below high (0.0)"),
        (
            {"weights": {"type": "network"}},
            "trainer.weights: type should be 'disk', 'delta', 'tensors' or 'collective'",
        ),
        (
            {"weights": {"type": "tensors", "url": "s3://bucket"}},
            "trainer.weights.url: Value error, versions in an object store are for engines elsewhere",
        ),
        ({"weights": {"full_every": 5}}, "trainer.weights.full_every: no such option"),
        ({"weights": {"type": "delta", "full_every": 1}}, "trainer.weights.full_every: Input should be greater"),
        ({"optimizer": {"learning_rate": 0}}, "trainer.optimizer.learning_rate: Input should be greater than 0"),
    ],
)
def test_a_wrong_key_is_named_with_what_it_accepts(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_settings(None, overrides, {})
    assert message in str(raised.value)


def test_the_environment_cannot_name_what_does_not_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.batch\.sise: no such option"):
        load_settings(None, None, {"BASE_RL_TRAINER__BATCH__SISE": "1"})


@pytest.mark.parametrize("content", [b"trainer = 3", b"[trainer", b'run = "\xff"', None])
def test_an_unreadable_file_is_a_configuration_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError):
        load_settings(path, None, {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "ppg"}, "'ppg' is not one of: grpo"),
        ({"baseline": "none"}, "group_std divides by the spread"),
        ({"baseline": "running_mean", "scale": "group_std"}, "group_std divides by the spread"),
        ({"dual_clip": 1.2}, "must be above 1 \\+ clip_high"),
    ],
)
def test_contradictory_parts_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(AlgorithmSettings.model_validate(values))


def test_any_part_of_a_preset_can_be_replaced() -> None:
    algorithm = resolve(AlgorithmSettings(baseline=Baseline.LEAVE_ONE_OUT, scale=Scale.NONE, clip_high=0.3))
    assert (algorithm.baseline, algorithm.scale, algorithm.clip_high) == ("leave_one_out", "none", 0.3)
    assert algorithm.clip_low == PRESETS["grpo"].clip_low


def test_the_config_hash_covers_what_affects_the_weights() -> None:
    base = load_settings(None, {}, {})
    assert load_settings(None, {"proxy_url": "http://x", "api_key": "k", "threads": 3}, {}).config_hash() == (
        base.config_hash()
    )
    assert load_settings(None, {"optimizer": {"eps": 1e-6}}, {}).config_hash() != base.config_hash()


def test_assignments_of_the_command_line() -> None:
    assert parse_assignment("batch.trajectories=64") == {"batch": {"trajectories": "64"}}
    assert parse_assignment("optimizer.betas=[0.5, 0.6]") == {"optimizer": {"betas": [0.5, 0.6]}}
    with pytest.raises(ConfigurationError):
        parse_assignment("batch.trajectories")


def test_a_secret_is_read_from_a_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, name = tmp_path / "key", tmp_path / "name"
    key.write_text("rl-secret\n")
    name.write_text("coder\n")
    monkeypatch.setenv("BASE_RL_TRAINER__API_KEY_FILE", str(key))
    monkeypatch.setenv("BASE_RL_RUN__NAME_FILE", str(name))
    settings = load_settings(file)
    assert settings.api_key is not None
    assert (settings.api_key.get_secret_value(), settings.run) == ("rl-secret", "coder")
    key.unlink()
    with pytest.raises(ConfigurationError, match=r"^BASE_RL_TRAINER__API_KEY_FILE: cannot read .*: No such file"):
        load_settings(file)


def test_dry_run_prints_the_resolved_configuration_without_secrets(file: Path) -> None:
    command = [sys.executable, "-m", "trainer", "--config", str(file), "--dry-run", "--set", "api_key=rl-secret"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = json.loads(done.stdout)
    assert printed["algorithm"]["baseline"] == "group_mean"
    assert printed["algorithm"]["clip_low"] == 0.1
    assert printed["batch"]["trajectories"] == 64
    assert "rl-secret" not in done.stdout


def test_a_wrong_configuration_ends_with_status_2(file: Path) -> None:
    command = [sys.executable, "-m", "trainer", "--config", str(file), "--set", "algorithm.scale=mean"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "trainer.algorithm.scale: Input should be 'group_std', 'batch_std'" in done.stderr


_MAIN_TOLD = """
import json, sys
from trainer.__main__ import main
statuses = [main(words) for words in json.loads(sys.argv[1])]
print(json.dumps({"statuses": statuses, "torch": "torch" in sys.modules}))
"""


def test_errors_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    """Importing torch takes seconds, so errors are reported before."""
    (tmp_path / "there").touch()
    told = [
        (0, ["--dry-run"], ""),
        (2, ["--set", "batch.size=3"], "trainer.batch.size: no such option"),
        (2, ["--set", "algorithm.preset=gpro"], "'gpro' is not one of"),
        (2, ["--set", "algorithm.preset=distillation"], "[trainer.teacher]"),
        (2, ["--set", "backend=archon", "--set", "layout=d2q2"], "there is no axis q"),
        (2, ["--set", "backend=archon", "--set", "layout=d2t2"], "d2t2 is for 4 processes"),
        (2, ["--set", "nproc=2"], "trainer.nproc is 2"),
        (2, ["fit", "sft"], "say which sessions"),
        (2, ["fit", "reward-model", "--output", str(tmp_path)], "is there and not empty"),
    ]
    command = [sys.executable, "-c", _MAIN_TOLD, json.dumps([words for _, words, _ in told])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"statuses": [status for status, _, _ in told], "torch": False}
    for _, words, said in told:
        assert said in done.stderr, words


def test_a_layout_belongs_to_archon() -> None:
    with pytest.raises(ConfigurationError, match=r"layout belongs to backend = \"archon\""):
        load_settings(None, {"layout": "d2", "backend": "fsdp"}, {})
    assert load_settings(None, {"layout": "d2", "backend": "archon"}, {}).layout == "d2"
    assert load_settings(None, {"layout": "d2"}, {}).backend == "archon"
    assert load_settings(None, {"layout": None}, {}).backend == "fsdp"


def test_a_layout_that_cannot_be_read_is_refused_before_anything_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--set", "backend=archon", "--set", "layout=d2q2", "--dry-run"]) == 2
    assert "trainer.layout: 'd2q2': there is no axis q" in capsys.readouterr().err


SEVERAL = """
[run]
name = "calculator"

[trainer]
seed = 3
batch = { trajectories = 64, at_least = 4 }

[trainer.runs.shop]
proxy_url = "http://shop:8080"
api_key = "k-shop"
batch = { trajectories = 32 }

[trainer.runs.travel]
run = "policy"
algorithm = { preset = "rloo" }
"""


@pytest.fixture
def several(tmp_path: Path) -> Path:
    path = tmp_path / "several.toml"
    path.write_text(SEVERAL)
    return path


def test_settings_of_a_run_override_those_of_all_runs(several: Path) -> None:
    environment = {"BASE_RL_TRAINER__RUNS__TRAVEL__API_KEY": "k-travel", "BASE_RL_TRAINER__SEED": "4"}
    overrides = {"batch": {"at_least": "8", "trajectories": "16"}, "runs": {"travel": {"seed": "5"}}}
    runs = load_runs(several, overrides, environment)
    assert list(runs) == ["shop", "travel"]
    shop, travel = runs.values()
    assert (shop.run, shop.proxy_url, shop.seed) == ("shop", "http://shop:8080", 4)
    assert (travel.run, travel.proxy_url, travel.seed) == ("policy", "http://127.0.0.1:8080", 5)
    assert [run.api_key.get_secret_value() for run in (shop, travel)] == ["k-shop", "k-travel"]
    # Settings of one run take precedence over settings of all runs, in every layer.
    assert [run.batch.trajectories for run in (shop, travel)] == [32, 16]
    assert [run.batch.at_least for run in (shop, travel)] == [8, 8]
    assert [run.algorithm.preset for run in (shop, travel)] == ["grpo", "rloo"]


def test_settings_of_one_run_do_not_affect_another(several: Path) -> None:
    shop = load_runs(several, {}, {})["shop"]
    alone = load_settings(None, {"seed": 3, "batch": {"trajectories": 32, "at_least": 4}}, {})
    assert shop.config_hash() == alone.config_hash()


def test_only_chosen_runs_are_trained(several: Path, file: Path) -> None:
    assert list(load_runs(several, {}, {}, ["travel"])) == ["travel"]
    assert [run.run for run in load_runs(file, {}, {}, ["b", "a"]).values()] == ["b", "a"]
    assert [run.run for run in load_runs(file, {}, {}).values()] == ["calculator"]
    # A command about one run uses that run's section.
    assert load_settings(several, {"run": "shop"}, {}).batch.trajectories == 32
    assert load_settings(several, {"run": "other"}, {}).batch.trajectories == 64


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"runs": {"shop": {"batch": {"size": 3}}}}, "trainer.runs.shop.batch.size: no such option"),
        (
            {"runs": {"shop": {"batch": {"at_least": 99}}}},
            "trainer.runs.shop.batch: Value error, at_least (99)",
        ),
        (
            {"runs": {"shop": {"layout": "d2", "backend": "fsdp"}}},
            "trainer.runs.shop: Value error, layout belongs to backend",
        ),
        ({"optimizer": {"eps": 0}}, "trainer.optimizer.eps: Input should be greater than 0"),
        (
            {"runs": {"shop": {"threads": 2}}},
            "trainer.runs.shop.threads: is the same for all runs",
        ),
        ({"runs": {"travel": {"proxy_url": "http://h"}}}, "trainer.runs.travel.api_key: must be given"),
        ({"runs": {"travel": 3}}, "trainer.runs.travel: must be a section"),
        ({"runs": ["a", "b"]}, "trainer.runs: write a section for each run"),
        ({"run": "other"}, "trainer.run: 'other' is not one of trainer.runs (shop, travel)"),
        ({"runs": {"again": {"run": "policy"}}}, "trainer.runs.again: is trainer.runs.travel, the run 'policy' of"),
    ],
)
def test_an_error_in_one_of_several_runs_names_it(several: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_runs(several, overrides, {})
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_naming_a_configured_run_is_not_an_error(several: Path) -> None:
    """`base-rl up` names the run that it serves."""
    assert len(load_runs(several, {"run": "policy"}, {})) == 2


def test_contradictory_parts_of_one_of_several_runs_name_it(
    several: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(several), "--set", "runs.shop.algorithm.scale=none", "--dry-run"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["runs"]["shop"]["algorithm"]["scale"] == "none"
    assert "threads" in resolved
    assert "threads" not in resolved["runs"]["shop"]
    assert main(["--config", str(several), "--set", "runs.shop.algorithm.baseline=none", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("run shop: trainer.algorithm")


def test_trackio_has_one_directory_for_all_runs(several: Path) -> None:
    given: dict[str, Any] = {"metrics": {"sinks": ["trackio"], "directory": "/a"}}
    check_directories([run.metrics for run in load_runs(several, given, {}).values()])
    given["runs"] = {"shop": {"metrics": {"directory": "/b"}}}
    with pytest.raises(ConfigurationError, match="trackio has one directory in a process"):
        check_directories([run.metrics for run in load_runs(several, given, {}).values()])


def test_a_layout_determines_the_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "layout=d2t2", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["nproc"] == 4
    assert main(["--set", "layout=d2t2", "--set", "nproc=6", "--dry-run"]) == 2
    said = "d2t2 is for 4 processes, and nproc is 6; leave nproc out, or write d3t2"
    assert f"trainer.layout: {said}" in capsys.readouterr().err
