"""The folder that `base-rl init` makes: an example's own files, under the reader's names."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tomllib
from pathlib import Path

from proxy.cli.console import Refused

TINY = "tiny"
"""The model that belongs to the example."""

_AGENT_FILES = ("agent.py", "tasks.py", "tools.py", "customer.py", "reward.py")
_SHARED = "sandbox"
"""A module of `agents_examples` that several examples import."""
_DATA_FILES = ("tasks.jsonl", "documents.txt", "requirements.txt")
_NEEDED = ("agent.py", "reward.py", "tasks.jsonl", "config.toml", "checkpoint", "README.md")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_INSTALL = "pip install -r requirements.txt"

_README = """# {run}

Made by `base-rl init` from the example `{example}`.

| file | what it is |
| --- | --- |
| `agent.py` | the agent; `attempt(task, session)` makes one attempt at a task |
| `tasks.jsonl` | the tasks, one JSON object per line; `id` names a task |
| `reward.py` | `reward(task, result)` scores what the attempt returned |
| `config.toml` | the run |

```bash
{commands}
```

The admin page, whose address `base-rl up` prints, shows whether the reward rises. An agent in another language is a
program: `base-rl attempts {run} --tasks tasks.jsonl --command ./my-agent` (`base-rl attempts --help`).
"""


def examples() -> dict[str, str]:
    """Return the examples that a folder can begin with, with the first line of their README. Raise Refused if they
    are not installed."""
    found = {}
    for directory in sorted(_root().iterdir()):
        if all((directory / name).exists() for name in _NEEDED):
            found[directory.name] = (directory / "README.md").read_text().partition("\n")[0].lstrip("# ")
    if not found:
        raise Refused("the examples are not installed; run this from a clone of base-rl")
    return found


def valid_name(text: str) -> str:
    """Return a run's name made of a text."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64]
    return name or "agent"


def make_folder(folder: Path, *, example: str, run: str, model: str) -> list[str]:
    """Make the folder and return the commands that start base-rl and the attempts there.

    The folder appears whole or not at all. Raise Refused if it exists with something in it, if the name is none that
    a run can have, or if the model's directory is absent.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} exists already: name a new folder")
    if not _NAME.fullmatch(run):
        raise Refused(f"{run!r} is no name for a run: letters, digits, `.`, `_` and `-`, the first a letter or digit")
    looks_like_path = model.startswith((".", "/", "~"))
    if looks_like_path and not Path(model).expanduser().is_dir():
        raise Refused(f"there is no directory {model}")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    source = _root() / example
    _copy_agent(source, partial)
    if model == TINY:
        shutil.copytree(source / "checkpoint", partial / "checkpoint")
    place = "checkpoint" if model == TINY else str(Path(model).expanduser().resolve()) if looks_like_path else model
    (partial / "config.toml").write_text(_configuration((source / "config.toml").read_text(), run, place))
    attempts = f"base-rl attempts {run} --tasks tasks.jsonl --function agent.py:attempt --reward reward.py:reward"
    up = "base-rl up --config config.toml"
    install = [_INSTALL] if (partial / "requirements.txt").exists() else []
    commands = [f"cd {folder}", *install, up, f"{attempts} --passes 0"]
    block = "\n".join([*install, f"{up}    # in one terminal", commands[-1]])
    (partial / "README.md").write_text(_README.format(run=run, example=example, commands=block))
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
    return commands


def _copy_agent(source: Path, folder: Path) -> None:
    """Copy an example's own modules and data, and the shared module if they import it."""
    modules = [source / name for name in _AGENT_FILES if (source / name).exists()]
    if any(f"from agents_examples.{_SHARED} import" in module.read_text() for module in modules):
        modules.append(source.parent / f"{_SHARED}.py")
    for module in modules:
        (folder / module.name).write_text(_standing_alone(module.read_text(), source.name))
    for name in _DATA_FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)


def _root() -> Path:
    found = importlib.util.find_spec("agents_examples")
    if found is None or not found.submodule_search_locations:
        raise Refused("the examples are not installed; run this from a clone of base-rl")
    return Path(next(iter(found.submodule_search_locations)))


def _standing_alone(code: str, example: str) -> str:
    """Return an example's module as one of a folder: what it imports lies beside it."""
    code = code.replace(f"from agents_examples.{example}.", "from ").replace(f"agents_examples.{example}.", "")
    return code.replace("from agents_examples.", "from ")


def _configuration(text: str, run: str, model: str) -> str:
    """Return the example's configuration with another name and a model."""
    given = tomllib.loads(text)["run"]["name"]
    lines = []
    for line in text.splitlines():
        if re.match(r'name\s*=\s*"', line) and given in line:
            lines += [f"name = {json.dumps(run)}", f"model = {json.dumps(model)}"]
        elif line == f"[trainer.runs.{given}]":
            lines.append(f"[trainer.runs.{json.dumps(run)}]")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"
