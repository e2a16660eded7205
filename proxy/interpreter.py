"""How a process that serves looks for garbage, takes memory, and lets its threads take turns."""

from __future__ import annotations

import ctypes
import gc
import sys

GARBAGE_THRESHOLDS = (10_000, 20, 20)
"""Objects, and collections of the generation before. A call leaves next to none behind, and has thousands in hand."""

SWITCH_SECONDS = 0.0002
"""How long a thread that computes keeps others waiting. One that writes to the store comes back from the database
many times in a transaction, and would wait for Python's five milliseconds each time that another decodes what it
read: the slowest of 48 claims took 75 ms so, and takes 42."""


LARGE_BLOCK = 1 << 20
"""Bytes. Larger blocks are pages of their own, which go back to the operating system when they are freed. By default
glibc raises this bound to 32 MiB as soon as such a block was freed, and then keeps what the next ones leave."""

_M_MMAP_THRESHOLD = -3
"""glibc's name for that bound (malloc.h)."""


def settle_interpreter() -> None:
    """To be called when everything has started. What is there then (modules, tokenizer, templates) stays as long as
    the process: a full collection that looks at all of it takes a tenth of a second, in which no call is answered."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:  # there is none without glibc
        set_option(_M_MMAP_THRESHOLD, LARGE_BLOCK)
