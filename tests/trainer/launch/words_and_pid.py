"""A stand-in for the trainer: it writes its process id and its arguments."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.stdout.write(" ".join((str(os.getpid()), *sys.argv[1:])) + "\n")
