"""`base-rl webhooks …`: create, test and change webhooks, and deliver messages again."""

from __future__ import annotations

import asyncio
import json
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, errors, out

if TYPE_CHECKING:
    from proxy.cli.operations import Operations

webhooks_app = typer.Typer(no_args_is_help=True, help="Webhooks: events of the log, posted to your URL and signed.")

WebhookArgument = Annotated[str, typer.Argument(help="The webhook's id, as `webhooks list` shows it.")]
DeliveryArgument = Annotated[str, typer.Argument(help="The delivery's id, as `webhooks deliveries` shows it.")]

# How long a test message may take to be delivered, and the pause between two looks.
_TEST_SECONDS = 30.0
_LOOK_SECONDS = 0.2
# Characters of an error that a list shows; --json has all.
_ERROR_CHARACTERS = 80


class DeliveryState(StrEnum):
    """The states of a delivery."""

    WAITING = "waiting"
    RUNNING = "running"
    FAILED = "failed"
    DONE = "done"
    DEAD = "dead"


@webhooks_app.command("list")
def webhooks_list(
    run: Annotated[str | None, typer.Option(help="Only webhooks of this run.")] = None,
    project: Annotated[str | None, typer.Option(help="Only webhooks of this project and of its runs.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List webhooks, oldest first, without their secrets."""
    wanted = {name: value for name, value in (("run", run), ("project", project)) if value is not None}

    def show(webhooks: list[dict[str, Any]]) -> None:
        table = _table("webhook", "url", "events", "scope", "state", "error")
        for one in webhooks:
            table.add_row(
                one["id"],
                one["url"],
                ", ".join(one["events"]),
                one["run_id"] or one["project_id"] or "installation",
                _state(one),
                (one["disabled_because"] or one["last_error"] or "")[:_ERROR_CHARACTERS],
            )
        out.print(table)

    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.webhooks(wanted), show, as_json=as_json)


@webhooks_app.command("create")
def webhooks_create(
    target: Annotated[str, typer.Argument(help="The URL that gets the messages: https://…")],
    event: Annotated[
        list[str], typer.Option(help="A kind of event (`version.committed`), a domain (`version`) or `*`. Repeat it.")
    ],
    run: Annotated[str | None, typer.Option(help="Only events of this run.")] = None,
    project: Annotated[str | None, typer.Option(help="Only events of the runs of this project.")] = None,
    label: Annotated[str | None, typer.Option(help="A label, for people.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Create a webhook and print its secret, by which the receiver verifies messages. It is not shown again."""
    given = {"url": target, "events": event, "run": run, "project": project, "label": label}
    body = {name: value for name, value in given.items() if value is not None}
    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.create_webhook(body), _show_new, as_json=as_json)


@webhooks_app.command("rotate")
def webhooks_rotate(
    webhook: WebhookArgument,
    grace: Annotated[float, typer.Option(help="Seconds for which the replaced secret signs too.", min=0)] = 86400.0,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Replace the secret of a webhook and print the new one."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.rotate_webhook(webhook, grace),
        _show_new,
        as_json=as_json,
    )


@webhooks_app.command("test")
def webhooks_test(
    webhook: WebhookArgument,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Send a message of type `webhook.test`, and wait for the answer. The exit status is 1 if it did not arrive."""

    async def ask(base_rl: Operations) -> dict[str, Any]:
        delivery = await base_rl.test_webhook(webhook)
        until = time.monotonic() + _TEST_SECONDS
        while delivery["state"] in ("waiting", "running") and time.monotonic() < until:
            await asyncio.sleep(_LOOK_SECONDS)
            delivery = await base_rl.delivery(webhook, delivery["id"])
        return delivery

    def show(delivery: dict[str, Any]) -> int:
        if as_json:
            out.print_json(json.dumps(delivery))
        elif delivery["state"] == "done":
            out.print(f"delivered: the receiver answered {delivery['status']} after {delivery['seconds']:g} s")
        else:
            errors.print(f"not delivered: {delivery['error'] or 'no worker has sent it yet'}")
        return 0 if delivery["state"] == "done" else 1

    ask_and_show((data_dir, url, api_key), ask, show)


@webhooks_app.command("deliveries")
def webhooks_deliveries(
    webhook: WebhookArgument,
    state: Annotated[DeliveryState | None, typer.Option(help="Only deliveries in this state.")] = None,
    limit: Annotated[int, typer.Option(help="Most entries to list.", min=1, max=200)] = 20,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List deliveries, newest first. `--state dead` shows those that failed for good."""
    wanted = {"limit": str(limit)} | ({} if state is None else {"state": state.value})

    def show(deliveries: list[dict[str, Any]]) -> None:
        from proxy.admin.formatting import ago

        table = _table("delivery", "event", "state", "attempts", "status", "made", "error")
        now = time.time()
        for one in deliveries:
            table.add_row(
                one["id"],
                one["type"],
                one["state"],
                str(one["attempts"]),
                "" if one["status"] is None else str(one["status"]),
                ago(one["created_at"], now),
                (one["error"] or "")[:_ERROR_CHARACTERS],
            )
        out.print(table)

    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.deliveries(webhook, wanted), show, as_json=as_json)


@webhooks_app.command("redeliver")
def webhooks_redeliver(
    webhook: WebhookArgument,
    delivery: DeliveryArgument,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Deliver a message again, with the same id and body."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.redeliver(webhook, delivery),
        lambda found: out.print(f"{found['id']} is due now"),
    )


@webhooks_app.command("enable")
def webhooks_enable(
    webhook: WebhookArgument, data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None
) -> None:
    """Enable a webhook again. It sends events from now on, not those of the time in between."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.change_webhook(webhook, {"enabled": True}),
        lambda _: out.print(f"{webhook} is enabled"),
    )


@webhooks_app.command("disable")
def webhooks_disable(
    webhook: WebhookArgument, data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None
) -> None:
    """Disable a webhook: it sends nothing until it is enabled."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.change_webhook(webhook, {"enabled": False}),
        lambda _: out.print(f"{webhook} is disabled"),
    )


@webhooks_app.command("delete")
def webhooks_delete(
    webhook: WebhookArgument, data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None
) -> None:
    """Delete a webhook with its deliveries, also those that wait."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.delete_webhook(webhook),
        lambda _: out.print(f"{webhook} is deleted"),
    )


def _show_new(made: dict[str, Any]) -> None:
    out.print(made["secret"], soft_wrap=True)
    errors.print(f"This is the secret of {made['id']}. Keep it: it is not shown again.")


def _state(webhook: dict[str, Any]) -> str:
    if not webhook["enabled"]:
        return "disabled"
    return "enabled" if webhook["failing_since"] is None else "failing"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table
