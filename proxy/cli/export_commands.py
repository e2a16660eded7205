"""`base-rl export` and `base-rl import`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Refused, Url, errors, finish, out, where
from proxy.contract.states import SessionState
from proxy.contract.trajectory import Purpose

_BATCH_BYTES = 4 << 20
_BATCH_LINES = 64
# Seconds between two lines of progress in a log.
PROGRESS_SECONDS = 5.0


class FileFormat(StrEnum):
    PARQUET = "parquet"
    JSONL = "jsonl"


_When = Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="UTC.")]


def export(
    run: Annotated[str, typer.Argument(help="The run's name or id.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder to write, new or empty.")] = None,
    background: Annotated[
        str | None,
        typer.Option(
            "--in-background",
            metavar="NAME",
            help="Instead of --out: a job of the proxy writes the file of this name to server.exports_dir or"
            " server.exports_url, over restarts.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option(help="With --in-background: wait until the file is written.")] = True,
    file_format: Annotated[
        FileFormat | None, typer.Option("--format", help="Default: parquet, which needs the extra `export`.")
    ] = None,
    preferences: Annotated[
        bool, typer.Option("--preferences", help="Preferences instead of sessions, as JSON lines.")
    ] = False,
    since: _When = None,
    until: _When = None,
    version: Annotated[int | None, typer.Option(min=0, help="Sessions with tokens of this policy version.")] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Least reward; sessions without a reward are left out.")
    ] = None,
    purpose: Annotated[Purpose | None, typer.Option(help="train or eval.")] = None,
    state: Annotated[SessionState | None, typer.Option(help="open or ended.")] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Write a run's sessions into a folder that `datasets.load_dataset` reads: messages, rewards, token ids.

    With --in-background, the proxy writes one file to its own disk or object store, and goes on over restarts.
    With --preferences, write pairs of a preferred and a rejected answer with the token ids of both; --since and
    --until then bound the time at which the preference was stated.
    An interrupted export leaves no files.
    """
    wanted = {
        "since": _seconds(since),
        "until": _seconds(until),
        "version": version,
        "min_reward": min_reward,
        "purpose": purpose.value if purpose is not None else None,
        "state": state.value if state is not None else None,
    }
    query = {name: value for name, value in wanted.items() if value is not None}

    def write() -> int:
        if (out_dir is None) == (background is None):
            raise Refused("name either a folder with --out, or an export with --in-background")
        if preferences and (background is not None or query.keys() - {"since", "until"}):
            raise Refused("--preferences goes with --out, --since and --until alone")
        if preferences and file_format is FileFormat.PARQUET:
            raise Refused("preferences are written as JSON lines")
        place = where(data_dir, url, api_key)
        if out_dir is not None:
            _write(place, run, out_dir, file_format, query, preferences=preferences)
            return 0
        from proxy.cli.background_export import export_in_background

        body = {"name": background, "format": (file_format or FileFormat.PARQUET).value, **query}
        asyncio.run(export_in_background(*place, run, body, wait=wait))
        return 0

    finish(write)


def _write(
    place: tuple[str, str],
    run: str,
    folder: Path,
    file_format: FileFormat | None,
    query: dict[str, Any],
    *,
    preferences: bool,
) -> None:
    """Write an export from the proxy at `place` (address, key) into a folder, and print what it has. Raises Refused,
    ProxyUnreachable."""
    from proxy.cli.datasets import DatasetWriter
    from proxy.transfer.parquet import ParquetNotInstalled, is_installed

    suffix = file_format or (FileFormat.JSONL if preferences else FileFormat.PARQUET)
    if suffix is FileFormat.PARQUET and not is_installed():
        raise Refused(str(ParquetNotInstalled()))
    writer = DatasetWriter(folder, suffix=suffix.value, preferences=preferences)
    try:
        what = "export/preferences" if preferences else "export"
        asyncio.run(_export(*place, f"/api/v1/runs/{run}/{what}", query, writer))
        files = writer.finish(run)
    except BaseException:
        writer.abandon()
        raise
    out.print(
        f"{writer.records} preferences in {len(files)} files below {folder}"
        if preferences
        else f"{writer.records} sessions with {writer.turns} turns in {len(files)} files below {folder}",
        soft_wrap=True,
    )


