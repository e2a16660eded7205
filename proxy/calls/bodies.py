"""Read the body of a request as a call for one model, on a worker thread if the body is large."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import sha256

import msgspec

from proxy.calls import images
from proxy.calls.bounds import (
    HUGE_BYTES,
    LARGE_MESSAGES,
    LARGE_TOOLS,
    check_arguments,
    check_body,
    has_much_to_read,
)
from proxy.calls.call import ModelCall
from proxy.calls.runtime import ModelRuntime
from proxy.http.workers import Workers
from proxy.settings import RequestSettings

Parse = Callable[[bytes], ModelCall]
"""A dialect's reader of bodies, with the arguments that it takes from the model's runtime."""


class BodyReader:
    """Reads bodies within the bounds of `requests.*`."""

    def __init__(self, bounds: RequestSettings, workers: Workers) -> None:
        self._bounds = bounds
        self._workers = workers

    async def read(self, raw: bytes, parse: Parse, runtime: ModelRuntime, *, prompt_ids: bool = False) -> ModelCall:
        """Return the call that `parse` reads from the body. `prompt_ids`: the body may hold prompts of token ids.

        Raise what `parse` raises, and InvalidRequest for a body beyond the bounds.
        """
        if not has_much_to_read(raw):  # most bodies: handing them to a thread would cost more than reading them
            return self._parse(raw, parse, runtime, prompt_ids)
        try:
            call = await self._workers.run(partial(self._parse, raw, parse, runtime, prompt_ids))
            return msgspec.structs.replace(call, is_large=True)
        finally:
            if len(raw) > HUGE_BYTES:
                self._workers.trim_soon()

    async def digest(self, raw: bytes) -> bytes:
        """Return the SHA-256 of a body, by which equal requests are recognised."""
        if len(raw) > HUGE_BYTES:
            return await self._workers.run(lambda: sha256(raw).digest())
        return sha256(raw).digest()

    def _parse(self, raw: bytes, parse: Parse, runtime: ModelRuntime, prompt_ids: bool) -> ModelCall:
        # First, on the raw bytes: decoding is what the bounds protect from.
        check_body(raw, self._bounds, prompt_ids=prompt_ids)
        body, warnings = _without_images(raw) if runtime.names_images else (raw, ())
        call = parse(body)
        if len(raw) > HUGE_BYTES:
            check_arguments(call.messages, self._bounds)
        is_large = len(call.messages) > LARGE_MESSAGES or len(call.tools or ()) > LARGE_TOOLS
        return msgspec.structs.replace(
            call, is_large=is_large, body_bytes=len(raw), warnings=(*call.warnings, *warnings)
        )


def _without_images(raw: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Return the body with a text in the place of every image, and a warning if there was one."""
    body, count = images.named(raw)
    if not count:
        return body, ()
    what = "an image" if count == 1 else f"each of {count} images"
    return body, (f"the model reads text only: it was told [image] in the place of {what}",)
