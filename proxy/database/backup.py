"""Backups of a store in use: complete, flushed to disk, and verified before the file gets its name.

An unfinished backup has a name of its own and is removed, by the next backup to the same name at the latest.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import URL, make_url

from proxy.errors import StoreUnavailable
from proxy.settings import ConfigurationError

# Pages copied at once. Writers wait while a part is copied, so it is small (16 MiB).
_PAGES = 1024

_LIST_SECONDS = 60.0


def backup(url: str, target: Path) -> int:
    """Write a backup to `target` and return its size in bytes.

    Raise ConfigurationError if `target` exists or cannot be written, if there is no store, or if PostgreSQL's
    programs are missing. Raise StoreUnavailable if the store cannot be read.
    """
    source = make_url(url)
    if target.exists():
        raise ConfigurationError(f"{target} exists, and a backup never overwrites: name another file")
    if not target.parent.is_dir():
        raise ConfigurationError(f"there is no directory {target.parent}: make it, or name another file")
    unfinished = target.with_name(f".{target.name}.unfinished")
    with suppress(FileNotFoundError):
        unfinished.unlink()
    try:
        if source.get_backend_name() == "sqlite":
            _copy_sqlite(Path(str(source.database)), unfinished)
        else:
            _dump_postgresql(source, unfinished)
        _publish(unfinished, target)
    except OSError as error:
        raise ConfigurationError(f"the backup {target} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()
    return target.stat().st_size


def _copy_sqlite(store: Path, unfinished: Path) -> None:
    if not store.is_file():
        raise ConfigurationError(f"there is no store at {store}: name its data directory with --data-dir")
    unfinished.touch(mode=0o600)
    try:
        with (
            closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(unfinished)) as copy,
        ):
            source.backup(copy, pages=_PAGES)
            copy.execute("PRAGMA journal_mode = DELETE")  # the backup is one file, without a log beside it
            damage = copy.execute("PRAGMA integrity_check").fetchall()
    except sqlite3.Error as error:
        raise StoreUnavailable(f"the store {store} cannot be copied: {error}") from error
    if damage != [("ok",)]:
        raise StoreUnavailable(f"the copy of {store} is damaged, and so is the store: {damage[0][0]}")


def _dump_postgresql(source: URL, unfinished: Path) -> None:
    dump, restore = _program("pg_dump"), _program("pg_restore")
    unfinished.touch(mode=0o600)
    environment = dict(os.environ)
    if source.password is not None:  # in the environment, as other users can see arguments
        environment["PGPASSWORD"] = str(source.password)
    address = source.set(drivername="postgresql", password=None).render_as_string(hide_password=False)
    command = [dump, "--format=custom", "--no-password", f"--file={unfinished}", f"--dbname={address}"]
    dumped = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if dumped.returncode != 0:
        raise StoreUnavailable(f"pg_dump: {dumped.stderr.strip() or dumped.returncode}")
    listed = subprocess.run(
        [restore, "--list", str(unfinished)], capture_output=True, text=True, check=False, timeout=_LIST_SECONDS
    )
    if listed.returncode != 0 or "TABLE DATA" not in listed.stdout:
        raise StoreUnavailable(f"the dump cannot be read: {listed.stderr.strip() or 'it holds no tables'}")


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ConfigurationError(
            f"{name} is not on the PATH: install PostgreSQL's client programs (Debian: postgresql-client), of the "
            "server's version or a newer one"
        )
    return found


def _publish(unfinished: Path, target: Path) -> None:
    """Flush the backup to disk, then give it its name."""
    with unfinished.open("rb+") as file:
        os.fsync(file.fileno())
    try:
        target.hardlink_to(unfinished)  # unlike a rename, never replaces a file that was created meanwhile
    except FileExistsError as error:
        raise ConfigurationError(f"{target} exists, and a backup never overwrites: name another file") from error
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
