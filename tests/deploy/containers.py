"""Services of docker-compose.yml in their images, by crun: with their user, root, mounts, secrets, and no capability.

Docker does the same with namespaces of its own for every service. Here they share one network, which has nothing but
loopback, and the names of all services are in /etc/hosts. Restart policies, logs and limits are not applied, and no
`init` runs beside a service.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.deploy.builds import Image
from tests.deploy.composition import COMPOSE, SERVICES, filled, service_environment
from tests.docs.markdown import ROOT

# crun wants a hierarchy of version 2, even if it is told to leave it alone.
_ROOM = """
ip link set lo up
mount -t tmpfs cgroups /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
echo ready
exec sleep infinity
"""
_GET = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""
_NAMES = " ".join(sorted({*SERVICES, "engine"}))


class Room:
    """A network and a process tree of their own. All that is in it ends with this process at the latest."""

    def __init__(self, folder: Path, secrets: Path) -> None:
        self.folder, self.secrets = folder, secrets
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "hosts").write_text(f"127.0.0.1 localhost {_NAMES}\n")
        for name in COMPOSE["volumes"]:
            (folder / "volumes" / name).mkdir(parents=True)
        # Docker gives a new volume the owner of the folder that it covers, here in PostgreSQL's image.
        os.chown(folder / "volumes" / "postgres", 999, 999)
        spaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *spaces, "--propagation=private", "sh", "-ec", _ROOM],
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self._enter = ["nsenter", f"--target={children[0]}", "--mount", "--net", "--pid"]

    def start(self, name: str, image: Image, command: list[str] | None = None) -> None:
        """Start a service, by its own command if none is given."""
        bundle = self._bundle(name)
        bundle.mkdir(parents=True, exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(self._config(name, image, command)))
        with (bundle / "log").open("wb") as log:
            words = self._crun("run", f"--bundle={bundle}", name)
            self._running[name] = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self, name: str, *, seconds: float) -> int:
        """Return the exit status of a service that ends by itself."""
        return self._running[name].wait(seconds)

    def wait_until_healthy(self, name: str, *, seconds: float) -> None:
        """Return once the service's own health check succeeds; a service without one is only started."""
        kind, *words = SERVICES[name].get("healthcheck", {}).get("test", ["CMD", "true"])
        check = [filled(word) for word in (words if kind == "CMD" else ["/bin/sh", "-c", *words])]
        deadline = time.monotonic() + seconds
        while (tried := self.execute(name, *check)).returncode != 0:
            assert self._running[name].poll() is None, f"{name} ended:\n{self.log(name)}"
            assert time.monotonic() < deadline, f"{name} is not healthy: {tried.stderr}\n{self.log(name)}"
            time.sleep(0.5)

    def execute(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program in a service's container as its user."""
        exec_ = self._crun("exec", f"--user={SERVICES[name]['user']}", name, *words)
        return subprocess.run(exec_, check=False, capture_output=True, text=True, timeout=60)

    def run(self, *words: str, environment: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a program of this machine in the room's network."""
        environment = {"PATH": os.environ["PATH"], **environment}
        command = [*self._enter, *words]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=seconds, env=environment, cwd=ROOT
        )

    def get(self, url: str, key: str = "") -> str:
        got = self.run(sys.executable, "-c", _GET, url, key, environment={}, seconds=30)
        assert got.returncode == 0, got.stderr
        return got.stdout

    def stop(self, name: str) -> tuple[int, float]:
        """Stop a service as `docker stop` does. Return its exit status and how many seconds it took."""
        began = time.monotonic()
        subprocess.run(self._crun("kill", name, SERVICES[name].get("stop_signal", "SIGTERM")), check=True)
        return self._running[name].wait(120), time.monotonic() - began

    def log(self, name: str) -> str:
        return (self._bundle(name) / "log").read_text(errors="replace")[-6000:]

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()
        for process in self._running.values():
            process.wait(30)

    def _bundle(self, name: str) -> Path:
        return self.folder / "services" / name

    def _crun(self, *words: str) -> list[str]:
        return [*self._enter, "crun", f"--root={self.folder / 'state'}", "--cgroup-manager=disabled", *words]

    def _config(self, name: str, image: Image, command: list[str] | None) -> dict[str, Any]:
        """Return the configuration of the runtime (config.json of the OCI's specification)."""
        service = SERVICES[name]
        user, group = (int(number) for number in service["user"].split(":"))
        capabilities = [f"CAP_{each}" for each in service.get("cap_add", [])]
        kinds = ("bounding", "effective", "permitted", "inheritable", "ambient")
        own = [*service.get("entrypoint", []), *service.get("command", [])]
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": user, "gid": group},
                "args": command or [filled(word) for word in own],
                "env": [*image.config["Env"], *(f"{k}={v}" for k, v in service_environment(name).items())],
                "cwd": image.config["WorkingDir"],
                "capabilities": dict.fromkeys(kinds, capabilities),
                "noNewPrivileges": "no-new-privileges:true" in service["security_opt"],
            },
            "root": {"path": str(image.root), "readonly": service["read_only"]},
            "mounts": self._mounts(service),
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
                "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list"],
                "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger"],
            },
        }

    def _mounts(self, service: Mapping[str, Any]) -> list[dict[str, Any]]:
        def memory(target: str, *options: str) -> dict[str, Any]:
            return {"destination": target, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", *options]}

        def bound(source: Path, target: str, *options: str) -> dict[str, Any]:
            return {"destination": target, "type": "bind", "source": str(source), "options": ["bind", *options]}

        mounts = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            memory("/dev", "strictatime", "mode=755", "size=64k"),
            memory("/dev/shm", "nodev", "noexec", "mode=1777", f"size={service.get('shm_size', '64m')}"),
            bound(self.folder / "hosts", "/etc/hosts", "ro"),
        ]
        for each in service.get("tmpfs", []):
            target, given = each.split(":")
            words = given.split(",")
            executable = ["exec"] if "exec" in words else ["noexec"]
            mounts.append(memory(target, "nodev", *executable, *(word for word in words if word != "exec")))
        for each in service.get("volumes", []):
            source, target, *mode = each.split(":")
            place = ROOT / source if source.startswith(".") else self.folder / "volumes" / source
            mounts.append(bound(place, target, *(mode or ["rw"])))
        for each in service.get("secrets", []):
            mounts.append(bound(self.secrets / each, f"/run/secrets/{each}", "ro"))
        return mounts
