"""The wait of an agent beside all others: `python -m benchmarks.chaos.probe URL KEY FILE`.

It requests `/healthz` and `/v1/models` alternately, forty times a second, in a process of its own, so that only the
proxy's event loop is measured. Each line of the file is the time (Unix seconds) and the wait (seconds), or `-`
without an answer.
"""

from __future__ import annotations

import argparse
import http.client
import time
from itertools import cycle
from pathlib import Path
from urllib.parse import urlsplit

EVERY_S = 0.025
_ANSWER_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    parts = urlsplit(options.url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=_ANSWER_S)
    headers = {"authorization": f"Bearer {options.key}"}
    with options.file.open("a", buffering=1) as file:
        for path in cycle(("/healthz", "/v1/models")):
            began, at = time.perf_counter(), time.time()
            try:
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                answer.read()
                waited = f"{time.perf_counter() - began:.6f}" if answer.status == 200 else "-"
            except (OSError, http.client.HTTPException):
                connection.close()
                waited = "-"
            file.write(f"{at:.3f} {waited}\n")
            time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
