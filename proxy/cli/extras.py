"""Packages that only some commands need, and the extras of base-rl that install them."""

from __future__ import annotations

import importlib.util

from proxy.settings import ConfigurationError

_NEEDED_BY = {
    "embedded": ("the embedded engine", ("torch", "transformers", "safetensors")),
    "train": ("the trainer", ("torch", "transformers", "safetensors", "peft")),
    "demo": ("the demo's agent", ("openai",)),
}


def install_command(*extras: str) -> str:
    """Return the command that adds these extras to an installation from a clone."""
    return f"pip install -c constraints.txt -e '.[{','.join(extras)}]'"


def require_extras(*extras: str) -> None:
    """Raise ConfigurationError, with the command to run, unless the packages of every extra are installed."""
    absent = {extra: [name for name in _NEEDED_BY[extra][1] if not _is_installed(name)] for extra in extras}
    wanting = [extra for extra in extras if absent[extra]]
    if wanting:
        who = " and ".join(_NEEDED_BY[extra][0] for extra in wanting)
        packages = ", ".join(dict.fromkeys(name for extra in wanting for name in absent[extra]))
        raise ConfigurationError(
            f"{who} cannot start without {packages}: run, in the clone, {install_command(*wanting)}"
        )


def _is_installed(name: str) -> bool:
    # Found, not imported: importing torch takes seconds, and the proxy side never does.
    return importlib.util.find_spec(name) is not None
