"""`make setup` installs only verified files: every pinned package has the hashes of its files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WITHOUT_HASHES = {"torch"}
"""Its wheels differ between indexes under one version: see `scripts/lock.sh`."""

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}(?: \\)?$")


def pins(path: Path) -> dict[str, str]:
    found = (_PIN.match(line) for line in path.read_text().splitlines())
    return {re.sub(r"[-_.]+", "-", pin[1]).lower(): pin[2] for pin in found if pin}


def hashes(path: Path) -> dict[str, int]:
    """Return the packages, and how many hashes each has."""
    counted: dict[str, int] = {}
    name = ""
    for line in path.read_text().splitlines():
        if pin := _PIN.match(line):
            name = pin[1]
            counted[name] = 0
        elif _HASH.search(line.strip()):
            counted[name] += 1
        else:
            assert not line or line.startswith("#"), line
    return counted


@pytest.mark.parametrize("kind", ["dev", "runtime"])
def test_every_package_of_a_lock_has_hashes_and_the_version_of_the_constraints(kind: str) -> None:
    path = ROOT / "locks" / f"{kind}.txt"
    assert min(hashes(path).values()) >= 1
    assert pins(path).items() <= pins(ROOT / "constraints.txt").items(), "run `make lock`"


def test_the_lock_for_development_has_all_pins() -> None:
    assert pins(ROOT / "constraints.txt").keys() - pins(ROOT / "locks" / "dev.txt").keys() == WITHOUT_HASHES


def test_the_lock_for_running_has_what_the_project_names() -> None:
    """`make setup` installs the extra `demo`, which includes `embedded` and `train`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    named = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    named += [one for extra in ("embedded", "train", "demo") for one in extras[extra] if "base-rl[" not in one]
    wanted = {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", one)[0]).lower() for one in named}
    assert wanted - pins(ROOT / "locks" / "runtime.txt").keys() == WITHOUT_HASHES


def test_the_setup_installs_by_hash_first() -> None:
    script = (ROOT / "scripts" / "setup.sh").read_text()
    by_hash = script.index('--require-hashes --no-deps -r "locks/$kind.txt"')
    assert by_hash < script.index('-c constraints.txt -e "$target"')
