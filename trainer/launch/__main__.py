"""`python -m trainer.launch N ARGUMENTS…`: see `local.py`."""

from __future__ import annotations

import sys

from trainer.launch.local import main

if __name__ == "__main__":
    sys.exit(main())
