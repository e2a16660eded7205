"""The way of one model call: who, which session, prompt ids, generation, text, commit, answer.

Wiring (proxy/app.py):

    template = ChatTemplate.load(settings.run.model)          # proxy.tokens.template; ConfigurationError at start
    app.state.chat = ChatService(
        settings=settings, template=template, runs=runs, sessions=sessions, trajectories=trajectories,
        swaps=swaps, engine=engine, clock=system_clock, observer=observer,
    )
    app.include_router(proxy.chat.endpoints.router)
    ...
    await app.state.chat.aclose()                             # at shutdown: ends what still generates, records it
"""

from __future__ import annotations

from proxy.chat.observer import TurnObserver
from proxy.clock import Clock
from proxy.engines.interface import Engine
from proxy.policies.swap import SwapController
from proxy.runs.service import RunDirectory
from proxy.sessions.service import SessionService
from proxy.settings import Settings
from proxy.tokens.template import ChatTemplate
from proxy.trajectories.service import TrajectoryStore


class ChatService:
    """Answers model calls of every dialect."""

    def __init__(
        self,
        *,
        settings: Settings,
        template: ChatTemplate,
        runs: RunDirectory,
        sessions: SessionService,
        trajectories: TrajectoryStore,
        swaps: SwapController,
        engine: Engine,
        clock: Clock,
        observer: TurnObserver | None = None,
    ) -> None:
        self._settings = settings
        self._template = template
        self._runs = runs
        self._sessions = sessions
        self._trajectories = trajectories
        self._swaps = swaps
        self._engine = engine
        self._clock = clock
        self._observer = observer
