"""`base-rl versions …`: list the versions of a run, pin one, go back to an earlier one, reject one."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, out

versions_app = typer.Typer(
    no_args_is_help=True, help="The versions of a run: which one serves, and going back to an earlier one."
)

RunArgument = Annotated[str, typer.Argument(help="The run's name.")]
VersionArgument = Annotated[int, typer.Argument(min=0, help="The version's number, as `versions list` shows it.")]
Reason = Annotated[str, typer.Option(help="Why; the event log has it.")]

# Characters of a reason that the list shows; --json prints all.
_REASON_CHARACTERS = 60


@versions_app.command("list")
def versions_list(
    run: RunArgument,
    limit: Annotated[int, typer.Option(help="Most versions to list.", min=1)] = 20,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List a run's versions, newest first: which one serves, what each was made from, and why one was withdrawn."""

    def show(found: dict[str, Any]) -> None:
        from proxy.admin.formatting import ago

        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("version", "from", "state", "", "made", "weights", "reason"):
            table.add_column(heading, no_wrap=True)
        now = time.time()
        for one in found["versions"][:limit]:
            marks = [mark for mark in ("pinned", "promoted", "head") if found[mark] == one["version"]]
            table.add_row(
                str(one["version"]),
                "–" if one["parent"] is None else str(one["parent"]),
                one["state"],
                ", ".join(marks),
                ago(one["created_at"], now),
                _weights_of(one, found["head"]),
                # As one line, and as text: brackets in a string would be read as rich's markup.
                Text(" ".join((one["rejected_because"] or "").split())[:_REASON_CHARACTERS]),
            )
        out.print(table)
        if (hidden := len(found["versions"]) - limit) > 0:
            out.print(f"{hidden} older ones are not shown: --limit {len(found['versions'])}")

    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.versions(run), show, as_json=as_json)


@versions_app.command("diff")
def versions_diff(
    run: RunArgument,
    before: Annotated[int, typer.Argument(min=0, help="The earlier version.")],
    after: Annotated[int, typer.Argument(min=0, help="A later version that was made from it.")],
    limit: Annotated[int, typer.Option(help="Most sessions and tasks to list.", min=1, max=200)] = 10,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Explain what changed between two versions: the steps, the sessions that moved the policy most, the tasks that
    got better and worse, and figures of both."""

    def show(found: dict[str, Any]) -> None:
        from proxy.cli.version_drawing import draw_diff

        for part in draw_diff(found):
            out.print(part)

    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.version_diff(run, before, after, limit),
        show,
        as_json=as_json,
    )


@versions_app.command("pin")
def versions_pin(
    run: RunArgument,
    version: VersionArgument,
    reason: Reason,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Let the engines serve this version, whatever is trained, until `versions unpin`.

    Training goes on from the newest version, but only as far as its bound on staleness allows with trajectories of
    the pinned version.
    """
    change_versions((data_dir, url, api_key), run, f"{version}/pin", {"reason": reason}, as_json=as_json)


@versions_app.command("unpin")
def versions_unpin(
    run: RunArgument,
    reason: Reason,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Let the engines serve the newest version again, and every later one."""
    change_versions((data_dir, url, api_key), run, "unpin", {"reason": reason}, as_json=as_json)


@versions_app.command("rollback")
def versions_rollback(
    run: RunArgument,
    reason: Reason,
    to: Annotated[
        int | None, typer.Option(min=0, help="The version to go back to; default: the parent of the one that serves.")
    ] = None,
    leave_out_sessions: Annotated[
        bool,
        typer.Option(
            "--leave-out-sessions", help="Do not train sessions that a later version answered and no step has used."
        ),
    ] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Go back to an earlier version: engines serve it, and the trainer continues from it.

    Nothing is deleted: later versions stay in the list as `rolled_back`, and another run can begin from one of them
    (`base-rl runs create --from RUN@VERSION`).
    """
    body = {"reason": reason, "to": to, "leave_out_sessions": leave_out_sessions}
    change_versions((data_dir, url, api_key), run, "rollback", body, as_json=as_json)


@versions_app.command("reject")
def versions_reject(
    run: RunArgument,
    version: VersionArgument,
    reason: Reason,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Take one version out of service for good. The newest good version becomes the one to train from."""
    change_versions((data_dir, url, api_key), run, f"{version}/reject", {"reason": reason}, as_json=as_json)


def change_versions(place: Any, run: str, change: str, body: dict[str, Any], *, as_json: bool) -> None:
    """Make a change and print which versions matter afterwards."""

    def show(standing: dict[str, Any]) -> None:
        head, pinned, wanted = standing["head"], standing["pinned"], standing["wanted"]
        if standing["rolled_back"]:
            out.print(f"rolled back: {', '.join(map(str, standing['rolled_back']))}")
        how = "the newest good version" if pinned is None else "pinned"
        out.print(f"engines serve version {wanted} ({how}); training continues from version {head}", soft_wrap=True)

    ask_and_show(place, lambda base_rl: base_rl.change_versions(run, change, body), show, as_json=as_json)


def _weights_of(version: dict[str, Any], head: int) -> str:
    """Return where a version's weights are."""
    if version["weights"] is None:
        return "base model"
    if not version["is_saved"]:
        # A later version takes an unsaved one's place only after that was taken back.
        return "in memory" if version["version"] == head else "lost"
    return "deleted" if version["weights_removed_at"] else "there"
