"""The agent's tool: run a Python program in a process of its own, with limits, and return what it printed.

The process reads the program, limits itself, and runs it: a second of processor time, 256 MiB of memory, nothing
written to files, eight open ones, no children (which the kernel does not keep from root). It has no environment
variables and no modules but Python's own. After five seconds, or after too much output, it is killed with all that it
started.

Where bubblewrap (`bwrap`) is installed and may make namespaces, the process also has no network, sees no processes
and no files but the system's, which it cannot change. Without it, the limits keep a bad program from using up the
machine, but not from reading the user's files or opening connections: let no model that you do not trust use the tool
there.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from agents_examples.sandbox import Stopped, run, wall

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionFunctionToolParam

SECONDS = 5.0
LONGEST_PROGRAM = 4096
LONGEST_OUTPUT = 1024

PYTHON_TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}

_LIMITED = """
import resource, sys
program = sys.stdin.read()
for limit, value in ((resource.RLIMIT_CPU, 1), (resource.RLIMIT_AS, 2**28), (resource.RLIMIT_FSIZE, 0),
                     (resource.RLIMIT_NOFILE, 8), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (value, value))
try:
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
except Exception as error:
    print(f"error: {type(error).__name__}: {error}")
"""


async def run_tool(arguments: str) -> str:
    """Run the program in a call's JSON arguments. Return what it printed, or text that begins with `error`."""
    try:
        call = json.loads(arguments)
    except ValueError:
        return "error: the arguments are not JSON"
    if not isinstance(call, dict) or call.keys() != {"code"} or not isinstance(call["code"], str):
        return "error: the arguments are an object with code, a text"
    if len(call["code"]) > LONGEST_PROGRAM:
        return f"error: the program has more than {LONGEST_PROGRAM} characters"
    return await run_program(call["code"])


async def run_program(code: str) -> str:
    """Run a program within the limits. Return what it printed, or text that begins with `error`."""
    words = [*wall(), sys.executable, "-I", "-S", "-c", _LIMITED]
    try:
        output, status = await run(words, code, seconds=SECONDS, longest_output=LONGEST_OUTPUT)
    except Stopped as stopped:
        return f"error: {stopped}"
    if status:
        return "error: the program failed or exceeded a limit"
    return output or "error: the program printed nothing"
