"""Images built without Docker and without a registry: buildah, and root file systems made from Debian's packages.

Everything lies in a folder of the user's cache. Debian's root file systems are made once, and images at each run.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.markdown import ROOT

NEEDED = ("buildah", "mmdebstrap", "crun", "unshare", "nsenter", "setpriv", "ip")
SUITE = "bookworm"
_BASE = "localhost/base-rl-base:latest"
# Without these, apt writes what differs in every start.
_SMALL = ('--aptopt=Acquire::Languages "none"', "--dpkgopt=path-exclude=/usr/share/doc/*")


def missing() -> list[str]:
    """Return what this machine lacks to build and run images."""
    lacking = [program for program in NEEDED if shutil.which(program) is None]
    return lacking if os.geteuid() == 0 else [*lacking, "root"]


def options() -> list[str]:
    """Return further options of `buildah build`, such as mounts of a package index's configuration."""
    return shlex.split(os.environ.get("IMAGES_BUILD_OPTIONS", ""))


@dataclass(frozen=True)
class Image:
    """A built image: its configuration as the specification of images has it, and its files in a folder."""

    config: Mapping[str, Any]
    root: Path

    @property
    def megabytes(self) -> int:
        counted = subprocess.run(["du", "-s", "-B1000000", self.root], check=True, capture_output=True, text=True)
        return int(counted.stdout.split()[0])


class Builder:
    def __init__(self) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = Path(cache) / "base-rl" / "images"
        self._folder.mkdir(parents=True, exist_ok=True)

    def build(self, target: str) -> Image:
        """Build a target of the Dockerfile, on IMAGES_BASE or on an image of Debian's packages.

        With IMAGES_REUSE=1, the images of the last run are taken instead, for work on these tests.
        """
        tag = f"localhost/base-rl:{target}"
        if os.environ.get("IMAGES_REUSE") != "1":
            base = os.environ.get("IMAGES_BASE") or self._base()
            arguments = ["--isolation=chroot", "--format=docker", f"--target={target}", f"--build-arg=BASE={base}"]
            self._buildah("build", *arguments, *options(), f"--tag={tag}", str(ROOT))
        container = f"base-rl-{target}"
        self._remove(container)
        self._buildah("from", f"--name={container}", "--pull-never", tag)
        root = Path(self._buildah("mount", container).strip())
        found = json.loads(self._buildah("inspect", "--type=image", tag))
        return Image(config=found["Docker"]["config"], root=root)

    def stores(self) -> Image:
        """Return an image that stands in for those of PostgreSQL and Redis: Debian's servers, with the user 999."""
        root = self._folder / "stores"
        if not root.exists():
            hook = 'chroot "$1" useradd --uid 999 --no-create-home stores'
            self._debian("postgresql,redis-server", root.with_suffix(".new"), f"--customize-hook={hook}")
            root.with_suffix(".new").rename(root)
        return Image(config={"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "WorkingDir": "/"}, root=root)

    def close(self) -> None:
        for target in ("proxy", "torch"):
            self._remove(f"base-rl-{target}")

    def _base(self) -> str:
        archive = self._folder / "base.tar"
        if not archive.exists():
            self._debian("python3,python3-venv,ca-certificates", self._folder / "new.tar")
            (self._folder / "new.tar").rename(archive)
        self._buildah("build", "--isolation=chroot", f"--tag={_BASE}", "--file=-", str(self._folder), text=_FROM_TAR)
        return _BASE

    def _debian(self, packages: str, target: Path, *more: str) -> None:
        words = ["mmdebstrap", "--variant=minbase", f"--include={packages}", *_SMALL, *more, SUITE, str(target)]
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(words, check=True, capture_output=True, timeout=600)

    def _remove(self, container: str) -> None:
        if container in self._buildah("containers", "--format={{.ContainerName}}").split():
            self._buildah("rm", container)

    def _buildah(self, *words: str, text: str | None = None) -> str:
        # vfs copies files for every image and needs no support by the system, which containers often lack.
        places = ["--storage-driver=vfs", f"--root={self._folder / 'storage'}", f"--runroot={self._folder / 'run'}"]
        done = subprocess.run(
            ["buildah", *places, *words], input=text, check=False, capture_output=True, text=True, timeout=3000
        )
        assert done.returncode == 0, f"buildah {' '.join(words)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout


_FROM_TAR = "FROM scratch\nADD base.tar /\n"
