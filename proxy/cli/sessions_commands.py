"""`base-rl sessions …`: show the sessions of agents' calls, and why each is trained or not."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Refused, Url, out
from proxy.contract.identifiers import is_session_id
from proxy.contract.states import SessionState, TrainingState

if TYPE_CHECKING:
    from proxy.cli.operations import Operations

# Newest attempts of a name, of which the one with the highest number is chosen.
_ATTEMPTS = 20

sessions_app = typer.Typer(
    no_args_is_help=True, help="Sessions: the attempts of agents, and why each is trained or not."
)

Run = Annotated[str | None, typer.Option(help="The run's name; needed where there are several runs.")]


@sessions_app.command("list")
def sessions_list(
    run: Run = None,
    state: Annotated[SessionState | None, typer.Option(help="Only open or only ended sessions.")] = None,
    training: Annotated[TrainingState | None, typer.Option(help="Only sessions in this training state.")] = None,
    name: Annotated[str | None, typer.Option(help="All attempts of this name, which the client chose.")] = None,
    group: Annotated[str | None, typer.Option(help="Id or name of the group.")] = None,
    attributed_by: Annotated[
        str | None, typer.Option(help="Rule by which the session was opened, such as `new` or `path`.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Least reward, inclusive.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Greatest reward, inclusive.")] = None,
    limit: Annotated[int, typer.Option(help="Most entries to list.", min=1, max=10_000)] = 50,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List sessions, newest first: their names, how they ended, and why each is trained or not.

    `base-rl sessions list --training excluded` lists those that are never trained, and
    `base-rl sessions list --attributed-by new` those whose first call named no session and extended no conversation.
    """
    from proxy.cli.session_drawing import draw_sessions

    given = {
        "state": state,
        "training": training,
        "name": name,
        "group": group,
        "attributed_by": _known_rule(attributed_by),
        "min_reward": min_reward,
        "max_reward": max_reward,
    }
    wanted = {key: str(value) for key, value in given.items() if value is not None}

    async def ask(base_rl: Operations) -> tuple[list[dict[str, Any]], bool]:
        return await base_rl.sessions(await _chosen_run(base_rl, run), wanted, limit)

    def show(found: tuple[list[dict[str, Any]], bool]) -> None:
        sessions, has_more = found
        if as_json:
            out.print_json(json.dumps(sessions))
        elif not sessions:
            out.print("no such session" if wanted else "no sessions yet: no call has come")
        else:
            out.print(*draw_sessions(sessions, time.time()), sep="\n")
            if has_more:
                out.print(f"There may be older ones: raise --limit, now {limit}.", style="dim")

    ask_and_show((data_dir, url, api_key), ask, show)


@sessions_app.command("show")
def sessions_show(
    session: Annotated[str, typer.Argument(help="The session's id, or the client's own name for it.")],
    run: Run = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show one session: why it is trained or not, its turns, its rewards, and the other attempts of its name.

    `base-rl sessions show attempt-42` shows the newest attempt of that name. A turn's continuation is `exact` if
    it extends the previous turn token for token, `edited` if the client changed earlier messages, and `retemplated`
    if the chat template did.
    """
    from proxy.cli.session_drawing import draw_session

    async def ask(base_rl: Operations) -> dict[str, Any]:
        return await base_rl.session(
            session if is_session_id(session) else await _newest_attempt(base_rl, run, session)
        )

    ask_and_show(
        (data_dir, url, api_key),
        ask,
        lambda found: out.print(*draw_session(found, time.time()), sep="\n"),
        as_json=as_json,
    )


async def _chosen_run(operations: Operations, run: str | None) -> str:
    """Return the given run's name, or that of the only run. Raises Refused if there are several."""
    if run is not None:
        return run
    names = [str(one["name"]) for one in await operations.runs()]
    if len(names) != 1:
        raise Refused(f"there are several runs: {', '.join(names)}; say which with --run" if names else "no run yet")
    return names[0]


async def _newest_attempt(operations: Operations, run: str | None, name: str) -> str:
    """Return the id of the newest session of that name. Raises Refused if there is none."""
    chosen = await _chosen_run(operations, run)
    attempts, _ = await operations.sessions(chosen, {"name": name}, _ATTEMPTS)
    if not attempts:
        raise Refused(f"the run {chosen!r} has no session named {name!r}; `base-rl sessions list` lists those it has")
    # By number, not by time: the clock may have been set back between two attempts.
    return str(max(attempts, key=lambda one: one["attempt"])["id"])


def _known_rule(rule: str | None) -> str | None:
    """Return the name of a rule of attribution. Raises BadParameter for an unknown one."""
    from proxy.sessions.identification import AttributedBy

    if rule is not None and rule not in list(AttributedBy):
        raise typer.BadParameter(f"no such rule; there are {', '.join(AttributedBy)}", param_hint="--attributed-by")
    return rule
