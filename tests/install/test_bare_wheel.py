"""The wheel without extras, in an environment of its own, has no torch and serves a call.

The test takes about a minute, nearly all of it for pip, so it has a target of its own, `make test-install`.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
_INSTALL_SECONDS = 900.0
_READY_SECONDS = 120.0

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("install")]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the project as a clone contains it: setuptools leaves its build folder there, and would pack an older
    one."""
    copy = tmp_path_factory.mktemp("tree")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-w", folder, tree], check=True, timeout=_INSTALL_SECONDS)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the environment's programs."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=_INSTALL_SECONDS)
    pip = [str(venv / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True, timeout=_INSTALL_SECONDS)
    return venv / "bin"


def run(programs: Path, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [programs / words[0], *words[1:]],
        cwd=cwd,
        env={"HOME": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def up(programs: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Return address and key, as `base-rl up --engine scripted` prints them."""
    log = tmp_path / "up.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [programs / "base-rl", "up", "--engine", "scripted", "--port", "0"],
            cwd=tmp_path,
            env={"HOME": str(tmp_path)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while "Ctrl-C ends it" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        found = dict(re.findall(r"export (OPENAI_\w+)=(\S+)", log.read_text()))
        yield found["OPENAI_BASE_URL"], found["OPENAI_API_KEY"]
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        process.kill()


def test_the_wheel_has_four_names_and_all_files_of_the_packages(wheel: Path, tree: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    packages = {"proxy", "trainer", "migrations", "agents_examples"}
    assert {name.partition("/")[0] for name in packed} == packages
    in_tree = {str(path.relative_to(tree)) for package in packages for path in (tree / package).rglob("*")}
    # For people and tests, not for the program.
    files = {name for name in in_tree if (tree / name).is_file() and not name.endswith((".md", "/CHECKSUMS"))}
    assert files - packed == set()


def test_torch_is_not_installed(programs: Path, tmp_path: Path) -> None:
    names = ("torch", "transformers", "peft", "safetensors", "openai")
    code = f"import importlib.util as u; print([name for name in {names} if u.find_spec(name)])"
    assert run(programs, "python", "-c", code, cwd=tmp_path).stdout.strip() == "[]"


def test_a_call_is_served_and_recorded(up: tuple[str, str]) -> None:
    address, key = up
    with httpx.Client(headers={"authorization": f"Bearer {key}"}) as client:
        body = {"model": "policy", "messages": [{"role": "user", "content": "one two three"}]}
        answer = client.post(f"{address}/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert "one two three" in answer.json()["choices"][0]["message"]["content"]
        session = answer.headers["x-base-rl-session"]
        turns = client.get(f"{address}/sessions/{session}").json()["turns"]
    assert [turn["state"] for turn in turns] == ["complete"]


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        (("up", "--model", "some/model"), "embedded,train"),
        (("up", "--model", "some/model", "--no-trainer"), "embedded"),
        (("up", "--model", "some/model", "--engine", "http://127.0.0.1:1"), "train"),
        (("demo",), "embedded,train,demo"),
        (("train",), "train"),
        (("fit", "sft"), "train"),
        (("replay", "policy", "1", "--url", "http://127.0.0.1:1", "--api-key", "k"), "train"),
    ],
)
def test_a_command_that_needs_an_extra_names_it(
    programs: Path, tmp_path: Path, words: tuple[str, ...], extras: str
) -> None:
    ended = run(programs, "base-rl", *words, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert f"pip install -c constraints.txt -e '.[{extras}]'" in ended.stderr.replace("\n", " ")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("words", [(), ("fit", "sft"), ("replay", "policy", "1"), ("presets",)])
def test_the_trainer_itself_names_its_extra(programs: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = run(programs, "python", "-m", "trainer", *words, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("the trainer cannot start without torch")
    assert "pip install -c constraints.txt -e '.[train]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_doctor_reports_missing_packages(programs: Path, tmp_path: Path) -> None:
    ended = run(programs, "base-rl", "doctor", "--port", "0", cwd=tmp_path)
    assert "torch" in ended.stdout
    assert "pip install -c constraints.txt -e '.[embedded,train]'" in ended.stdout
    assert run(programs, "base-rl", "doctor", "--port", "0", "--engine", "scripted", cwd=tmp_path).returncode == 0
