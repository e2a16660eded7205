"""Tables of sessions for the terminal, made from answers of the API without side effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from proxy.admin.formatting import ABSENT, ago, attribution, reward, words
from proxy.cli.drawing import plain_table

# A shadow answer is whole; other states than complete are worth a look.
_STATES = {"complete": "", "shadow": "dim"}
_COLOURS = {"ready": "green", "consumed": "green", "excluded": "yellow", "expired": "yellow", "stale": "yellow"}


def draw_sessions(sessions: Sequence[Mapping[str, Any]], now: float) -> Iterator[RenderableType]:
    """Draw a list of sessions, as `GET /api/v1/runs/{run}/sessions` answers it.

    Many sessions share an explanation: each explanation is printed once below the table, under a number, so that the
    table fits a terminal.
    """
    table = plain_table("session", "name", "turns", "reward", "by", "outcome", "when", "training", ids=("session",))
    notes: dict[str, int] = {}
    for one in sessions:
        if one["consumed_by"] is not None:
            why = f"v{one['consumed_by']}"
        else:
            why = str(notes.setdefault(one["explanation"], len(notes) + 1))
        table.add_row(
            *(one["id"], _name(one), str(one["turn_count"]), reward(one["reward"]), words(one["attributed_by"])),
            *(one["outcome"] or one["state"], ago(one["last_active_at"], now), _training(one).append(f" ({why})")),
        )
    yield table
    if notes:
        yield Text()
    for explanation, number in notes.items():
        yield Text(f"({number}) {explanation}", style="dim")


def draw_session(view: Mapping[str, Any], now: float) -> Iterator[RenderableType]:
    """Draw a session with its turns, rewards and other feedback. `view` is the answer of `GET /v1/sessions/{id}`."""
    yield Text(f"session {view['id']} of the run {view['run']}", style="bold")
    yield _facts(view, now)
    yield Text("\nturns", style="bold")
    yield _turns(view["turns"], now) if view["turns"] else Text("none")
    for one in view["turns"]:
        if (why := view["untrained_turns"].get(one["id"])) is not None:
            yield Text(f"turn {one['ordinal']} is not trained: {why}", style="yellow")
    yield Text("\nrewards", style="bold")
    yield _rewards(view["rewards"], now) if view["rewards"] else Text("none")
    if view["feedback"]:
        yield Text("\nfeedback in words", style="bold")
        yield _feedback(view["feedback"], now)
    if view["preferences"]:
        yield Text("\npreferences", style="bold")
        yield _preferences(view["preferences"], now)
    if len(view["attempts"]) > 1:
        yield Text("\nattempts of this name", style="bold")
        yield _attempts(view, now)


def _facts(view: Mapping[str, Any], now: float) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("training", Text.assemble(_training(view), f": {view['explanation']}"))
    if view["external_id"] is not None:
        table.add_row("name", _name(view))
    table.add_row("attributed by", f"{words(view['attributed_by'])}: {attribution(view['attributed_by'])}")
    table.add_row("outcome", _outcome(view))
    table.add_row("reward", _reward(view))
    for name in ("task", "group"):
        if view[name] is not None:
            table.add_row(name, view[name])
    table.add_row("purpose", view["purpose"])
    table.add_row("opened", ago(view["created_at"], now))
    table.add_row("last call", ago(view["last_active_at"], now))
    if view["erased_at"] is not None:
        table.add_row("erased", f"{ago(view['erased_at'], now)}: {words(view['erased_reason'] or '')}")
    return table


def _turns(turns: Sequence[Mapping[str, Any]], now: float) -> Table:
    table = plain_table(
        *("", "turn", "state", "continuation", "by", "finish", "prompt", "answer", "when"), ids=("turn",)
    )
    for one in turns:
        table.add_row(
            *(str(one["ordinal"]), one["id"]),
            Text(one["state"], style=_STATES.get(one["state"], "yellow")),
            *(one["continuation"], words(one["attributed_by"]), words(one["finish_reason"])),
            *(str(one["prompt_tokens"]), str(one["output_tokens"]), ago(one["started_at"], now)),
        )
    return table


def _rewards(rewards: Sequence[Mapping[str, Any]], now: float) -> Table:
    table = plain_table("name", "reward", "turn", "source", "when", "", "comment", ids=("turn",))
    for one in rewards:
        marks = {"superseded": one["superseded"], "trained": one["trained"], "late": one["after_training"]}
        table.add_row(
            one["name"],
            Text(reward(one["value"]), style="strike dim" if one["superseded"] else "bold"),
            *(one["turn_id"] or "the session", one["source"], ago(one["created_at"], now)),
            *(", ".join(mark for mark, is_set in marks.items() if is_set), one["comment"] or ""),
        )
    return table


def _feedback(texts: Sequence[Mapping[str, Any]], now: float) -> Table:
    table = plain_table("turn", "source", "when", "", "text", ids=("turn",))
    for one in texts:
        late = "late" if one["after_training"] else ""
        table.add_row(one["turn_id"] or "the session", one["source"], ago(one["created_at"], now), late, one["text"])
    return table


def _preferences(preferences: Sequence[Mapping[str, Any]], now: float) -> Table:
    table = plain_table("verdict", "turn", "against", "source", "when", "comment", ids=("turn", "against"))
    for one in preferences:
        table.add_row(
            *(one["verdict"], one["turn_id"] or "the session", one["other_turn_id"] or one["other_session_id"]),
            *(one["source"], ago(one["created_at"], now), one["comment"] or ""),
        )
    return table


def _attempts(view: Mapping[str, Any], now: float) -> Table:
    table = plain_table("attempt", "session", "state", "training", "reward", "opened", ids=("session",))
    for one in view["attempts"]:
        is_shown = one["id"] == view["id"]
        table.add_row(
            *(str(one["attempt"]), one["id"], one["state"], _training(one), reward(one["reward"])),
            ago(one["created_at"], now),
            style="bold" if is_shown else "",
        )
    return table


def _name(session: Mapping[str, Any]) -> str:
    """Return the client's own name with the attempt's number; empty for a session without a name."""
    return "" if session["external_id"] is None else f"{session['external_id']} #{session['attempt']}"


def _training(session: Mapping[str, Any]) -> Text:
    return Text(session["training"], style=_COLOURS.get(session["training"], ""))


def _outcome(session: Mapping[str, Any]) -> str:
    """Return the session's outcome and the reason for its end."""
    if session["state"] == "open":
        return "open"
    return f"{session['outcome'] or 'ended'}, by {session['end_reason'] or ABSENT}"


def _reward(view: Mapping[str, Any]) -> str:
    now = reward(view["reward"])
    if view["revised_at"] is None:
        return now
    return f"{now}, and {reward(view['trained_reward'])} when it was trained"
