"""Files that only their owner may read, from the moment they are created."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from proxy.app import create_app
from proxy.cli.datasets import DatasetWriter
from proxy.cli.supervisor import Part, Supervisor
from proxy.database.backup import backup
from proxy.private_files import make_file, open_file, tighten
from proxy.settings import ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.test_app import RUN, settings_for
from tests.proxy.tokens.models import write_model
from tests.running_app import running


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def open_to_others(directory: Path) -> dict[str, str]:
    return {str(path): mode(path) for path in directory.rglob("*") if path.stat().st_mode & 0o077 and path.is_file()}


@pytest.fixture(autouse=True)
def _everybody_may_read_by_default() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def start(settings: Settings, model: Path) -> list[str]:
    """Start the proxy once, make a call that writes, and return the paths that it reports as restricted."""
    engine = FakeEngine(lambda _request: [5, 6, 2], model_path=str(model))
    with capture_logs() as logs:
        async with running(create_app(settings, engine=engine), key=RUN) as client:
            assert (await client.post("/v1/sessions")).status_code == 201
            assert open_to_others(settings.server.data_dir) == {}, "also while it runs: -wal and -shm"
            assert (settings.server.data_dir / "base-rl.sqlite3-wal").exists()
    return [path for entry in logs if "other users" in entry["event"] for path in entry["paths"]]


async def test_files_made_by_the_proxy_are_readable_only_by_their_owner(tmp_path: Path, model: Path) -> None:
    settings = settings_for(tmp_path, model)
    assert await start(settings, model) == []
    assert mode(settings.server.data_dir) == "0o700"
    assert open_to_others(settings.server.data_dir) == {}
    backup(settings.database_url, tmp_path / "copy")
    assert mode(tmp_path / "copy") == "0o600"


async def test_readable_files_of_an_earlier_version_are_restricted_and_logged(tmp_path: Path, model: Path) -> None:
    settings = settings_for(tmp_path, model)
    await start(settings, model)
    data_dir = settings.server.data_dir
    (data_dir / "logs").mkdir(mode=0o755)
    (data_dir / "logs" / "proxy.log").touch(0o644)
    for path in (data_dir, data_dir / "base-rl.sqlite3"):
        path.chmod(path.stat().st_mode | 0o055)
    said = await start(settings, model)
    for path in (data_dir, data_dir / "base-rl.sqlite3", data_dir / "logs" / "proxy.log"):
        assert str(path) in said
        assert not path.stat().st_mode & 0o077
    assert await start(settings, model) == []


async def test_a_shared_data_directory_stays_as_it_is_with_private_files_in_it(tmp_path: Path, model: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    data_dir.chmod(0o751)
    settings = settings_for(tmp_path, model, server=ServerSettings(data_dir=data_dir, shared_data_dir=True))
    await start(settings, model)
    assert mode(data_dir) == "0o751"
    assert open_to_others(data_dir) == {}


async def test_logs_and_exports_are_private(tmp_path: Path) -> None:
    part = Part(name="part", argv=("sleep", "60"), env={})
    async with Supervisor([part], tmp_path / "logs", lambda _name, _what: None):
        assert mode(tmp_path / "logs") == "0o700"
        assert mode(tmp_path / "logs" / "part.log") == "0o600"
    writer = DatasetWriter(tmp_path / "export", suffix="jsonl")
    assert mode(tmp_path / "export") == "0o700"
    assert open_to_others(tmp_path / "export") == {}
    writer.abandon()


def test_an_existing_file_keeps_its_content_and_one_that_cannot_be_made_is_ignored(
    tmp_path: Path,
) -> None:
    with open_file(tmp_path / "file", "wb") as file:
        file.write(b"content")
    make_file(tmp_path / "file")
    make_file(tmp_path / "nowhere" / "file")
    assert (tmp_path / "file").read_bytes() == b"content"
    assert tighten(tmp_path / "nowhere", store=None) == []
