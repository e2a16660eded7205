"""A relay between the proxy and its engine that can change the engine's answers.

`python -m benchmarks.chaos.liar --engine PORT --switch FILE --told FILE` prints the port that it listens on. While
the switch's file exists, it changes some pieces of answers by one of `LIES` each, and appends the lie's name to the
other file. It never changes lengths, so that HTTP's framing stays valid and the lie reaches the proxy's parser.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LOGPROB = re.compile(rb"\[(-\d+\.\d+(?:e-?\d+)?), ?(\d+), ?null\]")
_SHARE = 0.1
"""Share of the pieces with log-probabilities that are changed."""
_SILENCE_S = 3.0


def _logprob(text: bytes) -> Callable[[re.Match[bytes]], bytes]:
    return lambda found: b"[%b,%b,null]" % (text, found[2])


def _token(text: bytes) -> Callable[[re.Match[bytes]], bytes]:
    return lambda _: b"[-1,%b,null]" % text


LIES: dict[str, Callable[[re.Match[bytes]], bytes]] = {
    "a positive log-probability": _logprob(b"9.5"),
    "an infinite log-probability": _logprob(b"-1e999"),
    "not a number": _logprob(b"NaN"),
    "a token beyond the vocabulary": _token(b"9999999"),
    "a negative token": _token(b"-1"),
    "a missing log-probability": lambda _: b"",
}
OTHER_LIES = ("silence", "an answer cut short")


def changed(piece: bytes, lie: str) -> bytes | None:
    """Return `piece` with its first log-probability replaced by one of equal length; None if it has none, or none
    that is long enough."""
    found = _LOGPROB.search(piece)
    if found is None:
        return None
    said = LIES[lie](found)
    room = len(found[0]) - len(said)
    if room < 0:
        return None
    return piece[: found.start()] + said + b" " * room + piece[found.end() :]


class Liar:
    def __init__(self, engine_port: int, switch: Path, told: Path, seed: int) -> None:
        self._engine_port = engine_port
        self._switch = switch
        self._told = told
        self._random = random.Random(seed)

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection from the proxy."""
        try:
            engine_reader, engine_writer = await asyncio.open_connection("127.0.0.1", self._engine_port)
        except OSError:
            writer.close()
            return
        forth = asyncio.create_task(self._copy(reader, engine_writer))
        back = asyncio.create_task(self._copy(engine_reader, writer, may_lie=True))
        await asyncio.wait((forth, back), return_when=asyncio.FIRST_COMPLETED)
        for task in (forth, back):
            task.cancel()
        await asyncio.wait((forth, back))
        for end in (writer, engine_writer):
            end.close()

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, may_lie: bool = False
    ) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while piece := await source.read(1 << 16):
                if may_lie and self._switch.exists() and self._random.random() < _SHARE and _LOGPROB.search(piece):
                    lie = self._random.choice((*LIES, *OTHER_LIES))
                    if lie == "silence":
                        self._note(lie)
                        await asyncio.sleep(_SILENCE_S)
                    elif lie == "an answer cut short":
                        self._note(lie)
                        target.write(piece[: len(piece) // 2])
                        return
                    elif (said := changed(piece, lie)) is not None:
                        self._note(lie)
                        piece = said
                target.write(piece)
                await target.drain()

    def _note(self, lie: str) -> None:
        with self._told.open("a") as file:
            file.write(lie + "\n")


async def _serve(options: argparse.Namespace) -> None:
    liar = Liar(options.engine, options.switch, options.told, options.seed)
    server = await asyncio.start_server(liar.relay, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=int, required=True, help="the engine's port on loopback")
    parser.add_argument("--switch", type=Path, required=True, help="lies are told while this file exists")
    parser.add_argument("--told", type=Path, required=True, help="the name of each lie is appended to this file")
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
