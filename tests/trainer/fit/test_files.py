from __future__ import annotations

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import NothingToFit
from trainer.fit.files import rows_of, sha256_of

ROWS = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "ü", "completion": "d", "label": False}]


def test_lines_have_their_numbers_and_blank_ones_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in ROWS) + "\n")
    found = list(rows_of(path))
    assert [row.values for row in found] == ROWS
    assert [row.number for row in found] == [1, 3]
    assert sha256_of(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    importlib.import_module("pyarrow.parquet").write_table(arrow.Table.from_pylist(ROWS), path)
    assert [(row.number, row.values) for row in rows_of(path)] == list(enumerate(ROWS, 1))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(NothingToFit, match="cannot be read as Parquet"):
        list(rows_of(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "there are no rows in it"),
        (b"\n \n", "there are no rows in it"),
        (b'{"a": 1}\n{"a": \n', "rows.jsonl, line 2: this is not JSON"),
        (b'{"a": 1}\n\n"text"\n', "rows.jsonl, line 3: a row is a JSON object, and this is a str"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "rows.jsonl, line 2: this is not JSON"),
        (b"[" * 100_000, "rows.jsonl, line 1: this is not JSON"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(NothingToFit, match=said):
        list(rows_of(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NothingToFit, match="there is no such file"):
        list(rows_of(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(NothingToFit, match=r"name a .jsonl file"):
        list(rows_of(tmp_path / "rows.csv"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(NothingToFit, match=r"pip install -c constraints.txt -e '.\[export\]'"):
        list(rows_of(tmp_path / "rows.parquet"))
