"""The keys of a local installation."""

from __future__ import annotations

import stat
from pathlib import Path

from proxy.cli.local_keys import FILE_NAME, load, load_or_make


def test_keys_are_made_once_and_kept(tmp_path: Path) -> None:
    data_dir = tmp_path / "new"
    assert load(data_dir) is None
    first = load_or_make(data_dir)
    assert load_or_make(data_dir) == first == load(data_dir)
    assert len({first.admin_key, first.run_key, first.trainer_key}) == 3


def test_only_the_owner_reads_the_keys(tmp_path: Path) -> None:
    load_or_make(tmp_path)
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME], "a partial file was left"


def test_two_installations_have_different_keys(tmp_path: Path) -> None:
    assert load_or_make(tmp_path / "a") != load_or_make(tmp_path / "b")
