"""Files reach an object store and come back whole, whatever the network and the store do meanwhile."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.contract.fetching import ObjectDamaged, fetch_directory
from proxy.contract.object_store import PART_BYTES, ObjectMissing, ObjectStore, ObjectStoreUnavailable, check_url
from tests.object_store import DENIED, SLOW_DOWN, URL, ObjectServer, object_server

SIZE = 2 * PART_BYTES + 1000


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server(monkeypatch) as started:
        yield started


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(SIZE))
    return path


def sums(*paths: Path) -> dict[str, str | None]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_a_large_file_goes_up_in_parts_and_comes_back_in_ranges_through_throttling(
    server: ObjectServer, large: Path, tmp_path: Path
) -> None:
    store = ObjectStore(URL, 20.0)
    throttled: set[tuple[str, str, str]] = set()

    def fault(*asked: str) -> tuple[str, bytes] | None:
        if asked in throttled:
            return None
        throttled.add(asked)  # type: ignore[arg-type]
        return "503 Slow Down", SLOW_DOWN

    server.fault = fault
    store.upload(large, "run/v1/model.safetensors")
    fetch_directory(store, "run/v1", sums(large), SIZE, tmp_path / "cache" / "v1")
    assert sums(tmp_path / "cache" / "v1" / "model.safetensors") == sums(large)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["v1"]
    assert {span for method, _, span in server.requests if method == "GET"} == {
        f"bytes=0-{PART_BYTES - 1}",
        f"bytes={PART_BYTES}-{2 * PART_BYTES - 1}",
        f"bytes={2 * PART_BYTES}-{SIZE - 1}",
    }


def test_an_outage_is_waited_for_and_a_long_one_ends_with_the_reason(server: ObjectServer, large: Path) -> None:
    server.stop()
    with pytest.raises(ObjectStoreUnavailable, match=r"s3://weights/site: .*127\.0\.0\.1"):
        ObjectStore(URL, 0.1).upload(large, "run/v1/model.safetensors")
    uploading = threading.Thread(target=ObjectStore(URL, 60.0).upload, args=(large, "run/v1/model.safetensors"))
    uploading.start()
    uploading.join(0.3)
    assert uploading.is_alive()
    server.start()
    uploading.join()
    assert ObjectStore(URL, 5.0).size("run/v1/model.safetensors") == SIZE


def test_a_fetch_goes_on_where_it_was_ended(server: ObjectServer, large: Path, tmp_path: Path) -> None:
    store = ObjectStore(URL, 5.0)
    store.upload(large, "run/v1/model.safetensors")
    last = f"bytes={2 * PART_BYTES}-{SIZE - 1}"
    server.fault = lambda _method, _path, span: ("403 Forbidden", DENIED) if span == last else None
    with pytest.raises(ObjectStoreUnavailable, match="AccessDenied"):
        fetch_directory(store, "run/v1", sums(large), SIZE, tmp_path / "v1")
    assert not (tmp_path / "v1").exists()
    server.fault = None
    server.requests.clear()
    fetch_directory(store, "run/v1", sums(large), SIZE, tmp_path / "v1")
    assert [span for method, _, span in server.requests if method == "GET"] == [last]
    assert sums(tmp_path / "v1" / "model.safetensors") == sums(large)


def test_a_wrong_answer_is_fetched_again_and_a_wrong_object_refused(server: ObjectServer, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"{}")
    store = ObjectStore(URL, 5.0)
    store.upload(file, "run/v1/config.json")
    lies = iter([("206 Partial Content", b"[]")])
    server.fault = lambda method, _path, _span: next(lies, None) if method == "GET" else None
    fetch_directory(store, "run/v1", sums(file), 10, tmp_path / "v1")
    assert (tmp_path / "v1" / "config.json").read_bytes() == b"{}"
    with pytest.raises(ObjectDamaged, match=r"config\.json in s3://weights/site is not the file"):
        fetch_directory(store, "run/v1", {"config.json": "0" * 64}, 10, tmp_path / "other")
    with pytest.raises(ValueError, match="2 bytes, more than"):
        fetch_directory(store, "run/v1", sums(file), 1, tmp_path / "other")
    with pytest.raises(ObjectMissing):
        fetch_directory(store, "run/v1", {"missing": None}, 10, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_lost_answer_to_the_last_request_of_an_upload_changes_nothing(server: ObjectServer, large: Path) -> None:
    lost = iter([("503 Slow Down", SLOW_DOWN)])
    server.lose = lambda method, _path, _span: next(lost, None) if method == "POST" and server.parts() == 3 else None
    store = ObjectStore(URL, 5.0)
    store.upload(large, "run/v1/model.safetensors")
    assert next(lost, None) is None
    assert store.size("run/v1/model.safetensors") == SIZE
    with pytest.raises(ObjectMissing):
        store.size("run/v1/other")


def test_removal_takes_uploads_that_never_ended(server: ObjectServer, large: Path) -> None:
    store = ObjectStore(URL, 5.0)
    server.fault = lambda method, _path, _span: ("403 Forbidden", DENIED) if method == "PUT" else None
    with pytest.raises(ObjectStoreUnavailable, match="AccessDenied"):
        store.upload(large, "run/v1/model.safetensors")
    server.fault = None
    assert store.unfinished("run/") == 1
    store.remove("run/")
    assert store.unfinished("run/") == 0


def test_a_refusal_that_time_does_not_change_is_not_repeated(server: ObjectServer, tmp_path: Path) -> None:
    """A store refuses requests of a machine whose clock is wrong by more than a quarter of an hour."""
    file = tmp_path / "config.json"
    file.write_bytes(b"{}")
    skewed = b"<Error><Code>RequestTimeTooSkewed</Code><Message>The clocks differ too much.</Message></Error>"
    server.fault = lambda *_: ("403 Forbidden", skewed)
    with pytest.raises(ObjectStoreUnavailable, match=r"RequestTimeTooSkewed.*The clocks differ too much"):
        ObjectStore(URL, 900.0).upload(file, "run/v1/config.json")
    assert len(server.requests) == 1


@pytest.mark.parametrize("url", ["s3://b", "https://bucket/x", "s3://bucket/../x", "s3://bucket/a b", "s3://Bucket"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="write s3://BUCKET/PREFIX"):
        check_url(url)
    assert check_url("s3://bucket/a/b/") == "s3://bucket/a/b"
