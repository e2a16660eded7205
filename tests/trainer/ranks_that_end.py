"""`python -m tests.trainer.ranks_that_end refuses|dies|waits DIRECTORY`: a rank of the trainer that does not train.

The second rank refuses to go on, or is killed. The first one loses it, as in a failed collective, or waits until it
is asked to end. They synchronise with each other and with the test by fifos in the directory.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from trainer.__main__ import main as trainer_main
from trainer.errors import ConfigurationError
from trainer.train import process

RANK = os.environ["RANK"]


def course(how: str, directory: Path) -> None:
    if how == "waits":
        (directory / RANK).write_text(str(os.getpid()))
    elif how == "refuses" and RANK == "0":
        (directory / "1").read_text()
        raise RuntimeError("Connection closed by peer")
    elif how == "refuses":
        raise ConfigurationError("trainer.device: no such thing at this rank")
    elif RANK == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # a signal just before a wait would otherwise be lost
        threading.Event().wait(0.2)


def main(how: str, directory: Path) -> int:
    found: Any = process
    found.train = lambda *_: course(how, directory)
    status = trainer_main(["--set", "run=policy", "--set", "api_key=k", "--set", "proxy_url=http://127.0.0.1:9"])
    if how == "refuses":  # both have reported before the first of them ends
        if RANK == "1":
            (directory / "1").write_text("said")
            (directory / "0").read_text()
        else:
            (directory / "0").write_text("said")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
