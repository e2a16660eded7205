"""A data directory stores the options with which it was started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cli.remembered import (
    FILE_NAME,
    StartOptions,
    described,
    merged,
    read_remembered,
    remember,
    worth_remembering,
)
from proxy.settings import ConfigurationError

KEYS = [("run", "model"), ("run", "name"), ("engine", "kind"), ("server", "host"), ("server", "port")]
VALUES: dict[str, st.SearchStrategy[Any]] = {"port": st.integers(0, 65535)}


@st.composite
def options(draw: st.DrawFn) -> StartOptions:
    overrides: dict[str, dict[str, Any]] = {}
    for section, key in draw(st.lists(st.sampled_from(KEYS), unique=True)):
        overrides.setdefault(section, {})[key] = draw(VALUES.get(key, st.text("abc", min_size=1)))
    return StartOptions(
        overrides=overrides,
        trainer=draw(st.none() | st.booleans()),
        nproc=draw(st.none() | st.integers(1, 8)),
        seed=draw(st.none() | st.integers(0, 9)),
    )


@given(options())
def test_stored_options_are_the_given_ones(tmp_path_factory: pytest.TempPathFactory, given_: StartOptions) -> None:
    directory = tmp_path_factory.mktemp("data")
    remember(directory, given_)
    assert read_remembered(directory) == given_
    assert (directory / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in directory.iterdir()] == [FILE_NAME]


@given(options(), options())
def test_given_options_override_stored_ones(now: StartOptions, before: StartOptions) -> None:
    both = merged(now, before, {})
    for section, key in KEYS:
        mine, theirs = now.overrides.get(section, {}), before.overrides.get(section, {})
        assert both.overrides.get(section, {}).get(key) == mine.get(key, theirs.get(key))
    assert both.seed == (before.seed if now.seed is None else now.seed)
    assert merged(StartOptions(), both, {}) == both


def test_environment_and_a_newly_named_file_override_stored_options(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[server]\nport = 3\n")
    before = StartOptions(overrides={"server": {"port": 1, "host": "h"}, "run": {"name": "a"}})
    assert merged(StartOptions(), before, {"BASE_RL_SERVER__PORT": "2"}).overrides == {
        "server": {"host": "h"},
        "run": {"name": "a"},
    }
    assert merged(StartOptions(config=file), before, {}).overrides["server"] == {"host": "h"}
    of_the_file = StartOptions(config=file, overrides=before.overrides)  # as before
    assert merged(StartOptions(), of_the_file, {}).overrides["server"] == {"port": 1, "host": "h"}


def test_paths_hold_from_another_directory_and_the_environment_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    given_ = StartOptions(overrides={"run": {"model": "./my-model"}, "server": {"data_dir": Path("d")}})
    kept = worth_remembering(given_, {"BASE_RL_RUN__NAME": "shop", "BASE_RL_TRAINER__API_KEY": "secret"})
    assert kept.overrides == {"run": {"model": str(tmp_path / "my-model"), "name": "shop"}}
    assert described(kept) == f"--model {tmp_path / 'my-model'} --run shop"


def test_another_engine_forgets_the_script(tmp_path: Path) -> None:
    before = StartOptions(overrides={"engine": {"kind": "scripted", "script": "s.toml"}})
    now = StartOptions(overrides={"engine": {"kind": "embedded"}})
    assert merged(now, before, {}).overrides == {"engine": {"kind": "embedded"}}


def test_a_directory_that_was_never_started_remembers_nothing(tmp_path: Path) -> None:
    assert read_remembered(tmp_path) is None


def test_a_damaged_file_is_reported_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    with pytest.raises(ConfigurationError, match=r"started\.json cannot be read .*: remove it"):
        read_remembered(tmp_path)
