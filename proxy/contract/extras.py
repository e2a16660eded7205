"""Packages that only some commands need, and the extras of base-rl that install them."""

from __future__ import annotations

import importlib.util

_NEEDED_BY = {
    "embedded": ("the embedded engine", ("torch", "transformers", "safetensors")),
    "train": ("the trainer", ("torch", "transformers", "safetensors", "peft")),
    "demo": ("the demo's agent", ("openai",)),
    "celery": ("jobs through Redis", ("celery", "redis")),
    "ray": ("base-rl up --ray", ("ray",)),
    "litellm": ("judges at providers without a base_url", ("litellm",)),
}


def install_command(*extras: str) -> str:
    """Return the command that adds these extras to an installation from a clone."""
    return f"pip install -c constraints.txt -e '.[{','.join(extras)}]'"


def missing_packages(*extras: str) -> str | None:
    """Return which packages of the extras are not installed, with the command to run; None if all are."""
    absent = {extra: [name for name in _NEEDED_BY[extra][1] if not _is_installed(name)] for extra in extras}
    wanting = [extra for extra in extras if absent[extra]]
    if not wanting:
        return None
    who = " and ".join(_NEEDED_BY[extra][0] for extra in wanting)
    packages = ", ".join(dict.fromkeys(name for extra in wanting for name in absent[extra]))
    return f"{who} cannot start without {packages}: run, in the clone, {install_command(*wanting)}"


def _is_installed(name: str) -> bool:
    # Found, not imported: importing torch takes seconds, and the proxy side never does.
    return importlib.util.find_spec(name) is not None
