"""The pages on which people rate sessions: a queue of sessions worth a look, and the session with its ratings."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.pages.common import OWN_ORIGIN, Entrance, form_of, page_router
from proxy.admin.ratings import FIELDS, Rating, read_rating
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.admin.transcript import DrawnTurn, draw
from proxy.auth.access import Principal
from proxy.auth.service import Credentials
from proxy.database.rows import AnyRow
from proxy.errors import InvalidRequest, NotFound
from proxy.feedback.preferences import PreferenceItem
from proxy.feedback.service import FeedbackItem, FeedbackService
from proxy.http.services import service
from proxy.overview.endpoints import Overview
from proxy.overview.review.service import REVIEWERS
from proxy.overview.service import OverviewService
from proxy.overview.sessions.views import SessionView

router = page_router()

_LONGEST_LABEL = 100


async def _reviewer(request: Request, entrance: Entrance) -> Visitor:
    return await entrance.visitor(request)


Reviewer = Annotated[Visitor, Depends(_reviewer)]


@router.get("/review")
async def runs(overview: Overview, visitor: Reviewer) -> Response:
    """List the runs that the visitor may review; with a single one, show its queue."""
    listed = (await overview.runs(visitor.principal.project_id)).runs
    found = [run for run in listed if visitor.principal.run_id in (None, run.id)]
    if len(found) == 1:
        return RedirectResponse(f"/admin/review/{found[0].name}", status_code=303)
    return HTMLResponse(render("review_runs.html", visitor=visitor, runs=found))


@router.get("/review/{run}")
async def review(run: str, overview: Overview, visitor: Reviewer, session: str = "", done: str = "") -> Response:
    """Show the queue, and one of its sessions or the one that is asked for."""
    return HTMLResponse(await _page(run, overview, visitor, session=session, done=done))


@router.post("/review/{run}/{session_id}", dependencies=[OWN_ORIGIN])
async def rate(run: str, session_id: str, request: Request, overview: Overview, visitor: Reviewer) -> Response:
    """Record a rating and go on to the next session of the queue; a rating with an error shows the page again."""
    owned = await _owned(run, overview, visitor)
    form = await form_of(request)
    queue = [each.id for each in await overview.review.queue(owned.id)]
    try:
        rating = read_rating(form)
        await _record(request, visitor, session_id, rating)
    except InvalidRequest as error:
        problem = (error.param if error.param in FIELDS else "", error.message)
        page = await _page(run, overview, visitor, session=session_id, problem=problem, form=form)
        return HTMLResponse(page, status_code=error.status)
    query = {"done": rating.kind}
    if rating.stays:
        query["session"] = session_id
    else:
        # The next one behind it, so that sessions which a visitor passed over do not come back at once.
        behind = queue[queue.index(session_id) + 1 :] if session_id in queue else []
        if behind:
            query["session"] = behind[0]
    return RedirectResponse(f"/admin/review/{run}?{urlencode(query)}", status_code=303)


async def _page(
    run: str,
    overview: OverviewService,
    visitor: Visitor,
    *,
    session: str,
    done: str = "",
    problem: tuple[str, str] = ("", ""),
    form: dict[str, str] | None = None,
) -> str:
    owned = await _owned(run, overview, visitor)
    queue = await overview.review.queue(owned.id)
    shown = session or (queue[0].id if queue else "")
    view: SessionView | None = None
    turns: tuple[DrawnTurn, ...] = ()
    others: Sequence[AnyRow] = ()
    if shown:
        view = await overview.session(shown)
        if view.session.run_id != owned.id:
            raise NotFound(f"there is no session {shown!r}")
        turns = draw(view.turns, view.rewards, view.untrained_turns)
        others = await overview.review.others(shown)
    places = [each.id for each in queue]
    place = places.index(shown) if shown in places else None
    return render(
        "review.html",
        visitor=visitor,
        run=owned,
        queue=queue,
        place=place,
        following=queue[place + 1].id if place is not None and place + 1 < len(queue) else None,
        preceding=queue[place - 1].id if place else None,
        view=view,
        turns=turns,
        others=others,
        done=done if done.isalpha() else "",
        problem=problem,
        form=dict.fromkeys(FIELDS, "") | (form or {}),
        once=secrets.token_urlsafe(12),
        now=overview.now(),
    )


async def _owned(run: str, overview: OverviewService, visitor: Visitor) -> Any:
    """Return the run with its project. Raise NotFound if there is no such run or the visitor may not review it."""
    owned = await overview.owned_run(run)
    if not visitor.may_review(owned):
        raise NotFound(f"there is no run {run!r}")
    return owned


async def _record(request: Request, visitor: Visitor, session_id: str, rating: Rating) -> None:
    """Record the rating as feedback of the visitor's key. Raise InvalidRequest, NotFound and other errors of
    feedback."""
    key = await service(request, Credentials).find(visitor.principal.key_id)
    assert key is not None  # it signed the visitor in
    source = f"{REVIEWERS}{_printable(key.label) or key.id}"[:_LONGEST_LABEL]
    feedback = service(request, FeedbackService)
    await _sent(feedback, visitor.principal, session_id, rating, source)


async def _sent(feedback: FeedbackService, who: Principal, session_id: str, rating: Rating, source: str) -> None:
    about = rating.turn or session_id
    if rating.other:
        chosen, rejected = (about, rating.other) if rating.is_better else (rating.other, about)
        await feedback.prefer(
            who, PreferenceItem(chosen=chosen, rejected=rejected, source=source, idempotency_key=rating.once)
        )
        return
    item = FeedbackItem(
        entries=() if rating.reward is None else (("review", rating.reward),),
        session_id=None if rating.turn else session_id,
        turn_id=rating.turn or None,
        text=rating.text or None,
        source=source,
        # A look at an open session must not end it.
        final=False,
        idempotency_key=rating.once,
    )
    await feedback.record(who, [item])


def _printable(label: str | None) -> str:
    return "".join(character for character in label or "" if character.isprintable())
