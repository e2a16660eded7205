"""`base-rl texts …` with a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from typer.testing import CliRunner

from proxy.auth.service import PrincipalKind
from proxy.cli.commands import app
from proxy.feedback import endpoints as feedback_endpoints
from proxy.feedback.service import FeedbackService
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.overview.filters import SessionFilter
from proxy.runs.service import RunDirectory
from proxy.sessions import endpoints as session_endpoints
from proxy.sessions.service import SessionService
from tests.database import sqlite_database
from tests.fakes.run_history import NOW, add_history, add_run
from tests.proxy.overview.serving import serving
from tests.proxy.overview.site import open_site


async def test_a_text_is_added_and_shown(tmp_path: Path) -> None:
    async with open_site(sqlite_database(tmp_path), tmp_path, clock=lambda: NOW) as site:
        run_id = await add_run(site.database, now=NOW - 200)
        await add_history(site.database, run_id, steps=1, per_step=4)
        runs = RunDirectory(site.database, lambda: NOW)
        sessions = SessionService(site.database, runs, site.credentials, site.signals, lambda: NOW)
        provide(site.app, FeedbackService(site.database, site.signals, lambda: NOW), sessions)
        add_routes(site.app, feedback_endpoints.router)
        add_routes(site.app, session_endpoints.router)
        key = await site.credentials.create(PrincipalKind.RUN, run_id=run_id)
        found = await site.overview.sessions(run_id, SessionFilter(training="consumed"), limit=1)
        session = found.sessions[0].id
        async with serving(site) as address:

            async def run(*arguments: str, status: int = 0) -> str:
                runner = CliRunner(env={"COLUMNS": "300"})
                options = ["--url", address, "--api-key", key.text]
                result = await asyncio.to_thread(runner.invoke, app, [*arguments, *options])
                assert result.exit_code == status, result.output
                return result.output

            receipt = json.loads(
                await run("texts", "add", session, "use the calculator", "--source", "ada", "--json")
            )
            assert receipt["effect"] == "recorded_after_training"
            assert "after a trainer had taken" in await run("texts", "add", session, "shorter")
            shown = await run("sessions", "show", session)
            assert "use the calculator" in shown
            assert "shorter" in shown
            assert "blank" in await run("texts", "add", session, " ", status=1)
            assert "no session" in await run("texts", "add", "unknown", "words", status=1)
