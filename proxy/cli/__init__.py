"""The command line: `base-rl up`, `demo`, `runs`, `status`, `doctor`."""

from __future__ import annotations

from proxy.cli.commands import main

__all__ = ["main"]
