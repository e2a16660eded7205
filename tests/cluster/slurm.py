"""A Slurm cluster of two nodes on this machine, with files, ports and daemons of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxy.cli.addresses import random_free_port

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")
_PATIENCE_S = 60.0

needs_slurm = pytest.mark.skipif(
    (any(shutil.which(name) is None for name in _PROGRAMS) or os.geteuid() != 0)
    and os.environ.get("BASE_RL_REQUIRE_SLURM") != "1",
    reason="no Slurm is installed (apt-get install slurm-wlm munge), or this is not root",
)

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/controller.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/controller.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
KillWait=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """A running cluster. `environment` makes Slurm's commands talk to it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Run a command of Slurm and return its output."""
        answer = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
        assert answer.returncode == 0, f"{command}: {answer.stderr}"
        return answer.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job, as `scontrol show job` has them."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def lose(self, node: str) -> None:
        """Kill a node's daemon, as if its machine were gone, and let the controller notice."""
        os.kill(int((self._directory / f"{node}.pid").read_text()), signal.SIGKILL)
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def bring_back(self, node: str) -> None:
        _run(["slurmd", "-N", node, "-f", str(self._directory / "slurm.conf")], self.environment)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self._directory.glob("*.log")))


@contextmanager
def slurm_cluster(directory: Path) -> Iterator[SlurmCluster]:
    """Start the daemons, yield once both nodes are idle, and end the daemons and what they started."""
    munge = directory / "munge"
    munge.mkdir(parents=True)
    (directory / "state").mkdir()
    host = socket.gethostname().split(".")[0]
    controller, first, second = (random_free_port("127.0.0.1") for _ in range(3))
    text = _CONFIGURATION.format(directory=directory, host=host, controller=controller, first=first, second=second)
    (directory / "slurm.conf").write_text(text)
    cluster = SlurmCluster(directory)
    user = pwd.getpwnam("munge")
    _open_way_to(directory)
    os.chown(munge, user.pw_uid, user.pw_gid)
    munge.chmod(0o711)
    files = {name: munge / name for name in ("key", "socket", "pid", "log", "seed")}
    _run(["mungekey", "--create", f"--keyfile={files['key']}"])
    os.chown(files["key"], user.pw_uid, user.pw_gid)
    daemons = [
        (
            munge / "pid",
            [
                *("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "munged"),
                *(f"--key-file={files['key']}", f"--socket={files['socket']}", f"--pid-file={files['pid']}"),
                *(f"--log-file={files['log']}", f"--seed-file={files['seed']}"),
            ],
        ),
        (directory / "controller.pid", ["slurmctld", "-f", str(directory / "slurm.conf")]),
        *(
            (directory / f"{node}.pid", ["slurmd", "-N", node, "-f", str(directory / "slurm.conf")])
            for node in ("n1", "n2")
        ),
    ]
    pid_files: list[Path] = []
    try:
        for pid_file, command in daemons:
            _run(command, cluster.environment)
            pid_files.append(pid_file)
        _until_idle(cluster)
        yield cluster
    finally:
        _end_jobs(cluster)
        for pid_file in reversed(pid_files):
            _end(pid_file)


def _open_way_to(directory: Path) -> None:
    """Let munged, which is another user, enter the directory: pytest makes its own private."""
    for each in (directory, *directory.parents):
        if each.stat().st_mode & 0o001 == 0:
            each.chmod(each.stat().st_mode | 0o011)


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    answer = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
    )
    assert answer.returncode == 0, f"{command}: {answer.stdout}{answer.stderr}"


def _until_idle(cluster: SlurmCluster) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while cluster.ask("sinfo", "--noheader", "--Node", "--format=%t").split() != ["idle", "idle"]:
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.2)


def _end_jobs(cluster: SlurmCluster) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while jobs := cluster.ask("squeue", "--noheader", "--format=%i").split():
            cluster.ask("scancel", *jobs)
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
    except AssertionError:
        return  # the controller is gone, and its nodes end with what they run


def _end(pid_file: Path) -> None:
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return
    deadline = time.monotonic() + _PATIENCE_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
