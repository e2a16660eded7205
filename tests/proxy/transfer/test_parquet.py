from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.transfer.parquet import RecordWriter, read_records
from proxy.transfer.records import InvalidRecord, SessionRecord, decode, encode
from tests.proxy.transfer.strategies import sessions

pyarrow: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")


@given(st.lists(sessions(), max_size=4))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_rows_read_back_are_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, records: list[SessionRecord]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "it.parquet"
    writer = RecordWriter(path)
    writer.write(records[:2])
    writer.write(records[2:])
    writer.close()
    assert list(read_records(path)) == records


@given(sessions())
def test_lines_read_back_are_what_was_written(record: SessionRecord) -> None:
    assert decode(encode(record)) == record


def test_an_invalid_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.parquet"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidRecord, match="not a Parquet file"):
        list(read_records(path))


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.parquet"
    parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    with pytest.raises(InvalidRecord, match="row 1"):
        list(read_records(path))
