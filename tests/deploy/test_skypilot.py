"""The commands of deploy/skypilot.yaml exist here, with the versions that are tested. It was never launched."""

from __future__ import annotations

import importlib
import re
import tomllib
from typing import Any

from proxy.engines.launch import SGLANG_FLAGS
from tests.docs.blocks import commands_of, words_of
from tests.docs.markdown import ROOT
from tests.docs.test_commands import check

TASK: Any = importlib.import_module("yaml").safe_load((ROOT / "deploy" / "skypilot.yaml").read_text())


def test_it_has_the_keys_of_a_task() -> None:
    assert set(TASK) == {"name", "resources", "workdir", "envs", "setup", "run"}
    assert (ROOT / TASK["workdir"] / "constraints.txt").is_file()


def test_its_commands_exist_with_their_options() -> None:
    commands = [words_of(command) for part in ("setup", "run") for command in commands_of(TASK[part])]
    (up,) = [words for words in commands if words and words[0].endswith("/base-rl")]
    assert up[1] == "up"
    check(up, "deploy/skypilot.yaml")
    (sglang,) = [words for words in commands if "sglang.launch_server" in words]
    assert set(SGLANG_FLAGS) <= set(sglang)
    assert f"http://127.0.0.1:{sglang[sglang.index('--port') + 1]}" in up


def test_it_installs_the_tested_sglang_and_extras_that_exist() -> None:
    installer = (ROOT / "scripts" / "sglang_cpu" / "install.sh").read_text()
    assert f"SGLang {TASK['envs']['SGLANG']} " in installer
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r'"\.\[([\w,-]+)\]"', TASK["setup"])
    assert set(named.split(",")) <= set(extras)


def test_every_variable_is_given() -> None:
    used = set(re.findall(r"\$([A-Z_]+)", TASK["setup"] + TASK["run"]))
    assert used == set(TASK["envs"])
