"""The agent's tool: bash in a folder, behind bubblewrap, without network.

A command sees the system's files, read-only, and the folder, the only place that it can change. It has five seconds,
a second of processor time and 256 MiB of memory per process, and may write files of up to 64 KiB. After it, all that
it started is killed. The number of its processes and files is not limited.

There is no shell without bubblewrap: one that a model drives could delete whatever the user may delete.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agents_examples.sandbox import Stopped, run, wall

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam

SECONDS = 5.0
LONGEST_COMMAND = 1024
LONGEST_OUTPUT = 1024
LARGEST_FILE = 65_536
MOST_FILES = 64

BASH_TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in the folder.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}

_LIMITED = f'exec 2>&1; ulimit -t 1 -v 262144 -f {LARGEST_FILE // 1024} -c 0; eval "$1"'


class NoSandbox(Exception):
    """Bubblewrap is not installed, or may not make namespaces here."""


@contextlib.contextmanager
def folder_with(files: Mapping[str, str]) -> Iterator[Path]:
    """Make a folder with these files for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="terminal-") as directory:
        folder = Path(directory)
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        yield folder


def files_in(folder: Path) -> dict[str, str]:
    """Return the contents of the first 64 files of a folder by their paths. Links, which may lead out of it, are not
    followed and not returned; folders without files and unreadable files are not returned either."""
    found = {}
    for path in sorted(folder.rglob("*"))[:MOST_FILES]:
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(PermissionError):  # a command may take away the right to read
                found[str(path.relative_to(folder))] = path.read_bytes().decode(errors="replace")
    return found


async def run_tool(arguments: str, folder: Path) -> str:
    """Run the command in a call's JSON arguments. Return what it printed, or text that begins with `error`."""
    try:
        call = json.loads(arguments)
    except ValueError:
        return "error: the arguments are not JSON"
    if not isinstance(call, dict) or call.keys() != {"command"} or not isinstance(call["command"], str):
        return "error: the arguments are an object with command, a text"
    if len(call["command"]) > LONGEST_COMMAND:
        return f"error: the command has more than {LONGEST_COMMAND} characters"
    try:
        output, status = await run_command(call["command"], folder)
    except Stopped as stopped:
        return f"error: {stopped}"
    if status:
        return f"error: exit status {status}\n{output}".strip()
    return output or "no output"


async def run_command(command: str, folder: Path) -> tuple[str, int]:
    """Run a command of bash in a folder. Return what it printed and its exit status.

    Raise Stopped if it had to be killed, and NoSandbox if there is no sandbox.
    """
    if not wall():
        raise NoSandbox("bubblewrap does not work here; install it, on Debian and Ubuntu: apt-get install bubblewrap")
    place = ["--bind", str(folder), "/folder", "--chdir", "/folder", "--setenv", "PATH", "/usr/bin:/bin"]
    words = [*wall(), *place, "bash", "--norc", "-c", _LIMITED, "bash", command]
    return await run(words, seconds=SECONDS, longest_output=LONGEST_OUTPUT)
