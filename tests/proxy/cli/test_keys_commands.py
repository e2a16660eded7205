"""`base-rl keys …` with a real server."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from proxy.auth.service import PrincipalKind
from proxy.cli.commands import app
from proxy.cli.local_keys import LocalKeys, load, load_or_make
from proxy.cli.stack import Address
from tests.database import sqlite_database
from tests.fakes.run_history import NOW, add_run
from tests.proxy.overview.serving import serving
from tests.proxy.overview.site import Site, open_site
from tests.running_app import bearer


class Installation:
    """A data directory with keys, and the server that it names."""

    def __init__(self, site: Site, data_dir: Path, keys: LocalKeys) -> None:
        self.site = site
        self.data_dir = data_dir
        self.keys = keys

    async def run(self, *arguments: str, status: int = 0) -> str:
        runner = CliRunner(env={"COLUMNS": "300", "BASE_RL_ADMIN_KEY": ""})
        command = ["keys", *arguments, "--data-dir", str(self.data_dir)]
        result = await asyncio.to_thread(runner.invoke, app, command)
        assert result.exit_code == status, result.output
        return result.output

    async def opens(self, key: str) -> bool:
        return (await self.site.client.get("/api/v1/keys/self", headers=bearer(key))).status_code == 200


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Installation]:
    async with open_site(sqlite_database(tmp_path), tmp_path, clock=lambda: NOW) as site:
        run_id = await add_run(site.database, now=NOW - 200)
        keys = load_or_make(tmp_path / "data")
        await site.credentials.register(PrincipalKind.ADMIN, keys.admin_key)
        await site.credentials.register(PrincipalKind.RUN, keys.run_key, run_id=run_id)
        async with serving(site) as address:
            file = tmp_path / "data" / "address.json"
            file.write_bytes(msgspec.json.encode(Address(url=address, pid=os.getpid())))
            yield Installation(site, tmp_path / "data", keys)


async def test_a_key_is_made_and_revoked(here: Installation) -> None:
    made = json.loads(await here.run("create", "--kind", "run", "--run", "calculator", "--label", "ci", "--json"))
    assert await here.opens(made["key"])
    listed = await here.run("list")
    assert re.search(rf"{made['id']} +run +calculator +ci .*valid", listed)
    assert made["key"] not in listed
    assert "revoked" in await here.run("revoke", made["id"])
    assert not await here.opens(made["key"])
    assert made["id"] not in await here.run("list")
    assert re.search(rf"{made['id']} .*revoked", await here.run("list", "--revoked"))


async def test_rotating_the_keys_of_the_data_directory_keeps_the_command_line_signed_in(here: Installation) -> None:
    for name, kind in (("admin_key", "admin"), ("run_key", "run")):
        (listed,) = json.loads(await here.run("list", "--kind", kind, "--json"))
        assert "keys.json has the new" in await here.run("rotate", listed["id"])
        kept = load(here.data_dir)
        assert kept is not None
        assert await here.opens(getattr(kept, name))
        assert not await here.opens(getattr(here.keys, name))
    assert [path.name for path in here.data_dir.iterdir() if path.name.startswith(".")] == []
    assert oct((here.data_dir / "keys.json").stat().st_mode & 0o777) == "0o600"


async def test_the_last_admin_key_is_not_revoked(here: Installation) -> None:
    (own,) = json.loads(await here.run("list", "--kind", "admin", "--json"))
    assert "create another one first" in await here.run("revoke", own["id"], status=1)
    assert await here.opens(here.keys.admin_key)