def import_sessions(
    source: Annotated[Path, typer.Argument(help="An exported folder, or a .jsonl or .parquet file.")],
    run: Annotated[str, typer.Option(help="The run to add the sessions to: its name or id.")],
    train: Annotated[
        bool, typer.Option("--train", help="Train on the imported sessions that a trainer can learn from.")
    ] = False,
    keep_ids: Annotated[
        bool, typer.Option("--keep-ids", help="Use the ids of the export for sessions, turns and rewards.")
    ] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Add exported sessions, or preferences about sessions that the run has, to a run.

    Records that the run already has are skipped: importing a file twice adds nothing.
    """

    def read() -> int:
        from proxy.transfer.parquet import ParquetNotInstalled
        from proxy.transfer.records import InvalidRecord

        address, key = where(data_dir, url, api_key)
        try:
            with import_progress() as progress:
                total = asyncio.run(
                    _import(address, key, run, source, train=train, keep_ids=keep_ids, progress=progress)
                )
        except (InvalidRecord, ParquetNotInstalled) as error:
            raise Refused(str(error)) from error
        if as_json:
            out.print_json(json.dumps(total))
        else:
            skipped = f", {total['skipped']} were there already" if total["skipped"] else ""
            trainable = f", {total['trainable']} of them for training" if train else ""
            named = "preferences" if total["preferences"] else "sessions"
            out.print(f"{total['imported']} {named} imported{trainable}{skipped}", soft_wrap=True)
        return 0

    finish(read)


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.replace(tzinfo=UTC).timestamp()


async def _export(address: str, key: str, path: str, query: dict[str, Any], writer: Any) -> None:
    from proxy.cli.operations import Operations

    async with Operations(address, key) as operations:
        async for line in operations.lines(path, query):
            writer.add(line)


async def _import(
    address: str,
    key: str,
    run: str,
    source: Path,
    *,
    train: bool,
    keep_ids: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, int]:
    from proxy.cli.datasets import is_preference, lines_of
    from proxy.cli.operations import Operations

    total = {"imported": 0, "skipped": 0, "trainable": 0, "preferences": 0}
    async with Operations(address, key) as operations:
        for path, first, lines in _batches(lines_of(source)):
            what, query = "import", {"train": train, "keep_ids": keep_ids, "first_line": first}
            if is_preference(lines[0]):
                if train or keep_ids:
                    raise Refused(f"{path} holds preferences: --train and --keep-ids are for sessions")
                what, query = "import/preferences", {"first_line": first}
                total["preferences"] += len(lines)
            answer = await operations.send(f"/api/v1/runs/{run}/{what}", query, b"\n".join(lines), label=path)
            for name in answer:
                total[name] += answer[name]
            progress(total["imported"] + total["skipped"])
    return total


@contextmanager
def import_progress() -> Iterator[Callable[[int], None]]:
    """Yield a function that prints the number of records so far on standard error: in one changing line on a
    terminal, in a line every `PROGRESS_SECONDS` in a log."""
    began = printed_at = time.monotonic()
    live = errors.status("importing …") if errors.is_terminal else None

    def tell(records: int) -> None:
        nonlocal printed_at
        now = time.monotonic()
        line = f"{records:,} read, {records / max(now - began, 0.001):,.0f} a second"
        if live is not None:
            live.update(f"importing … {line}")
        elif now - printed_at >= PROGRESS_SECONDS:
            printed_at = now
            errors.print(line)

    with live if live is not None else nullcontext():
        yield tell


def _batches(lines: Iterator[tuple[str, int, bytes]]) -> Iterator[tuple[str, int, list[bytes]]]:
    """Yield batches of consecutive lines of one file, each with the number of its first line."""
    path, first, batch, size = "", 0, list[bytes](), 0
    for of, number, line in lines:
        follows = of == path and number == first + len(batch)
        if batch and not (follows and len(batch) < _BATCH_LINES and size + len(line) <= _BATCH_BYTES):
            yield path, first, batch
            batch, size = [], 0
        if not batch:
            path, first = of, number
        batch.append(line)
        size += len(line)
    if batch:
        yield path, first, batch
