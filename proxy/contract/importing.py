"""Imports at the start of a process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while modules are imported, and exempt all objects of that time from later collections.

    Modules stay as long as the process. To walk them again and again while more are imported takes a fifth of the
    time of all imports, of the proxy as of the trainer.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
