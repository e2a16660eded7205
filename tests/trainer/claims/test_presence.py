"""Locks show which trainers live on this machine, so that no trainer takes a live one for dead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.claims.presence import Presence, new_process_name
from trainer.errors import ConfigurationError

ANNOUNCES = """
import sys
from pathlib import Path
from trainer.claims.presence import Presence

presence = Presence(Path(sys.argv[1]), sys.argv[2])
presence.announce()
print("here", flush=True)
sys.stdin.read()
presence.leave()
"""


class Neighbour:
    """A trainer's process that does nothing but hold its lock."""

    def __init__(self, directory: Path, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ANNOUNCES, str(directory), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "here\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def farewell(self) -> None:
        self.process.communicate("")


@pytest.fixture
def neighbour(tmp_path: Path) -> Iterator[Neighbour]:
    made = Neighbour(tmp_path, "neighbour")
    yield made
    made.kill()


def test_a_killed_process_is_dead_and_a_living_one_is_not(tmp_path: Path, neighbour: Neighbour) -> None:
    own = Presence(tmp_path, "own")
    own.announce()
    assert own.dead() == []
    neighbour.kill()
    assert own.dead() == ["neighbour"]
    assert own.dead() == ["neighbour"]
    own.forget("neighbour")
    assert own.dead() == []
    own.leave()


def test_a_process_that_ended_cleanly_is_gone_and_not_dead(tmp_path: Path, neighbour: Neighbour) -> None:
    neighbour.farewell()
    assert Presence(tmp_path, "own").dead() == []
    assert list(tmp_path.iterdir()) == []


def test_processes_of_other_machines_are_unknown(tmp_path: Path, neighbour: Neighbour) -> None:
    neighbour.kill()
    (tmp_path / "neighbour").write_text("another-machine")
    assert Presence(tmp_path, "own").dead() == []


def test_two_of_the_same_name_have_different_processes() -> None:
    names = {new_process_name() for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) <= 64 and "/" not in name for name in names)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"trainer\.weights\.directory"):
        Presence(tmp_path / "file" / "below", "own").announce()
