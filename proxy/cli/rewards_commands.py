"""`base-rl rewards …`: list rewards and add one."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, out

rewards_app = typer.Typer(no_args_is_help=True, help="Rewards of sessions and turns.")

Limit = Annotated[int, typer.Option(help="Most entries to list.", min=1, max=200)]


@rewards_app.command("list")
def rewards_list(
    run: Annotated[str | None, typer.Option(help="Only rewards of this run; default: of all runs.")] = None,
    session: Annotated[str | None, typer.Option(help="A session's id or, with --run, its own name.")] = None,
    turn: Annotated[str | None, typer.Option(help="A turn's id.")] = None,
    name: Annotated[str | None, typer.Option(help="Only rewards of this name.")] = None,
    source: Annotated[str | None, typer.Option(help="Only rewards from this source.")] = None,
    since: Annotated[datetime | None, typer.Option(help="Only rewards recorded at this time (UTC) or later.")] = None,
    late: Annotated[
        bool | None,
        typer.Option("--late/--in-time", help="Rewards that came after a trainer took the session, or before."),
    ] = None,
    limit: Limit = 50,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List rewards, newest first. Superseded ones are struck through."""
    given: dict[str, str | None] = {
        "run": run,
        "session": session,
        "turn": turn,
        "name": name,
        "source": source,
        "since": None if since is None else repr(since.replace(tzinfo=since.tzinfo or UTC).timestamp()),
        "after_training": None if late is None else str(late).lower(),
        "limit": str(limit),
    }
    wanted = {key: value for key, value in given.items() if value is not None}

    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.rewards(wanted),
        lambda rewards: out.print(ledger_table(rewards, time.time())),
        as_json=as_json,
    )


@rewards_app.command("revised")
def rewards_revised(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    limit: Limit = 50,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List trained sessions whose rewards have changed since they were trained."""
    none = "Every trained session still has the rewards that it was trained on."
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.revised_rewards(run, limit),
        lambda sessions: out.print(revised_table(sessions, time.time()) if sessions else none),
        as_json=as_json,
    )


@rewards_app.command("rejudge")
def rewards_rejudge(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    judge: Annotated[str, typer.Argument(help="The judge's name, as `base-rl judges list` shows it.")],
    session: Annotated[
        list[str] | None, typer.Option(help="Only this session, by its id. May be given several times.")
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Let a judge score sessions that it has not scored in its present form.

    A new score supersedes the judge's earlier one, which stays in the ledger. Sessions that a trainer has used keep
    the rewards that they were trained with.
    """

    def show(found: dict[str, Any]) -> None:
        out.print(f"sessions that will be judged: {found['enqueued']} (base-rl jobs list --kind judge)")
        if found["more"]:
            out.print("There may be more; run the command again once these are judged.")

    ask_and_show(
        (data_dir, url, api_key), lambda base_rl: base_rl.rejudge(run, judge, session or []), show, as_json=as_json
    )


@rewards_app.command("add", context_settings={"ignore_unknown_options": True})
def rewards_add(
    session: Annotated[str, typer.Argument(help="The session's id, or the client's own name for it.")],
    value: Annotated[float, typer.Argument(help="The reward.")],
    name: Annotated[str, typer.Option(help="Name of the reward's component.")] = "reward",
    turn: Annotated[str | None, typer.Option(help="Id of the turn that the reward is for.")] = None,
    source: Annotated[
        str, typer.Option(help="Who gives the reward. A later one of a source supersedes its earlier one.")
    ] = ("api"),
    comment: Annotated[str | None, typer.Option(help="Reason for the reward.")] = None,
    final: Annotated[
        bool | None,
        typer.Option(
            help="Whether to end the session. Default: yes, except for a reward of a turn.", show_default=False
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Run in which SESSION is a name; needed with an admin key.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="A repeated key records nothing.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Record a reward for a session, or for one of its turns. `--api-key` may be a key of the run.

    With the default name and source, it supersedes the reward that the agent's harness posted.
    """
    given: dict[str, Any] = {
        "session_id": session,
        "reward": value,
        "name": name,
        "turn_id": turn,
        "source": source,
        "comment": comment,
        "final": final,
        "run": run,
        "idempotency_key": idempotency_key,
    }
    body = {key: item for key, item in given.items() if item is not None}

    def show(receipt: dict[str, Any]) -> None:
        late = receipt["effect"] == "recorded_after_training"
        about = receipt["turn_id"] or receipt["session_id"]
        note = ", after a trainer had taken its session: see `base-rl rewards revised`" if late else ""
        out.print(f"{receipt['rewards'][0]} of {about} is recorded{note}", soft_wrap=True)

    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.add_reward(body), show, as_json=as_json)


def ledger_table(rewards: list[dict[str, Any]], now: float) -> RenderableType:
    from proxy.admin.formatting import ago, reward
    from proxy.cli.drawing import plain_table, session_label

    table = plain_table("session", "turn", "name", "reward", "source", "when", "", "comment")
    for one in rewards:
        marks = [
            "superseded" if one["superseded"] else "",
            f"trained in v{one['used_by']}" if one["used_by"] is not None else "",
            "late" if one["after_training"] and one["used_by"] is None else "",
        ]
        table.add_row(
            *(session_label(one["session_id"], one["external_id"]), one["turn_id"] or "", one["name"]),
            Text(reward(one["value"]), style="strike dim" if one["superseded"] else "bold"),
            *(one["source"], ago(one["created_at"], now), ", ".join(filter(None, marks))),
            one["comment"] or "",
        )
    return table


def revised_table(sessions: list[dict[str, Any]], now: float) -> RenderableType:
    from proxy.admin.formatting import ago, reward
    from proxy.cli.drawing import plain_table, session_label

    table = plain_table("session", "trained by", "trained on", "now", "turns", "what came since", "when")
    for one in sessions:
        turns = [f"{reward(turn['reward_then'])} → {reward(turn['reward_now'])}" for turn in one["turns"]]
        since = [f"{entry['name']} {reward(entry['value'])} by {entry['source']}" for entry in one["entries"]]
        table.add_row(
            *(session_label(one["session_id"], one["external_id"]), f"v{one['version']}"),
            *(reward(one["reward_then"]), reward(one["reward_now"])),
            *(", ".join(turns), ", ".join(since), ago(one["revised_at"], now)),
        )
    return table
