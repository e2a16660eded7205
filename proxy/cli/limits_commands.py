"""`base-rl limits …`: show and change the limits and budgets of runs, projects and keys."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, out

if TYPE_CHECKING:
    from proxy.cli.operations import Operations

limits_app = typer.Typer(no_args_is_help=True, help="Rate limits and budgets of runs, projects and keys.")

NAMES = ("calls_per_minute", "tokens_per_minute", "burst_seconds", "tokens_per_day", "tokens_per_month")
NONE = "none"


@limits_app.command("list")
def limits_list(
    data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """List limits, and the tokens that are used of budgets."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.limits(),
        lambda found: out.print(_table(found, time.time()) if found else "no limits are set"),
        as_json=as_json,
    )


@limits_app.command("set")
def limits_set(
    assignments: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=NUMBER…", help=f"{', '.join(f'`{name}`' for name in NAMES)}; `none` removes it."
        ),
    ],
    run: Annotated[str | None, typer.Option(help="The run whose limits to change.")] = None,
    project: Annotated[str | None, typer.Option(help="The project whose runs share the limits.")] = None,
    key: Annotated[str | None, typer.Option(help="The id of a run or project key.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Change limits of a run, a project or a key; those that are not named stay as they are.

    A budget counts the tokens that are used from now on. Limits of a run that the configuration declares are those of
    the configuration again after the next start.
    """
    if sum(name is not None for name in (run, project, key)) != 1:
        raise typer.BadParameter("give one of --run, --project and --key")
    given = limits_of(assignments)

    async def change(base_rl: Operations) -> dict[str, Any]:
        if run is not None:
            await base_rl.change_run(run, {"settings": {"limits": given}})
        elif project is not None:
            known = (await base_rl.project(project))["limits"]
            await base_rl.change_project(project, {"limits": merged(known, given)})
        elif key is not None:
            known = (await base_rl.key(key))["limits"]
            await base_rl.change_key(key, {"limits": merged(known, given)})
        return {"limits": await base_rl.limits()}

    ask_and_show(
        (data_dir, url, api_key),
        change,
        lambda answer: out.print(_table(answer["limits"], time.time()) if answer["limits"] else "no limits are set"),
        as_json=as_json,
    )


def limits_of(assignments: Sequence[str]) -> dict[str, float | None]:
    """Return limits by name; None for those to remove. Raise BadParameter."""
    found: dict[str, float | None] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in NAMES:
            raise typer.BadParameter(
                f"{assignment!r}: write NAME=NUMBER, with one of the names {', '.join(NAMES)}",
                param_hint="NAME=NUMBER",
            )
        found[name] = _number(name, text)
    return found


def merged(known: Mapping[str, Any] | None, given: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the known limits with the given ones in their place."""
    return {name: value for name, value in {**(known or {}), **given}.items() if value is not None}


def budget_text(budgets: Sequence[Mapping[str, Any]], period: str) -> str:
    """Return the use of a budget, such as `1,200 of 5,000`; empty without one."""
    one = next((budget for budget in budgets if budget["period"] == period), None)
    if one is None:
        return ""
    return f"{one['used']:,} of {one['tokens']:,}" + (", exhausted" if one["is_exhausted"] else "")


def _number(name: str, text: str) -> float | None:
    if text == NONE:
        return None
    try:
        number = float(text) if name == "burst_seconds" else int(text.replace("_", ""))
    except ValueError as error:
        raise typer.BadParameter(f"{name}: {text!r} is no number; `{NONE}` removes a limit") from error
    return number


def _table(found: Sequence[Mapping[str, Any]], now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("of", "name", "calls/min", "tokens/min", "tokens today", "tokens this month", "day ends in"):
        table.add_column(heading)
    for one in found:
        limits, budgets = one["limits"], one["budgets"]
        day = next((budget["resets_at"] for budget in budgets if budget["period"] == "day"), None)
        table.add_row(
            one["scope"],
            one["name"],
            _shown(limits.get("calls_per_minute")),
            _shown(limits.get("tokens_per_minute")),
            budget_text(budgets, "day"),
            budget_text(budgets, "month"),
            "" if day is None else f"{max(0.0, day - now) / 3600:.1f} h",
        )
    return table


def _shown(limit: int | None) -> str:
    return "" if limit is None else f"{limit:,}"
