"""`python -m tests.cluster.ray_nodes`: a Ray cluster on this machine whose nodes come and go as standard input says.

Each line is a command in JSON, answered by a line in JSON: `["add", NAME, RESOURCES]`, `["lose", NAME]` (its
processes are killed, as when a machine is lost), `["lose raylet", NAME]` (Ray's processes alone are killed),
`["remove", NAME]` (it leaves, as by `ray stop`), `["actors"]` (the
names of the living ones). The first answer has the cluster's address and the directory of its logs. The cluster ends
with the input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import ray
from ray._private import ray_constants
from ray.cluster_utils import Cluster
from ray.util import list_named_actors

_STORE_BYTES = 80 * 2**20  # nearly the least that Ray accepts
# Ray's defaults take 15 seconds and more to notice a lost node.
_HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}


def serve(commands: Any, answers: Any) -> None:
    # Paths of sockets have at most 107 characters, so Ray's files cannot be below pytest's.
    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        (Path(directory) / "ray").mkdir()
        os.environ["RAY_TMPDIR"] = directory  # its default would be shared with other clusters of this machine
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            "_system_config": _HEALTH,
        }
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=cluster.address, namespace="base-rl", log_to_driver=False, logging_level="ERROR")
        nodes: dict[str, Any] = {}

        def answer(value: Any) -> None:
            answers.write(f"{json.dumps(value)}\n")
            answers.flush()

        try:
            answer({"address": cluster.address, "logs": str(Path(directory) / "ray" / "session_latest" / "logs")})
            for line in commands:
                verb, *words = json.loads(line)
                if verb == "add":
                    name, resources = words
                    cpus = resources.pop("CPU")
                    nodes[name] = cluster.add_node(
                        num_cpus=cpus, resources=resources, object_store_memory=_STORE_BYTES
                    )
                    answer(name)
                elif verb in ("lose", "lose raylet"):
                    node = nodes.pop(words[0])
                    if verb == "lose":
                        _kill(node)
                    cluster.remove_node(node, allow_graceful=False)
                    answer(words[0])
                elif verb == "remove":
                    cluster.remove_node(nodes.pop(words[0]), allow_graceful=True)
                    answer(words[0])
                else:
                    answer(list_named_actors())
        finally:
            ray.shutdown()
            cluster.shutdown()


def _kill(node: Any) -> None:
    """Kill the node's raylet, its workers and everything that they started, in this order: the first to die must not
    report the death of the others."""
    raylet = psutil.Process(node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid)
    below = raylet.children(recursive=True)
    for process in (raylet, *below):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    # Ray writes to the standard output, which has the answers alone here.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, which ends the cluster
    serve(sys.stdin, answers)
