from __future__ import annotations

import os
import resource
from contextlib import ExitStack
from pathlib import Path

import pytest

from proxy import machine

MIB = 1 << 20


def groups(tmp_path: Path, own: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Create a tree of control groups with these limits, and the file that names a process's own groups."""
    root = tmp_path / "cgroup"
    for path, text in limits.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    listed = tmp_path / "self"
    listed.write_text(own)
    return root, listed


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": f"{100 * MIB}\n"}, 100),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{70 * MIB}\n"}, 70),
        ("0::/a/b\n", {"a/b/memory.max": f"{30 * MIB}\n", "a/memory.max": f"{70 * MIB}\n"}, 30),
        ("5:cpu,memory:/x\n1:name=systemd:/\n", {"memory/x/memory.limit_in_bytes": f"{50 * MIB}\n"}, 50),
    ],
)
def test_the_smallest_limit_of_the_control_groups_counts(
    tmp_path: Path, own: str, limits: dict[str, str], expected: int
) -> None:
    assert machine.memory_limit(*groups(tmp_path, own, limits)) == expected * MIB


def test_without_control_groups_it_is_the_machines_memory(tmp_path: Path) -> None:
    limit = machine.memory_limit(tmp_path / "none", tmp_path / "nothing")
    assert 0 < limit <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_open_descriptors_are_counted() -> None:
    before = machine.open_descriptors()
    if before is None:
        pytest.skip("this system does not tell")
    with Path(os.devnull).open():
        assert machine.open_descriptors() == before + 1
    assert machine.descriptor_limit() > before


def test_without_a_descriptor_to_count_all_are_taken_as_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = machine.open_descriptors()
    if used is None:
        pytest.skip("this system does not tell")
    with ExitStack() as stack:
        lowest = stack.enter_context(Path(os.devnull).open()).fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        assert machine.open_descriptors() == lowest + 1
