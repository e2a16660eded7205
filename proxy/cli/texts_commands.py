"""`base-rl texts …`: add feedback in words."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, out

texts_app = typer.Typer(no_args_is_help=True, help="Feedback in words about sessions and turns.")


@texts_app.callback()
def texts() -> None:
    """Make `add` a subcommand: Typer runs the only command of a group without its name."""


@texts_app.command("add")
def texts_add(
    session: Annotated[str, typer.Argument(help="The session's id, or the client's own name for it.")],
    text: Annotated[str, typer.Argument(help="What was good or bad, and what would have been better.")],
    turn: Annotated[str | None, typer.Option(help="Id of the turn that the text is about.")] = None,
    source: Annotated[str, typer.Option(help="Who says it.")] = "api",
    final: Annotated[bool, typer.Option("--final", help="End the session. Default: it goes on.")] = False,
    run: Annotated[str | None, typer.Option(help="Run in which SESSION is a name; needed with an admin key.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="A repeated key records nothing.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Record a text about a session, or about one of its turns. `--api-key` may be a key of the run.

    `base-rl sessions show SESSION` shows it.
    """
    given: dict[str, Any] = {
        "session_id": session,
        "text": text,
        "turn_id": turn,
        "source": source,
        "final": final or None,
        "run": run,
        "idempotency_key": idempotency_key,
    }
    body = {key: item for key, item in given.items() if item is not None}

    def show(receipt: dict[str, Any]) -> None:
        late = receipt["effect"] == "recorded_after_training"
        about = receipt["turn_id"] or receipt["session_id"]
        note = ", after a trainer had taken its session" if late else ""
        out.print(f"{receipt['text']} about {about} is recorded{note}", soft_wrap=True)

    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.add_text(body), show, as_json=as_json)
