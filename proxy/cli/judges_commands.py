"""`base-rl judges …`: the judges of a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, errors, out

judges_app = typer.Typer(no_args_is_help=True, help="Models that score a run's sessions.")

_HEADINGS = ("judge", "model", "reward", "votes", "scored", "compared", "failed", "mean", "spread", "tokens", "cost")


@judges_app.command("list")
def judges_list(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List the judges of a run with their scores, the pairs that they compared for gates, and their cost."""
    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.judges(run), _print_table, as_json=as_json)


@judges_app.command("agreement")
def judges_agreement(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    judge: Annotated[str, typer.Argument(help="The judge's name.")],
    source: Annotated[str, typer.Option(help="The source of the people's rewards, as they were posted.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show how far a judge's scores agree with people's rewards of the same sessions and turns."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.agreement(run, judge, source),
        _print_agreement,
        as_json=as_json,
    )


@judges_app.command("try")
def judges_try(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    judge: Annotated[str, typer.Argument(help="The judge's name.")],
    sessions: Annotated[
        list[str], typer.Option("--sessions", help="A session's id; repeat it, or separate ids by commas.")
    ],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what a judge says about sessions, and record nothing. It uses the judge's tokens."""
    wanted = [one.strip() for text in sessions for one in text.split(",") if one.strip()]
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.try_judge(run, judge, wanted),
        _print_trial,
        as_json=as_json,
    )


@judges_app.command("secret")
def judges_secret(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    judge: Annotated[str, typer.Argument(help="The judge's name.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Print the secret that signs the requests of a verifier."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.judge_secret(run, judge),
        lambda found: out.print(found["secret"], markup=False, soft_wrap=True),
        as_json=as_json,
    )


def _print_agreement(found: dict[str, Any]) -> None:
    if found["correlation"] is None and not found["calibration"]:
        out.print(f"{found['pairs']} sessions or turns have both a score and such a reward; too few to compare.")
        return
    for key in ("pairs", "correlation", "kappa", "mean_difference"):
        shown = "unknown: one side is constant" if found[key] is None else f"{found[key]:.3g}"
        out.print(f"{key.replace('_', ' '):16} {shown}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("judge's score", "count", "mean", "people's mean"):
        table.add_column(heading)
    for one in found["calibration"]:
        means = (f"{one[key]:.3g}" for key in ("judge_mean", "people_mean"))
        table.add_row(f"{one['low']:.3g} to {one['high']:.3g}", str(one["count"]), *means)
    out.print(table)


def _print_trial(trial: dict[str, Any]) -> int:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("session", "turn", "reward", "score", "spread", "rationale"):
        table.add_column(heading)
    for one in trial["scores"]:
        numbers = ("" if one[key] is None else f"{one[key]:.3g}" for key in ("score", "spread"))
        table.add_row(one["session_id"], one["turn_id"] or "", one["reward"], *numbers, Text(one["rationale"] or ""))
    if trial["scores"]:
        out.print(table)
    for problem in trial["problems"]:
        errors.print(problem, soft_wrap=True, markup=False)
    tokens = trial["prompt_tokens"] + trial["completion_tokens"]
    cost = "" if trial["cost"] is None else f", cost {trial['cost']:.4g}"
    out.print(f"nothing is recorded; {tokens} tokens{cost}", markup=False)
    return 1 if trial["problems"] and not trial["scores"] else 0


def _print_table(judges: list[dict[str, Any]]) -> None:
    if not judges:
        out.print("The run has no judges: add a table [run.judges.NAME] to its settings.", markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in _HEADINGS:
        table.add_column(heading)
    for one in judges:
        table.add_row(
            *(one["name"], one["model"], one["reward"]),
            *(str(one[key]) for key in ("votes", "scored", "compared", "failed")),
            *("" if one[key] is None else f"{one[key]:.3g}" for key in ("mean_score", "spread")),
            str(one["prompt_tokens"] + one["completion_tokens"]),
            "" if one["cost"] is None else f"{one['cost']:.4g}",
        )
    out.print(table)
    for one in judges:
        if one["drift"] is not None:
            errors.print(f"{one['name']}: {one['drift']}", soft_wrap=True, markup=False)
        if one["problem"] is not None:
            errors.print(f"{one['name']}: {one['problem']}", soft_wrap=True, markup=False)
