"""The images are built, and the services of docker-compose.yml run in them until an agent's rewards made a version.

Without a registry there are no images of PostgreSQL and Redis. Debian's servers stand in for them: Redis with the
file's own entrypoint, PostgreSQL with one that does what its image's does. The profile `gpu` is not run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.deploy.builds import Builder, Image, missing
from tests.deploy.composition import EXAMPLE, SERVICES, command, service_environment
from tests.deploy.containers import Room
from tests.docs.markdown import ROOT

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        bool(missing()) and os.environ.get("BASE_RL_REQUIRE_IMAGES") != "1",
        reason=f"building and running images needs {', '.join(missing())}",
    ),
]

# In the order in which compose starts them.
SERVED = ("postgres", "redis", "proxy", "worker", "engine", "trainer")
_START_SECONDS = 180.0
_LEARN_SECONDS = 300.0


@pytest.fixture(scope="module")
def images() -> Iterator[dict[str, Image]]:
    builder = Builder()
    try:
        yield {"stores": builder.stores(), "proxy": builder.build("proxy"), "torch": builder.build("torch")}
    finally:
        builder.close()


@pytest.fixture(scope="module")
def room(images: dict[str, Image], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    """Start the services in the order of the file, and wait until each is healthy."""
    folder = tmp_path_factory.mktemp("room")
    # Services of other users reach their files through it.
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    subprocess.run([ROOT / "deploy" / "make-secrets.sh", folder / "secrets"], check=True, capture_output=True)
    room = Room(folder, folder / "secrets")
    try:
        start_all(room, images)
        yield room
    finally:
        room.close()


def start_all(room: Room, images: dict[str, Image]) -> None:
    """Start the services as `docker compose up` does, but for the engine, which it starts beside the stores."""
    room.start("volumes", images["proxy"])
    assert room.wait("volumes", seconds=30) == 0, room.log("volumes")
    entrypoint = ROOT / "tests" / "deploy" / "stand_ins" / "postgres.sh"
    room.start("postgres", images["stores"], ["sh", "-c", entrypoint.read_text()])
    room.start("redis", images["stores"])
    for name in ("postgres", "redis"):
        room.wait_until_healthy(name, seconds=_START_SECONDS)
    room.start("engine", images["torch"])
    room.start("proxy", images["proxy"])
    room.start("worker", images["proxy"])
    for name in ("engine", "proxy", "worker"):
        room.wait_until_healthy(name, seconds=_START_SECONDS)
    room.start("trainer", images["torch"])


def serving_version(room: Room) -> int:
    return json.loads(room.get("http://127.0.0.1:8080/readyz"))["serving_version"] or 0


def secret(room: Room, name: str) -> str:
    return (room.secrets / name).read_text()


def wait_until(condition: Callable[[], bool], *, seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


def test_the_images_have_the_user_and_the_command_of_their_services(images: dict[str, Image]) -> None:
    for target in ("proxy", "torch"):
        config = images[target].config
        assert (config["User"], config["WorkingDir"]) == ("1000:1000", "/data")
        assert "/opt/base-rl/bin" in str(config["Env"])
    assert images["proxy"].config["Cmd"] == command("proxy")


def test_only_the_image_for_training_has_pytorch(images: dict[str, Image]) -> None:
    packages = "opt/base-rl/lib/python3*/site-packages"
    assert {target for target, image in images.items() if any(image.root.glob(f"{packages}/torch"))} == {"torch"}
    assert all(any(images[target].root.glob(f"{packages}/celery")) for target in ("proxy", "torch"))
    sizes = {target: images[target].megabytes for target in ("proxy", "torch")}
    sys.stdout.write(f"megabytes of the images' files: {sizes}\n")
    assert sizes["proxy"] < 700, "the proxy's image has become large: what is new in it?"


@pytest.mark.parametrize("name", SERVED)
def test_a_service_has_its_user_and_no_rights(room: Room, name: str) -> None:
    status = dict(re.findall(r"^(\w+):\s+(.*)$", room.execute(name, "cat", "/proc/1/status").stdout, re.MULTILINE))
    user = SERVICES[name]["user"].split(":")[0]
    assert set(status["Uid"].split()) == {user}
    assert {int(status[kind], 16) for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    for path in ("/file", "/etc/file", "/opt/file", "/usr/bin/file"):
        refused = room.execute(name, "touch", path)
        assert (refused.returncode, "Read-only file system" in refused.stderr) == (1, True), refused


@pytest.mark.parametrize("name", SERVED)
def test_no_secret_is_in_an_environment_or_in_the_list_of_processes(room: Room, name: str) -> None:
    shown = room.execute(name, "sh", "-c", "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline").stdout
    assert "PATH=" in shown
    logged = room.log(name)
    for file in room.secrets.iterdir():
        assert file.read_text() not in shown, file.name
        assert file.read_text() not in logged, file.name


def test_the_volumes_belong_to_the_user_of_the_services(room: Room) -> None:
    for name in ("data", "models"):
        assert (room.folder / "volumes" / name).stat().st_uid == 1000


def test_an_agents_rewards_make_a_version_that_is_served(room: Room) -> None:
    address, key = "http://127.0.0.1:8080", secret(room, "run_key")
    words = ["-m", "agents_examples.calculator.harness", "--model", EXAMPLE["RUN"], "--problems", "24"]
    environment = {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": key, "HOME": str(room.folder)}
    harness = room.run(sys.executable, *words, environment=environment, seconds=_LEARN_SECONDS)
    assert harness.returncode == 0, f"{harness.stderr}\n{room.log('proxy')}"

    wait_until(
        lambda: serving_version(room) >= 1,
        seconds=_LEARN_SECONDS,
        what=lambda: room.log("trainer") + room.log("proxy"),
    )


def test_a_worker_runs_jobs_whose_ids_came_through_redis(room: Room) -> None:
    def done() -> bool:
        metrics = room.get("http://127.0.0.1:9101/metrics")
        return re.search(r"^base_rl_job_seconds_count\{.*\} [1-9]", metrics, re.MULTILINE) is not None

    wait_until(done, seconds=150, what=lambda: room.log("worker") + room.log("proxy"))
    assert "Task base_rl.job" in room.log("worker")


def test_a_store_without_the_password_is_refused(room: Room) -> None:
    refused = room.execute("redis", "redis-cli", "ping")
    assert "NOAUTH" in refused.stdout
    url = service_environment("proxy")["BASE_RL_DATABASE__URL"]
    refused = room.execute("postgres", "psql", "--no-password", url, "--command=select 1")
    assert "no password supplied" in refused.stderr


@pytest.mark.parametrize("name", SERVED[::-1])
def test_a_service_stops_in_time(room: Room, name: str) -> None:
    status, seconds = room.stop(name)
    grace = {"1m": 60.0, None: 10.0}.get(SERVICES[name].get("stop_grace_period"), 15.0)
    assert seconds < grace, room.log(name)
    assert status == 0, room.log(name)


def test_stopped_services_start_again_with_what_they_learnt(room: Room, images: dict[str, Image]) -> None:
    start_all(room, images)
    wait_until(lambda: serving_version(room) >= 1, seconds=_START_SECONDS, what=lambda: room.log("proxy"))
    for name in ("data", "models"):
        assert (room.folder / "volumes" / name).stat().st_uid == 1000
