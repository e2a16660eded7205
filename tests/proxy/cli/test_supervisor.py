"""The supervisor with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from proxy.cli.supervisor import AWAY, Part, PartFailed, Supervisor

SLEEPER = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint('up', flush=True)\n"
FOREVER = SLEEPER + "while True: time.sleep(60)\n"
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\n" + (
    "while True: time.sleep(60)\n"
)


class Heard:
    """Collects the supervisor's messages, and lets a test wait for one of them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = asyncio.Condition()

    def __call__(self, part: str, what: str) -> None:
        self.lines.append(f"{part}: {what}")
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def wait_for(self, count: int, word: str) -> None:
        async with asyncio.timeout(30), self._news:
            await self._news.wait_for(lambda: sum(word in line for line in self.lines) >= count)


def python(code: str, name: str = "part", **options: float) -> Part:
    return Part(name=name, argv=(sys.executable, "-c", code), **options)  # type: ignore[arg-type]


async def until_log_says(supervisor: Supervisor, name: str, word: str, count: int = 1) -> None:
    async with asyncio.timeout(30):
        while supervisor.log_tail(name).count(word) < count:
            await asyncio.sleep(0.01)


async def test_a_part_that_dies_is_started_again(tmp_path: Path) -> None:
    heard = Heard()
    async with Supervisor([python(FOREVER)], tmp_path, heard) as supervisor:
        first = supervisor.pid("part")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await heard.wait_for(2, "started")
        assert supervisor.pid("part") != first
        assert supervisor.restarts("part") == 1
        assert supervisor.alive("part")
        assert any("killed by SIGKILL" in line for line in heard.lines)


AWAY_PART = (
    "import pathlib, sys, time\n"
    "if pathlib.Path(sys.argv[1]).exists():\n"
    "    time.sleep(600)\n"
    "print('base-rl: the database cannot be reached', file=sys.stderr)\n"
    f"sys.exit({AWAY})\n"
)


def waiting_for(file: Path) -> Part:
    return Part(name="part", argv=(sys.executable, "-c", AWAY_PART, str(file)))


async def test_a_dependency_missing_at_the_first_start_is_reported_at_once(tmp_path: Path) -> None:
    heard = Heard()
    async with Supervisor([waiting_for(tmp_path / "never")], tmp_path, heard) as supervisor:
        with pytest.raises(PartFailed, match="the database cannot be reached"):
            await supervisor.wait_for_failure()
        assert supervisor.restarts("part") == 0


async def test_a_dependency_missing_later_is_reported_and_waited_for(tmp_path: Path) -> None:
    """This does not count as repeated deaths, however often it happens."""
    heard, back = Heard(), tmp_path / "back"
    back.touch()
    async with Supervisor([waiting_for(back)], tmp_path, heard) as supervisor:
        pid = supervisor.pid("part")
        assert pid is not None
        back.unlink()
        os.kill(pid, signal.SIGKILL)
        await heard.wait_for(2, "the database cannot be reached; trying again")
        back.touch()
        await heard.wait_for(4, "started")
        supervisor.raise_for_failure()


async def test_the_end_of_the_block_ends_every_part(tmp_path: Path) -> None:
    async with Supervisor([python(FOREVER, "a"), python(FOREVER, "b")], tmp_path, Heard()) as supervisor:
        await until_log_says(supervisor, "a", "up")
        await until_log_says(supervisor, "b", "up")
        pids = [supervisor.pid("a"), supervisor.pid("b")]
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_part_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    async with Supervisor([python(STUBBORN, stop_seconds=0.2)], tmp_path, Heard()) as supervisor:
        await until_log_says(supervisor, "part", "up")
        pid = supervisor.pid("part")
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_part_that_dies_again_and_again_is_given_up_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.cli.supervisor._FIRST_BACKOFF_S", 0.001)
    broken = python("import sys; print('no such model', flush=True); sys.exit(3)", "engine")
    async with Supervisor([broken], tmp_path, Heard()) as supervisor:
        with pytest.raises(PartFailed, match=r"engine died 5 times[\s\S]*status 3[\s\S]*no such model"):
            async with asyncio.timeout(30):
                await supervisor.wait_for_failure()
        with pytest.raises(PartFailed):
            supervisor.raise_for_failure()


async def test_the_environment_of_a_part_is_laid_over_our_own(tmp_path: Path) -> None:
    code = "import os; print(os.environ['PART_SAYS'], 'PATH' in os.environ, flush=True)\n" + FOREVER
    part = Part(name="part", argv=(sys.executable, "-c", code), env={"PART_SAYS": "hello"})
    async with Supervisor([part], tmp_path, Heard()) as supervisor:
        await until_log_says(supervisor, "part", "hello True")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's help is Linux's")
async def test_parts_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom proxy.cli.supervisor import Part, Supervisor\n"
        "async def main():\n"
        f"    part = Part(name='part', argv=(sys.executable, '-c', {FOREVER!r}))\n"
        f"    async with Supervisor([part], Path({str(tmp_path)!r}), lambda *_: None) as supervisor:\n"
        "        print(supervisor.pid('part'), flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    part = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    async with asyncio.timeout(30):
        while Path(f"/proc/{part}/status").exists() and "Z (zombie)" not in Path(f"/proc/{part}/status").read_text():
            await asyncio.sleep(0.01)


async def test_a_part_with_a_wrong_configuration_is_not_restarted(tmp_path: Path) -> None:
    heard = Heard()
    refusing = python("import sys; sys.stderr.write('base-rl: the reason\\n'); sys.exit(2)")
    async with Supervisor([refusing], tmp_path, heard) as supervisor:
        async with asyncio.timeout(30):
            with pytest.raises(PartFailed, match=r"^the reason \(reported by part"):
                await supervisor.wait_for_failure()
        assert supervisor.restarts("part") == 0
