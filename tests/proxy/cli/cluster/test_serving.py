"""`base-rl engines serve` finds the proxy of its configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.outside import EXAMPLE


@pytest.mark.parametrize("given", [True, False])
def test_the_data_directory_is_that_of_the_configuration_unless_one_is_given(given: bool, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'[server]\ndata_dir = "{tmp_path / "configured"}"\n[engine]\nkind = "embedded"\n'
        f'[run]\nname = "calculator"\nmodel = "{EXAMPLE / "checkpoint"}"\n'
    )
    options = ["--data-dir", str(tmp_path / "given")] if given else []
    answer = subprocess.run(
        [sys.executable, "-m", "proxy.cli", "engines", "serve", "far", "--config", str(config), *options],
        env={"COLUMNS": "500"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert answer.returncode == 1
    directory = tmp_path / ("given" if given else "configured")
    assert f"no base-rl is up with the data directory {directory}" in answer.stderr
