"""`python -m proxy [--config FILE]`: serves until SIGTERM or SIGINT."""

from __future__ import annotations

import sys

from proxy.contract.importing import importing

with importing():
    from proxy.server import main

if __name__ == "__main__":
    sys.exit(main())
