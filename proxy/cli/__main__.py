"""`python -m proxy.cli`: the same as `base-rl`."""

from __future__ import annotations

from proxy.cli.commands import main

if __name__ == "__main__":
    main()
