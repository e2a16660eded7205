"""Settings of the interpreter for a process that serves: garbage collection, memory, switching between threads."""

from __future__ import annotations

import ctypes
import gc
import sys

GARBAGE_THRESHOLDS = (10_000, 20, 20)
"""Allocations before a collection of the youngest generation, then collections before one of the next. A call leaves
almost no garbage, but has thousands of live objects, which frequent collections would traverse."""

SWITCH_SECONDS = 0.0002
"""Longest time that a computing thread keeps the interpreter while others wait. The store's writer returns from the
database many times in a transaction; with Python's default of 5 ms it waited that long each time another thread
decoded rows: the slowest of 48 claims took 75 ms, and takes 42 with this value."""


LARGE_BLOCK = 1 << 20
"""Bytes. Larger blocks get pages of their own, which return to the operating system when they are freed. Unless it is
set, glibc raises this bound to up to 32 MiB once such a block has been freed, and the memory of later blocks
stays."""

# glibc's name for that bound (malloc.h).
_M_MMAP_THRESHOLD = -3


def settle_interpreter() -> None:
    """Apply the settings; call it when everything has started.

    Objects that exist then (modules, tokeniser, templates) live as long as the process. They are excluded from
    collection: a full one that traverses them takes a tenth of a second, during which no call is answered.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:  # absent without glibc
        set_option(_M_MMAP_THRESHOLD, LARGE_BLOCK)
